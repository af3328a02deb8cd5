"""Data sources as arguments of commands: a folder, a table, `KIND:PATH`, or a source of a config."""

import importlib.resources
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from worldmodel import config as configs
from worldmodel.config import DataConfig, SourceConfig, TrainConfig
from worldmodel.data.clips import EXTENSIONS, Files
from worldmodel.data.columns import OUTCOME, PRESETS, Row, source_fields
from worldmodel.data.files import unread_format
from worldmodel.data.sources import SOURCE_KINDS, stage_weights
from worldmodel.data.tables import first_rows, is_table, open_table
from worldmodel.errors import InputError

NUM_LOOKED_AT = 20
"""Rows of a table, from its beginning, by which its columns and the folder of its videos are found."""
SHARDS = (".tar", ".tar.gz", ".tgz")
VIDEO_COLUMNS = ("video", "path", "file")
"""Columns of a table that may name its videos; the first that it has is used."""


def read_source(argument: str) -> DataConfig:
    """Return a data source by its argument, as a config with this source alone.

    Args:
        argument: A LeRobot dataset; a table of clips, or a folder with one; a folder of videos, or of folders
            of numbered images; a tar file, or a folder of them; `KIND:PATH` with a kind of `data.sources`; or
            `CONFIG:NAME`, a source of a config. Columns of a table, and the folder of its videos, are found
            by their names.

    Raises:
        InputError: There is no such table, folder or source.
        ConfigError: The config cannot be read.
    """
    before, _, after = argument.partition(":")
    if after and before in SOURCE_KINDS and before != "clips":
        return DataConfig({before: SourceConfig(before, os.path.expanduser(after))})  # shells leave this ~
    path = Path(after if after and before == "clips" else argument).expanduser()
    if (path / "meta" / "info.json").is_file():
        return DataConfig({"lerobot": SourceConfig("lerobot", str(path))})
    if path.name.endswith(SHARDS):
        return DataConfig({"webdataset": SourceConfig("webdataset", str(path))})
    if reason := unread_format(path):
        raise InputError(f"{argument!r} is not a data source: {reason}.")
    if path.is_dir():
        if inner := next(path.glob("*/meta/info.json"), None):  # its videos alone would be without actions
            raise InputError(
                f"{argument!r} is a folder of LeRobot datasets; pass one, such as {str(inner.parents[1])!r}."
            )
        for end in SHARDS:
            if any(path.glob(f"*{end}")):
                return DataConfig({"webdataset": SourceConfig("webdataset", str(path / f"*{end}"))})
        path = _table_in(path)
    if path.is_dir() or (path.is_file() and is_table(path)):
        return DataConfig({path.stem: _clips(path)})
    if not (after and _is_config(before)):
        raise InputError(
            f"There are no data {argument!r}; pass a LeRobot dataset, a table of clips, a folder with "
            "one or of videos, KIND:PATH, or CONFIG:NAME for a source of a config."
        )
    config = configs.load(before)
    if after not in config.data.sources:
        raise InputError(f"{before} has no source {after!r}; it has {', '.join(config.data.sources)}.")
    return DataConfig({after: config.data.sources[after]})


def read_held_out(argument: str, training: str | None = None) -> tuple[DataConfig, DataConfig | None]:
    """Return the held-out part of data, and the part for training, if there is one.

    Args:
        argument: As for `read_source`, whose episodes are all held out, but for a LeRobot dataset that
            `worldmodel data split` has divided; or a config, whose held-out part is its `validation.source`,
            and whose part for training is the source of the highest weight.
        training: The part for training, as for `read_source`.

    Raises:
        InputError: The config holds nothing out, or both parts are the same.
    """
    before, _, name = argument.partition(":")
    if _is_config(argument):
        held, trained = _parts(argument, configs.load(argument))
    elif name and _is_config(before):
        held, trained = read_source(argument), None
        _check_untrained(before, name, configs.load(before))
    else:
        held, trained = _divided(read_source(argument))
    if training is not None:
        trained = read_source(training)
    if trained is not None and [*held.sources.values()] == [*trained.sources.values()]:
        raise InputError(f"{training or argument!r} is also the held-out part; hold other episodes out.")
    return held, trained


