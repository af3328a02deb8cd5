"""Settings of the loader and its sources."""

import dataclasses
from typing import Any

import pytest

from worldmodel.config import ActionConfig, DataConfig, SourceConfig, StageConfig, WorldModelConfig
from worldmodel.data import loader
from worldmodel.errors import ConfigError
from worldmodel.shapes.source import KEYS

SHAPES = {"shapes": SourceConfig("shapes")}
MODEL = WorldModelConfig(action=ActionConfig(keys=KEYS))
STAGE = StageConfig(steps=5, batch_size=4, rounds=1, tasks={"rounds": 0.5, "describe": 0.5})


@pytest.mark.parametrize(
    ("sources", "named"),
    [
        ({}, "data.sources is empty"),
        ({"a": SourceConfig()}, r"data.sources.a.kind is ''; use one of shapes, clips"),
        ({"a": SourceConfig(kind="shape")}, r"data.sources.a.kind is 'shape'; use one of shapes, clips"),
        ({"a": SourceConfig("shapes", split="tra")}, "'tra'"),
        ({"a": SourceConfig(kind="webdataset", path="/no/such/*.tar")}, "/no/such/"),
    ],
)
def test_invalid_sources(sources: dict[str, SourceConfig], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        loader.batches(DataConfig(sources), MODEL, STAGE, 0)


def test_rounds_of_another_length_than_the_worlds_are_refused() -> None:
    vision = dataclasses.replace(MODEL.vision, max_frames=65)
    with pytest.raises(ConfigError, match=r"model\.chunk_frames, now 128, to 8"):
        loader.batches(
            DataConfig(SHAPES), dataclasses.replace(MODEL, chunk_frames=128, vision=vision), STAGE, 0
        )


def test_a_stage_draws_from_sources_of_its_own() -> None:
    sources = {
        "easy": SourceConfig("shapes", split="single", weight=0.0),
        "hard": SourceConfig("shapes", split="compositions"),
    }
    data = DataConfig(sources)

    def drawn(**weights: float) -> set[str]:
        with loader.batches(data, MODEL, dataclasses.replace(STAGE, sources=weights), 0) as stream:
            return {episode.name.split("/")[0] for batch in next(iter(stream)) for episode in batch.episodes}

    assert drawn() == {"compositions"}
    assert drawn(easy=1.0) == {"single"}
    assert drawn(easy=1.0, hard=1.0) == {"single", "compositions"}
    with pytest.raises(ConfigError, match=r"'simple'.*\(easy, hard\)"):
        drawn(simple=1.0)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"num_workers": -1}, r"data.num_workers.*-1"),
        ({"prefetch": 0}, "data.prefetch.*0"),
        ({"window": 0}, "data.window.*0"),
        ({"timeout_s": 0.0}, "data.timeout_s.*0"),
        ({"max_bad_fraction": 2.0}, "data.max_bad_fraction.*2"),
        ({"sources": {"a": SourceConfig("shapes", weight=-1.0)}}, "data.sources.a.weight.*-1"),
    ],
)
def test_invalid_settings(setting: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        loader.batches(DataConfig(**{"sources": SHAPES, **setting}), MODEL, STAGE, 0)
