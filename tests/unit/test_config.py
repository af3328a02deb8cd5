"""Configurations: defaults, files and overrides."""

import dataclasses
from pathlib import Path
from typing import get_type_hints

from worldmodel import config as configs
from worldmodel.config import SourceConfig, TrainConfig


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
