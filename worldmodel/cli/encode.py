"""`worldmodel encode`: compute the latents of a table's clips once, before training on them."""

import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from worldmodel.cli.model import add_device_option, check_model
from worldmodel.cli.parser import Parser, option
from worldmodel.config import SourceConfig
from worldmodel.config.flow import PACKED
from worldmodel.errors import InputError

Size = tuple[int, int]
CONFIG = "flow.yaml"
"""The flow that does it, in the folder of its results."""


def main(argv: list[str]) -> None:
    """Encode the clips that are left, by a flow of which this is the only stage with a model."""
    args = _parser().parse_intermixed_args(argv)  # settings may follow options
    table = Path(args.table).expanduser().absolute()
    if not table.exists():
        raise InputError(f"There is no table {args.table!r}; check the path.")
    check_model(args.model)
    import yaml

    from worldmodel.cli import flow
    from worldmodel.models.loading import model_folder

    model = model_folder.read_config(model_folder.resolve(args.model))
    columns, out = dict(map(_column, args.column)), Path(args.out).expanduser().absolute()
    folder = table if table.is_dir() else table.parent
    root = str(Path(args.root).expanduser().absolute() if args.root else folder)
    if table.is_dir():
        table = _table_of(table, out)
    parts = {(): (table, out)}
    if args.bucket:
        parts = _parts(table, root, columns.get("video", ""), list(map(_bucket, args.bucket)), out)
    if "video" in columns:
        columns["address"] = columns.pop("video")
    for size, (part, folder) in parts.items():
        settings = {"model": args.model, "tasks": args.tasks.split(","), "dtype": args.dtype}
        settings |= {"texts": args.texts, "max_frames": args.max_frames, "device": args.device or ""}
        settings |= {"size": list(size)} if size else {}
        config: dict[str, Any] = {
            "folder": str(folder),
            "sources": {"table": {"kind": "table", "path": str(part), "root": root, "columns": columns}},
            "stages": {"fetch": {"settings": {"root": root}}, "encode": {"settings": settings}},
            # Pixels are only read again by a vision encoder.
            "pack": [name for name in PACKED if name != "video" or not model.vision.sees_latents],
        }
        file = folder / CONFIG
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        flow.main(["run", str(file), *args.overrides])
        if not _finish(file, args.overrides, size):
            return


def _table_of(folder: Path, out: Path) -> Path:
    """Return the table in a folder, or one of its videos, which is written."""
    from worldmodel.data.argument import read_source
    from worldmodel.data.facts import write_rows
    from worldmodel.data.tables import open_table

    (source,) = read_source(str(folder)).sources.values()
    if source.kind != "clips":
        raise InputError(
            f"{str(folder)!r} is of kind {source.kind}; pass a table of videos, or their folder."
        )
    if (table := Path(source.path)).is_file():
        return table
    table = out / "clips.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    with closing(open_table(folder)) as rows:
        write_rows(rows, range(len(rows)), table)
    return table


def _parts(
    table: Path, root: str, video: str, buckets: list[Size], out: Path
) -> dict[tuple[int, ...], tuple[Path, Path]]:
    """Write the rows of a table into one for each bucket; return these, and the folder of each."""
    import numpy as np

    from worldmodel.config import DataConfig
    from worldmodel.data.argument import read_source
    from worldmodel.data.buckets import nearest
    from worldmodel.data.facts import BARE, write_rows
    from worldmodel.data.tables import TableSource, open_table

    if video:
        source = SourceConfig("clips", str(table), root=root, columns={"video": video})
    else:
        (found,) = read_source(str(table)).sources.values()
        named = {field: column for field, column in found.columns.items() if field == "video"}
        source = replace(found, root=root, columns=named)
    with closing(TableSource("table", DataConfig({"table": source}), BARE)) as opened:
        sizes = opened.frame_sizes()
        if opened.starts is not None:  # a row is in the bucket of its first clip
            sizes = sizes[opened.starts[:-1]]
    # What cannot be read is left out by the flow of the first one, which says why.
    chosen = np.array(
        [nearest((height, width), buckets) if height else 0 for height, width in sizes.tolist()]
    )
    parts: dict[tuple[int, ...], tuple[Path, Path]] = {}
    with closing(open_table(table)) as rows:
        for number, size in enumerate(buckets):
            folder = out / f"{size[0]}x{size[1]}"
            if not (chosen == number).any():
                raise InputError(f"--bucket {folder.name} is nearest to the shape of no clip; leave it out.")
            folder.mkdir(parents=True, exist_ok=True)
            write_rows(rows, np.flatnonzero(chosen == number).tolist(), folder / "clips.jsonl")
            parts[size] = folder / "clips.jsonl", folder
    return parts


