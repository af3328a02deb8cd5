"""Configurations: defaults, files and overrides."""

import dataclasses
from pathlib import Path
from typing import get_type_hints

import pytest

from worldmodel import config as configs
from worldmodel.config import (
    ConditionAdapterConfig,
    GeneratorConfig,
    SourceConfig,
    StateConfig,
    TrainConfig,
    WorldModelConfig,
)
from worldmodel.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text)
    return path


def test_a_config_has_exactly_the_sources_that_it_names(tmp_path: Path) -> None:
    path = write(tmp_path, "data: {sources: {mine: {kind: clips, path: a.csv}}}")
    assert configs.load(path).data.sources == {"mine": SourceConfig(kind="clips", path="a.csv")}
    changed = configs.load(path, ["data.sources.mine.weight=2"])
    assert changed.data.sources == {"mine": SourceConfig(kind="clips", path="a.csv", weight=2.0)}
    assert configs.load(write(tmp_path, "seed: 1")).data.sources == {}


def test_another_architecture_on_the_command_line_replaces_that_of_the_file(tmp_path: Path) -> None:
    """The arguments of one class are not those of another; without a class they change single ones."""
    path = write(
        tmp_path,
        "model: {condition_adapter: {kind: prompt}, "
        "generator: {width: 64, architecture: {_class_name: A, layers: 2, wide: 1}}}",
    )
    other = configs.load(path, ["model.generator={architecture: {_class_name: B, layers: 3}}"])
    assert other.model.generator == GeneratorConfig(width=64, architecture={"_class_name": "B", "layers": 3})
    changed = configs.load(path, ["model.generator.architecture.layers=3"])
    assert changed.model.generator is not None
    assert changed.model.generator.architecture == {"_class_name": "A", "layers": 3, "wide": 1}


def schemas(schema: type) -> set[type]:
    """A dataclass and those of its fields."""
    found = {schema}
    for hint in get_type_hints(schema).values():
        for kind in (hint, *getattr(hint, "__args__", ())):
            if dataclasses.is_dataclass(kind) and kind not in found:
                found |= schemas(kind)
    return found


def test_no_mapping_has_a_default_that_could_be_merged() -> None:
    assert len(schemas(TrainConfig)) >= 10
    for schema in schemas(TrainConfig):
        for field in dataclasses.fields(schema):
            if field.default_factory is not dataclasses.MISSING:
                assert not isinstance(field.default_factory(), dict) or field.default_factory() == {}, field


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        (GeneratorConfig, {"width": 192, "num_heads": 5}),
        (GeneratorConfig, {"width": 24, "num_heads": 3}),  # too narrow for positions
        (GeneratorConfig, {"num_layers": 0}),
        (GeneratorConfig, {"condition_dropout": 2.0}),
        (ConditionAdapterConfig, {"num_heads": 0}),
        (StateConfig, {"width": 64, "num_heads": 5}),
        (StateConfig, {"merge": 0}),
        (WorldModelConfig, {"fps": 0}),
        (WorldModelConfig, {"num_inference_steps": -1}),
    ],
)
def test_sizes_that_cannot_run_are_refused(part: type, wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        part(**wrong)