def _divided(source: DataConfig) -> tuple[DataConfig, DataConfig | None]:
    """Return the two parts of a LeRobot dataset with a split; all of another source, and None."""
    ((name, settings),) = source.sources.items()
    whole = settings.kind == "lerobot" and settings.split == "train"
    if not (whole and Path(settings.path, "meta", "split.json").is_file()):
        return source, None
    return DataConfig({name: replace(settings, split="held-out")}), source


def _is_config(argument: str) -> bool:
    shipped = importlib.resources.files("worldmodel.configs").joinpath(f"{argument}.yaml")
    return Path(argument).suffix in (".yaml", ".yml") or (not Path(argument).exists() and shipped.is_file())


def _parts(argument: str, config: TrainConfig) -> tuple[DataConfig, DataConfig | None]:
    name, sources = config.validation.source, config.data.sources
    if name not in sources:
        raise InputError(
            f"{argument} holds no episodes out; set validation.source to a source with weight 0, or pass a "
            f"source as {argument}:NAME."
        )
    _check_untrained(argument, name, config)
    others = [each for each in sources if each != name]
    trained = max(others, key=lambda each: sources[each].weight, default=None)
    training = None if trained is None else DataConfig({trained: sources[trained]})
    return DataConfig({name: sources[name]}), training


def _check_untrained(path: str, name: str, config: TrainConfig) -> None:
    for stage, settings in config.stages.items():
        if stage_weights(config.data, settings).get(name):
            raise InputError(
                f"{path} trains stage {stage} on {name!r}, so it is not held out; set its weight to 0."
            )


def _table_in(folder: Path) -> Path:
    """Return the table of a folder: clips.csv or the like, or the only one; without any, the folder."""
    # Metadata is often in json; a table of that kind is named itself.
    tables = sorted(path for path in folder.iterdir() if is_table(path) and path.suffix != ".json")
    named = [path for path in tables if path.stem == "clips"] or tables or [folder]
    if len(named) != 1:
        found = ", ".join(path.name for path in named)
        raise InputError(f"{str(folder)!r} has the tables {found}; pass one table.")
    return named[0]


def _clips(path: Path) -> SourceConfig:
    """Return a table as a source: with the columns that have the name of a field, or those of a preset."""
    table = open_table(path)
    try:
        preset = next((name for name, each in PRESETS.items() if each.needed <= {*table.columns}), "")
        columns = {} if preset else {name: name for name in table.columns if name in source_fields()}
        if {*OUTCOME} <= {*table.columns}:
            columns |= {column: column for column in OUTCOME}
        rows = list(first_rows(table, NUM_LOOKED_AT))
        named = next((name for name in VIDEO_COLUMNS if name in table.columns), "") or _files_in(rows)
        if preset:
            root = _root(
                path.parent, [each.format_map(row) for row in rows for each in PRESETS[preset].files]
            )
            return SourceConfig("clips", str(path), root=root, columns=columns, preset=preset)
    finally:
        table.close()
    if not named:
        raise InputError(
            f"{str(path)!r} has no column {', '.join(VIDEO_COLUMNS)}, and none that names videos; name its "
            "columns in a config and pass CONFIG:NAME."
        )
    root = "" if path.is_dir() else _root(path.parent, [str(row.get(named, "")) for row in rows])
    return SourceConfig("clips", str(path), root=root, columns={**columns, "video": named})


def _files_in(rows: Sequence[Row]) -> str:
    """Return the first column whose cells end as the names of videos do; empty if there is none."""
    for column in rows[0] if rows else ():
        cells = [row.get(column) for row in rows]
        if all(isinstance(cell, str) and Path(cell).suffix.lower() in EXTENSIONS[1:] for cell in cells):
            return column
    return ""


def _root(folder: Path, paths: Sequence[str]) -> str:
    """Return the folder in which videos are, if it is one in that of the table; empty for that itself."""
    inner = sorted(each for each in folder.iterdir() if each.is_dir())
    for root in (folder, *inner):
        if any((root / path).is_dir() for path in paths if path):  # of numbered images
            return "" if root == folder else str(root)
        with suppress(InputError):
            Files(tuple(str(root / Path(path)) for path in paths if path and "://" not in path)).read()
            return "" if root == folder else str(root)
    return ""