def _finish(file: Path, overrides: list[str], size: tuple[int, ...]) -> bool:
    """Say what there is now, and return whether all clips have ended; then what only the flow needed goes."""
    from worldmodel import config as configs
    from worldmodel.config.flow import FlowConfig
    from worldmodel.flow.buffer import open_buffer
    from worldmodel.flow.catalog.prune import Pruner
    from worldmodel.flow.log.status import StatusReader

    config = configs.load(file, overrides, FlowConfig)
    reader = StatusReader(config)
    try:
        status = reader.read()
        if not status.all_listed or any(stage.waiting for stage in status.stages):
            print("stopped; run the same command to go on")
            return False
        Pruner(reader.catalog, open_buffer(config.place("buffer"))).remove_ended(0.0, 0.0)
    finally:
        reader.close()
    left_out = sum(stage.dropped + stage.dead for stage in status.stages)
    if left_out:
        print(f"{left_out} clips were left out: worldmodel flow status {file} --stage encode")
    if not status.packed:
        raise InputError(f"None of the {status.listed} clips could be encoded; see the command above.")
    # By weight, each clip comes as often as those of the other buckets.
    more = f", size: {list(size)}, weight: {status.packed}" if size else ""
    source = f"{{kind: flow, path: {config.place('log')}{more}}}"
    print(f"{status.packed} clips; train on data.sources.NAME: {source}")
    return True


def _bucket(text: str) -> Size:
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if not found:
        raise InputError(f"--bucket is {text!r}; use HEIGHTxWIDTH in pixels, for example 48x80.")
    return int(found[1]), int(found[2])


def _column(text: str) -> tuple[str, str]:
    field, equals, column = text.partition("=")
    if not (field and equals and column):
        raise InputError(f"--column is {text!r}; use FIELD=COLUMN, for example text=caption.")
    return field, column


def _parser() -> Parser:
    parser = Parser(
        "worldmodel encode",
        "Compute the latents of a table's clips, and the text states of a generator that reads text, so\n"
        "that training runs neither codec nor text encoder. Run the same command again to go on after an\n"
        "interruption, or after rows were added. It is the flow DIR/flow.yaml, of which `worldmodel flow`\n"
        "tells more.",
        "worldmodel encode clips.csv --model runs/start/model --out latents\n"
        "  worldmodel encode clips.jsonl --model shapes-tiny --out latents --column text=caption \\\n"
        "    --tasks rounds,describe stages.encode.workers=2",
    )
    parser.add_argument(
        "table", metavar="TABLE", help="a csv, jsonl or parquet table of videos, or their folder"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings of the flow, for example segment_size=256"
    )
    parser.add_argument(
        "--model", required=True, help="name or folder of the model whose codec encodes (required)"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the results (required)")
    option(
        parser,
        "--root",
        "folder of the table's relative paths (default: that of the table)",
        "",
        metavar="DIR",
    )
    option(
        parser,
        "--column",
        "column of the table by its content, such as video=path or text=caption; may be repeated",
        metavar="FIELD=COLUMN",
        repeated=True,
    )
    option(
        parser,
        "--bucket",
        "one of data.buckets, as HEIGHTxWIDTH; repeated for each: clips are encoded in the nearest one, into "
        "a folder of its own",
        metavar="SIZE",
        repeated=True,
    )
    option(parser, "--tasks", "tasks to train on, with commas between", "rounds", metavar="NAMES")
    parser.add_argument(
        "--texts", action="store_true", help="encode texts also for a generator that takes none"
    )
    option(parser, "--dtype", "bfloat16, float16 or float32", "bfloat16", metavar="NAME")
    option(parser, "--max-frames", "longest clip, in frames of the model; the rest is left out", 1000)
    add_device_option(parser)
    return parser
