"""Backbones from folders and commits, and the language models inside vision-language models."""

import copy
import dataclasses
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from worldmodel.config import BackboneConfig
from worldmodel.errors import ConfigError, ModelError
from worldmodel.models.backbone.causal_lm import Backbone
from worldmodel.models.backbone.families import MODEL_TYPES
from worldmodel.models.backbone.prefix_cache import PrefixCache
from worldmodel.models.loading import deferred
from worldmodel.parallel.layout import Layout

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def config_of(model_type: str = "qwen3", **settings: Any) -> BackboneConfig:
    settings = {"head_dim": 8, **settings} if model_type != "qwen2" else settings
    return BackboneConfig(architecture={"model_type": model_type, **SMALL, **settings})


@pytest.fixture
def folder(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    Backbone.from_config(config_of(), tokenizer).save_pretrained(tmp_path / "backbone")
    return tmp_path / "backbone"


# Models that see


def seeing(model_type: str, tie: bool, vocab_size: int) -> PreTrainedModel:
    sections = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 1, 1]}
    text: dict[str, Any] = {**SMALL, "vocab_size": vocab_size, "rope_parameters": sections}
    text |= {"head_dim": 8} if model_type == "qwen3_vl" else {}
    tower = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    text |= {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type, text_config=text, vision_config=tower, tie_word_embeddings=tie, initializer_range=0.2
    )
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases too, and norms that are not all ones
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_language_model_of_a_vision_language_model(
    model_type: str, tie: bool, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    whole = seeing(model_type, tie, len(tokenizer))
    whole.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    backbone = Backbone.from_pretrained(tmp_path).eval()
    assert backbone.model.config.model_type == {"qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}[model_type]
    assert not any("visual" in name for name in backbone.state_dict())
    assert tie == (
        backbone.model.get_output_embeddings().weight is backbone.model.get_input_embeddings().weight
    )

    ids = torch.randint(0, len(tokenizer), (2, 23), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = whole(input_ids=ids, output_hidden_states=True)
        ours = backbone(backbone.embed(ids))
        torch.testing.assert_close(ours, theirs.hidden_states[-1], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(backbone.logits(ours), theirs.logits, atol=2e-4, rtol=1e-4)
        cache = backbone.new_cache()
        parts = [backbone(backbone.embed(part), cache) for part in ids.split([9, 14], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), ours, atol=2e-5, rtol=1e-4)

    backbone.save_pretrained(tmp_path / "plain")
    again = Backbone.from_pretrained(tmp_path / "plain")
    assert all(torch.equal(again.state_dict()[name], x) for name, x in backbone.state_dict().items())


def test_weight_names_of_older_checkpoints(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Checkpoints call the language model `model.` or `model.language_model.`, and come in several files."""
    whole = seeing("qwen2_5_vl", False, len(tokenizer))
    whole.save_pretrained(tmp_path / "one", max_shard_size="20KB")
    tokenizer.save_pretrained(tmp_path / "one")
    first = Backbone.from_pretrained(tmp_path / "one").state_dict()
    whole.save_pretrained(tmp_path / "two", save_original_format=False)
    tokenizer.save_pretrained(tmp_path / "two")
    second = Backbone.from_pretrained(tmp_path / "two").state_dict()
    assert all(torch.equal(second[name], x) for name, x in first.items())


# Families


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("granite", {"logits_scaling": 6.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}),
        ("cohere", {"logit_scale": 0.3}),
        ("cohere2", {"logit_scale": 0.3}),
        ("gemma2", {"final_logit_softcapping": 1.5}),
        ("gemma3_text", {"final_logit_softcapping": 1.5}),
        ("smollm3", {"no_rope_layers": [1, 0]}),
        ("olmo2", {}),
    ],
)
def test_logits_equal_the_original_model(
    model_type: str, settings: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> None:
    torch.manual_seed(0)
    backbone = Backbone.from_config(config_of(model_type, **settings), tokenizer).eval()
    plain = AutoModelForCausalLM.from_config(backbone.model.config, attn_implementation="eager").eval()
    plain.load_state_dict(backbone.model.state_dict())
    ids = torch.randint(0, len(tokenizer), (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = plain(input_ids=ids).logits
        ours = backbone.logits(backbone(backbone.embed(ids)))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("without", [(), ("pad_token",), ("pad_token", "bos_token")])
def test_texts_in_a_batch_have_the_states_of_each_alone(
    tokenizer: PreTrainedTokenizerBase, without: tuple[str, ...], side: str
) -> None:
    """Whatever the tokenizer calls padding, if anything, and on which side it would put it."""
    other = copy.deepcopy(tokenizer)
    other.padding_side = side
    for name in without:
        setattr(other, name, None)
    torch.manual_seed(0)
    backbone = Backbone.from_config(config_of(), other).eval()
    texts = [torch.tensor([4, 8, 15]), torch.tensor([16, 23, 42, 4, 8, 15, 16]), torch.tensor([9])]
    together = backbone.text_states(texts, 10)
    for text, states in zip(texts, together, strict=True):
        (alone,) = backbone.text_states([text], 10)
        torch.testing.assert_close(states, alone)
        assert states[: len(text) + 1].any(dim=1).all() and not states[len(text) + 1 :].any()


def test_a_tokenizer_without_an_end_is_named(tokenizer: PreTrainedTokenizerBase) -> None:
    other = copy.deepcopy(tokenizer)
    other.eos_token = None
    with pytest.raises(ModelError, match="eos_token"):
        Backbone.from_config(config_of(), other)


@pytest.mark.parametrize("model_type", ["gemma3_text", "olmo3", "mistral"])
def test_a_sliding_window_over_cached_rounds(model_type: str, tokenizer: PreTrainedTokenizerBase) -> None:
    torch.manual_seed(0)
    backbone = Backbone.from_config(config_of(model_type, sliding_window=7), tokenizer).eval()
    plain = AutoModelForCausalLM.from_config(backbone.model.config, attn_implementation="eager").eval()
    plain.load_state_dict(backbone.model.state_dict())
    ids = torch.randint(0, len(tokenizer), (1, 31), generator=torch.Generator().manual_seed(0))
    prefixes = PrefixCache(backbone)
    with torch.no_grad():
        expected = plain.base_model(input_ids=ids).last_hidden_state
        torch.testing.assert_close(backbone(backbone.embed(ids)), expected, atol=1e-4, rtol=1e-4)
        history = backbone.embed(ids)[0].split([9, 12, 1, 9])
        end = 0
        for count in range(1, 5):  # a round after the other, as a session runs them
            (group,) = prefixes.groups([history[:count]])
            hidden = backbone(group.embeds, group.cache)
            prefixes.store(group)
            begin, end = end, end + len(history[count - 1])
            torch.testing.assert_close(hidden, expected[:, begin:end], atol=1e-4, rtol=1e-4)


def test_unsupported_family(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ConfigError, match="'mamba'"):
        Backbone.from_config(BackboneConfig(architecture={"model_type": "mamba"}), tokenizer)
    with pytest.raises(ConfigError, match=r"backbone\.architecture: .*hidden_act"):
        Backbone.from_config(config_of(hidden_act=7), tokenizer)
    for model_type in ("mamba", None, ["qwen3"]):
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        with pytest.raises(ConfigError, match="type"):
            Backbone.from_pretrained(folder)


# Types


def test_bf16_weights_keep_the_dtype_of_inputs(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    whole, half = (
        Backbone.from_pretrained(folder).eval(),
        Backbone.from_pretrained(folder, dtype="bf16").eval(),
    )
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    embeds = torch.randn(2, 9, 32) * 32**-0.5
    with torch.no_grad():
        for arguments in ({}, {"layout": Layout.packed([[4, 5], [9]])}):
            expected, found = whole(embeds, **arguments), half(embeds, **arguments)
            assert found.dtype == torch.float32
            assert (found - expected).norm() < 0.03 * expected.norm()
        cache = half.new_cache()
        steps = [half(part, cache) for part in embeds.split([5, 4], dim=1)]
        assert (torch.cat(steps, dim=1) - whole(embeds)).norm() < 0.03 * whole(embeds).norm()
        assert half.decode_text(embeds[:1], half.new_cache(), 3) is not None
    embeds.requires_grad_()
    half(embeds).sum().backward()
    assert embeds.grad is not None
    assert embeds.grad.dtype == torch.float32


def test_random_weights_in_bf16(tokenizer: PreTrainedTokenizerBase) -> None:
    made = Backbone.from_config(dataclasses.replace(config_of(), dtype="bf16"), tokenizer)
    assert {parameter.dtype for parameter in made.parameters()} == {torch.bfloat16}
    with pytest.raises(ConfigError, match="fp8"):
        Backbone.from_config(dataclasses.replace(config_of(), dtype="fp8"), tokenizer)


def test_random_weights_with_a_given_vocabulary(tokenizer: PreTrainedTokenizerBase) -> None:
    made = Backbone.from_config(config_of(vocab_size=700, eos_token_id=5), tokenizer)
    assert made.model.get_input_embeddings().weight.shape[0] == 700 > len(tokenizer)
    assert made.model.config.eos_token_id == tokenizer.eos_token_id
    with pytest.raises(ConfigError, match="vocab_size is 9"):
        Backbone.from_config(config_of(vocab_size=9), tokenizer)


def same(found: torch.nn.Module, wanted: torch.nn.Module) -> None:
    """Assert that weights and outputs are equal, bit for bit, and that the same weights are tied."""
    assert [name for name, _ in found.named_parameters()] == [name for name, _ in wanted.named_parameters()]
    held = dict(found.named_parameters()) | dict(found.named_buffers())
    for name, tensor in [*wanted.named_parameters(), *wanted.named_buffers()]:
        assert held[name].dtype == tensor.dtype, name
        assert torch.equal(held[name], tensor), name


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_deferred_loading(
    model_type: str, tie: bool, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    made = Backbone.from_config(config_of(model_type, tie_word_embeddings=tie), tokenizer)
    made.model.save_pretrained(tmp_path, max_shard_size="20KB")
    tokenizer.save_pretrained(tmp_path)
    dtype, chance = "bf16" if tie else "fp32", torch.get_rng_state()
    with deferred.loading():
        left = Backbone.from_pretrained(tmp_path, dtype=dtype)
    assert all(parameter.is_meta for parameter in left.parameters())
    deferred.materialize(left, torch.device("cpu"))
    deferred.load_shards(left)
    assert torch.equal(torch.get_rng_state(), chance)
    same(left, Backbone.from_pretrained(tmp_path, dtype=dtype))


@pytest.mark.parametrize("equal", [False, True])
def test_equal_embeddings_are_tied_by_deferred_loading(
    equal: bool, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    made = Backbone.from_config(config_of(tie_word_embeddings=True), tokenizer).model
    made.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    head = state["model.embed_tokens.weight"] + (0 if equal else 1)
    save_file({**state, "lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
    with deferred.loading():
        left = Backbone.from_pretrained(tmp_path)
    deferred.materialize(left, torch.device("cpu"))
    deferred.load_shards(left)
    assert (left.model.get_output_embeddings().weight is left.model.get_input_embeddings().weight) == equal
    same(left, Backbone.from_pretrained(tmp_path))


# Sources of weights


def test_local_folder_needs_no_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    Backbone.from_pretrained(folder)


@pytest.mark.parametrize("revision", [None, "main", "v1.0", COMMIT[:-1], COMMIT.upper()])
def test_hub_name_requires_a_commit(revision: str | None) -> None:
    with pytest.raises(ModelError, match="Qwen/Qwen3"):
        Backbone.from_config(BackboneConfig(pretrained="Qwen/Qwen3-0.6B", revision=revision))


def test_commit_is_loaded_from_the_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    config = BackboneConfig(pretrained="someone/something", revision=COMMIT)
    with pytest.raises(ModelError, match=COMMIT):
        Backbone.from_config(config)
    snapshots = tmp_path / "cache" / "models--someone--something" / "snapshots"
    snapshots.mkdir(parents=True)
    folder.rename(snapshots / COMMIT)
    made = Backbone.from_config(config)
    again = Backbone.from_pretrained(snapshots / COMMIT)
    assert all(torch.equal(made.state_dict()[name], x) for name, x in again.state_dict().items())


def test_only_matching_safetensors_are_loaded(folder: Path) -> None:
    model = Backbone.from_pretrained(folder).model
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
    with pytest.raises(ModelError, match="adapter_config"):
        Backbone.from_pretrained(folder)
    (folder / "adapter_config.json").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=folder.name):
        Backbone.from_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ModelError, match=folder.name):
        Backbone.from_pretrained(folder)
    state = dict(model.state_dict())
    state.pop("model.norm.weight")
    model.save_pretrained(folder, state_dict=state)
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        Backbone.from_pretrained(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="config"):
        Backbone.from_pretrained(folder)


MEASURE = """
import sys
from pathlib import Path
from worldmodel.models.backbone.causal_lm import Backbone
def kib(name):
    return next(int(row.split()[1]) for row in open("/proc/self/status") if row.startswith(name))
for folder, dtype in zip(sys.argv[1::2], sys.argv[2::2]):
    Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
    before = kib("VmRSS")
    backbone = Backbone.from_pretrained(folder, dtype=dtype)
    print((kib("VmHWM") - before) * 1024, sum(p.nbytes for p in backbone.parameters()))
    del backbone
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_peak_memory_of_loading(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Pages of the mapped file count as memory here, though the system may drop them at any time."""
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 3}
    for dtype in ("fp32", "bf16"):
        config = dataclasses.replace(config_of(**wide), dtype=dtype)
        Backbone.from_config(config, tokenizer).save_pretrained(tmp_path / dtype)
    cases = [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32")]
    arguments = [each for saved, dtype in cases for each in (str(tmp_path / saved), dtype)]
    measured = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, check=True
    )
    for (saved, _), row in zip(cases, measured.stdout.splitlines(), strict=True):
        peak, size = map(int, row.split())
        assert peak < 1.1 * (size + (tmp_path / saved / "model.safetensors").stat().st_size)
