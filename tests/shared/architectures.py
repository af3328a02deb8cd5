"""Architectures of tiny parts of other libraries."""

from typing import Any

DECODER: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
QWEN_VL: dict[str, Any] = {
    "model_type": "qwen2_5_vl_vision",
    "depth": 2,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 8,
    "out_hidden_size": 48,
    "window_size": 32,
    "fullatt_block_indexes": [1],
}
TEXT = 32
"""Width of the text embeddings of video transformers."""
WAN: dict[str, Any] = {
    "_class_name": "WanTransformer3DModel",
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": TEXT,
    "freq_dim": 256,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
WAN_VAE: dict[str, Any] = {
    "_class_name": "AutoencoderKLWan",
    "base_dim": 3,
    "z_dim": 16,
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
}
