"""`worldmodel encode`: compute the latents of a table's clips once, before training on them."""

from pathlib import Path
from typing import Any

from worldmodel.cli.model import add_device_option, check_model
from worldmodel.cli.parser import Parser, option
from worldmodel.config import SourceConfig
from worldmodel.config.flow import PACKED
from worldmodel.errors import InputError

CONFIG = "flow.yaml"
"""The flow that does it, in the folder of its results."""


def main(argv: list[str]) -> None:
    """Encode the clips that are left, by a flow of which this is the only stage with a model."""
    args = _parser().parse_intermixed_args(argv)  # settings may follow options
    table = Path(args.table).expanduser().absolute()
    if not table.is_file():
        raise InputError(f"There is no table {args.table!r}; check the path.")
    check_model(args.model)
    import yaml

    from worldmodel.cli import flow
    from worldmodel.models.loading import model_folder

    model = model_folder.read_config(model_folder.resolve(args.model))
    root = str(Path(args.root).expanduser().absolute() if args.root else table.parent)
    columns = dict(map(_column, args.column))
    if "video" in columns:
        columns["address"] = columns.pop("video")
    settings = {"model": args.model, "tasks": args.tasks.split(","), "dtype": args.dtype}
    settings |= {"texts": args.texts, "max_frames": args.max_frames, "device": args.device or ""}
    config: dict[str, Any] = {
        "folder": str(Path(args.out).expanduser().absolute()),
        "sources": {"table": {"kind": "table", "path": str(table), "root": root, "columns": columns}},
        "stages": {"fetch": {"settings": {"root": root}}, "encode": {"settings": settings}},
        # Pixels are only read again by a vision encoder.
        "pack": [name for name in PACKED if name != "video" or not model.vision.sees_latents],
    }
    file = Path(config["folder"]) / CONFIG
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    flow.main(["run", str(file), *args.overrides])
    _finish(file, args.overrides)


def _finish(file: Path, overrides: list[str]) -> None:
    """Say what there is now; once all clips have ended, remove what only the flow needed."""
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
            return
        Pruner(reader.catalog, open_buffer(config.place("buffer"))).remove_ended(0.0, 0.0)
    finally:
        reader.close()
    left_out = sum(stage.dropped + stage.dead for stage in status.stages)
    if left_out:
        print(f"{left_out} clips were left out: worldmodel flow status {file} --stage encode")
    if not status.packed:
        raise InputError(f"None of the {status.listed} clips could be encoded; see the command above.")
    source = SourceConfig("flow", config.place("log"))
    print(f"{status.packed} clips; train on data.sources.NAME: {{kind: {source.kind}, path: {source.path}}}")


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
    parser.add_argument("table", metavar="TABLE", help="a csv, jsonl or parquet table of videos")
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
    option(parser, "--tasks", "tasks to train on, with commas between", "rounds", metavar="NAMES")
    parser.add_argument(
        "--texts", action="store_true", help="encode texts also for a generator that takes none"
    )
    option(parser, "--dtype", "bfloat16, float16 or float32", "bfloat16", metavar="NAME")
    option(parser, "--max-frames", "longest clip, in frames of the model; the rest is left out", 1000)
    add_device_option(parser)
    return parser
