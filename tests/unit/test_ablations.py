"""The ablations: every model can be built, and the two of a pair differ in what is compared alone."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from worldmodel import WorldModel
from worldmodel.config import ActionConfig, TrainConfig
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


@pytest.mark.slow
def test_every_variant_is_timed_trained_judged_and_drawn(
    make_model: Callable[..., WorldModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the training, whose steps take a second each for the first stage and two for the second."""
    model, trained = (
        make_model(image_size=64, world="shapes", action=ActionConfig(text={"max_tokens": 160})),
        {},
    )

    def train(settings: dict[str, Any], run: Path, processes: int, overrides: list[str]) -> Path:
        assert overrides == ["seed=3"]
        trained[run.name] = {name: stage["steps"] for name, stage in settings["stages"].items()}
        run.mkdir(parents=True)
        records = [
            {"stage": name, "time": 60.0 * index, "step_s": 1.0 + index, "rounds/changed": 0.5}
            for index, name in enumerate(settings["stages"])
        ]
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
        return model.save_pretrained(run / "model", dtype=torch.float32)

    monkeypatch.setitem(BENCHMARK["main"].__globals__, "train", train)
    words = ["queries", "--minutes", "10", "--num-samples", "3", "--set", "seed=3"]
    words += ["--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["ablations.py", *words])
    BENCHMARK["main"]()
    runs = ("a-query-per-cell", "a-query-per-2-x-2-cells")
    timing = dict.fromkeys(("alignment", "state"), BENCHMARK["CALIBRATION_STEPS"])
    steps = {"alignment": 60, "state": 270}  # a tenth of ten minutes, and the rest
    assert trained == {f"{run}-timing": timing for run in runs} | dict.fromkeys(runs, steps)
    found = json.loads((tmp_path / "queries" / "figures.json").read_text())
    for label in ABLATIONS["queries"]():
        strict = found[label]["held-out combinations"]["strict"]
        assert strict["n"] == 3 and 0 <= strict["low"] <= strict["value"] <= strict["high"] <= 1
        assert sum(name.startswith("paraphrases: ") for name in found[label]) > 1
    with Image.open(tmp_path / "queries" / "curves.png") as image:
        width, height = image.size
    assert width > height > 100
    BENCHMARK["main"]()  # nothing is trained again
    assert len(trained) == 4
