"""The ablations: every model can be built, and the two of a pair differ in what is compared alone."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from worldmodel import WorldModel
from worldmodel.config import TrainConfig
from worldmodel.config.files import build
from worldmodel.train.start import build_model

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "ablations.py"))
ABLATIONS = BENCHMARK["ABLATIONS"]


def settings_of(name: str) -> list[dict[str, Any]]:
    """The settings of the two models of an ablation, with one step a stage."""
    both = [variant.settings for variant in ABLATIONS[name]().values()]
    for settings in both:
        for stage in settings["stages"].values():
            stage["steps"] = 1
    return both


def models_of(name: str, folder: Path) -> list[WorldModel]:
    return [
        build_model(build(TrainConfig, {**settings, "run_dir": str(folder / str(index))}))
        for index, settings in enumerate(settings_of(name))
    ]


@pytest.mark.usefixtures("smollm2")
@pytest.mark.parametrize("name", sorted(ABLATIONS))
def test_shares_of_the_time_add_up_and_name_all_stages(name: str) -> None:
    for variant in ABLATIONS[name]().values():
        assert set(variant.shares) == set(variant.settings["stages"])
        assert sum(variant.shares.values()) == pytest.approx(1)


@pytest.mark.usefixtures("smollm2")
def test_backbones_have_one_architecture_and_other_weights(tmp_path: Path) -> None:
    models = models_of("backbone", tmp_path)
    first, second = (dict(model.backbone.model.model.layers.named_parameters()) for model in models)
    assert {key: value.shape for key, value in first.items()} == {
        key: value.shape for key, value in second.items()
    }
    assert [model.config.backbone.pretrained for model in models] == [BENCHMARK["PRETRAINED"], None]
    stages = [settings["stages"]["single"]["train"]["backbone"] for settings in settings_of("backbone")]
    assert stages == [BENCHMARK["LORA"], {}]


@pytest.mark.usefixtures("smollm2")
def test_layers_differ_in_number(tmp_path: Path) -> None:
    assert [len(model.backbone.model.model.layers) for model in models_of("layers", tmp_path)] == [10, 30]


def test_query_merge_leaves_a_quarter_of_the_queries(tmp_path: Path) -> None:
    each, merged = models_of("queries", tmp_path)
    assert len(each.queries) == 4 * len(merged.queries)


def test_one_model_of_the_pair_has_no_state_alignment() -> None:
    aligned, direct = settings_of("alignment")
    assert "state" in aligned["stages"]
    assert "state" not in direct["stages"]
    assert not any(direct["stages"]["joint"]["loss_weights"].values())
    assert aligned["model"] == direct["model"]


@pytest.mark.usefixtures("smollm2")
def test_one_generator_of_the_pair_reads_text(tmp_path: Path) -> None:
    queries, written = models_of("states", tmp_path)
    assert (queries.config.condition_adapter.kind, written.config.condition_adapter.kind) == ("grid", "text")
    assert queries.config.generator == written.config.generator
