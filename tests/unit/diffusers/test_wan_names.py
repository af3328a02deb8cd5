"""Weights of Wan in the names of its own repository, and as the training of Self Forcing wraps them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file

from worldmodel.errors import ModelError
from worldmodel.models.loading import deferred, pipeline_folder


@pytest.mark.parametrize("late", [False, True], ids=["at once", "deferred"])
@pytest.mark.parametrize(
    "prefix", ["", "model.", "generator.model.", "generator_ema.model.", "model._fsdp_wrapped_module."]
)
def test_weights_of_the_original_names(tiny: Any, tmp_path: Path, prefix: str, late: bool) -> None:
    model = tiny.transformer("wan", seed=11)
    model.save_config(tmp_path)
    weights = tiny.original_names(model, prefix)
    assert f"{prefix}blocks.0.self_attn.norm_q.weight" in weights
    assert f"{prefix}blocks.1.cross_attn.o.bias" in weights
    if prefix == "generator_ema.model.":  # beside those that are not averaged, and the critic
        for seed, role in ((12, "generator"), (13, "critic")):
            other = tiny.transformer("wan", seed=seed)
            weights |= tiny.original_names(other, f"{role}.model.")
    save_file(weights, tmp_path / "self_forcing_dmd.safetensors")
    if late:
        with deferred.loading():
            loaded = pipeline_folder.load_model(tmp_path, [WanTransformer3DModel])
        deferred.materialize(loaded, torch.device("cpu"))
        deferred.load_shards(loaded)
    else:
        loaded = pipeline_folder.load_model(tmp_path, [WanTransformer3DModel])
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.state_dict().items())


def test_a_missing_weight_of_the_original_names_is_named(tiny: Any, tmp_path: Path) -> None:
    model = tiny.transformer("wan")
    model.save_config(tmp_path)
    weights = tiny.original_names(model, "model.")
    del weights["model.blocks.1.ffn.2.bias"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"blocks\.1\.ffn\.net\.2\.bias"):
        pipeline_folder.load_model(tmp_path, [WanTransformer3DModel])
