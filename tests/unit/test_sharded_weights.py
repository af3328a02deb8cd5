"""Base models in several files: one is missing, cut off, of another model, or has a weight twice."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from worldmodel.errors import ModelError
from worldmodel.models.loading import deferred, pretrained


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model in three files or more, with an index."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("sharded") / "model"
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="12KB")
    assert len(shards(folder)) >= 3
    return folder


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def loaded(folder: Path, defer: bool) -> dict[str, Tensor]:
    with deferred.loading(defer):
        model: Any = pretrained.load_model(LlamaForCausalLM, folder, torch.float32, "sdpa")
    deferred.materialize(model, torch.device("cpu"))
    deferred.load_shards(model)
    return model.state_dict()


def missing(folder: Path) -> None:
    shards(folder)[1].unlink()


def cut(folder: Path) -> None:
    shards(folder)[1].write_bytes(shards(folder)[1].read_bytes()[:-100])


def without_a_weight(folder: Path) -> None:
    """The index names a weight that its file does not have."""
    weights = load_file(shards(folder)[1])
    weights.pop(sorted(weights)[0])
    save_file(weights, shards(folder)[1], {"format": "pt"})


def of_another_model(folder: Path) -> None:
    """A file of the right name from a model of another size."""
    weights = {name: torch.zeros(3) for name in load_file(shards(folder)[1])}
    save_file(weights, shards(folder)[1], {"format": "pt"})


def twice(folder: Path) -> None:
    """A weight is in two files that the index names."""
    first, second = (load_file(path) for path in shards(folder)[:2])
    name = sorted(first)[0]
    save_file(second | {name: first[name] + 1}, shards(folder)[1], {"format": "pt"})


@pytest.mark.parametrize("defer", [False, True], ids=["at once", "deferred"])
@pytest.mark.parametrize("damage", [missing, cut, without_a_weight, of_another_model, twice])
def test_a_damaged_file_of_several_is_refused(
    sharded: Path, tmp_path: Path, damage: Callable[[Path], None], defer: bool
) -> None:
    """transformers fills what it does not find with random numbers, and such a model answers garbage."""
    folder = shutil.copytree(sharded, tmp_path / "model")
    damage(folder)
    with pytest.raises(ModelError, match="model"):
        loaded(folder, defer)


@pytest.mark.parametrize("defer", [False, True], ids=["at once", "deferred"])
def test_files_that_the_index_does_not_name_are_not_read(sharded: Path, tmp_path: Path, defer: bool) -> None:
    """A file of an earlier save."""
    expected = loaded(sharded, defer)
    folder = shutil.copytree(sharded, tmp_path / "model")
    strange = {name: torch.full_like(weight, 7.0) for name, weight in expected.items()}
    save_file(strange, folder / "model-00009-of-00009.safetensors", {"format": "pt"})
    found = loaded(folder, defer)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
