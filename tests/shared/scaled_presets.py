"""The presets `pan` and `pandora` with the structure of the large models, and small widths."""

from dataclasses import replace
from typing import Any

import architectures

from worldmodel import config as configs
from worldmodel.config import DataConfig, TrainConfig, TrainedConfig

WAN_VAE = architectures.WAN_VAE | {"base_dim": 4}
COG_VAE: dict[str, Any] = {
    "_class_name": "AutoencoderKLCogVideoX",
    "block_out_channels": (8, 8, 8, 8),
    "latent_channels": 16,
    "layers_per_block": 1,
    "norm_num_groups": 2,
}
TEXT = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 384}
DECODER = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
}


def scaled(name: str, method: str) -> TrainConfig:
    """Return a preset whose last stage trains the generator in full, or it and the backbone by LoRA."""
    config = configs.load(name)
    model, generator = config.model, dict(config.model.generator.architecture)
    text = generator["text_encoder"] | TEXT
    if name == "pan":
        sizes: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 48, "num_layers": 4}
        generator |= sizes | {"ffn_dim": 768, "text_dim": 64}
        tower = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4}
        tower |= {"out_hidden_size": 256, "fullatt_block_indexes": [1]}
        codec, size, queries, resampler = WAN_VAE, 32, 8, {}
    else:
        generator |= {"num_attention_heads": 6, "attention_head_dim": 32, "num_layers": 4}
        generator |= {
            "text_embed_dim": 64,
            "time_embed_dim": 64,
            "ofs_embed_dim": 64,
            "max_text_seq_length": 77,
        }
        tower = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
        }
        codec, size, queries, resampler = COG_VAE, 32, 8, {"width": 64, "num_tokens": 8}
    model = replace(
        model,
        chunk_frames=8,
        queries=queries,
        codec=replace(model.codec, pretrained=None, architecture=codec, image_size=size),
        backbone=replace(model.backbone, pretrained=None, architecture=model.backbone.architecture | DECODER),
        vision=replace(
            model.vision, encoder=None, architecture=model.vision.architecture | tower, **resampler
        ),
        generator=replace(model.generator, pretrained=None, architecture=generator | {"text_encoder": text}),
        condition_adapter=replace(model.condition_adapter, width=64, num_layers=2, num_heads=4),
    )
    stage = list(config.stages.values())[-1]
    stage = replace(stage, batch_size=2, ema_decay=0.9)
    if method == "lora":
        low = TrainedConfig(lora_rank=8)
        stage = replace(stage, train={"adapters": TrainedConfig(), "backbone": low, "generator.network": low})
    return replace(config, model=model, stages={"stage": stage}, data=DataConfig({}))
