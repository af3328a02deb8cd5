"""`worldmodel export`: a training checkpoint as a model folder, or a model as a page that plays it."""

import argparse
from pathlib import Path

from worldmodel.cli.model import add_base_option, check_model, load_model
from worldmodel.cli.parser import Parser, option
from worldmodel.train.checkpoint.manifest import Manifest


def main(argv: list[str]) -> None:
    """Write the model of a checkpoint, or only its LoRA weights; or a page that plays a model."""
    parser = Parser(
        "worldmodel export",
        "Convert a training checkpoint to a model folder: LoRA weights are merged, averaged (EMA) weights\n"
        "are used where there are any. Or write a model as a static page that plays it in any browser,\n"
        "without a server (--web).",
        "worldmodel export runs/mine/checkpoints/00007-state-400 mine\n"
        "  worldmodel export runs/mine/checkpoints/00007-state-400 lora --adapters\n"
        "  worldmodel export minigrid-doorkey --web doorkey\n"
        "  worldmodel export mine --web mine.html --single-file",
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a folder in RUN_DIR/checkpoints; with --web, a model"
    )
    parser.add_argument("folder", type=Path, nargs="?", help="folder to write; not with --web")
    parser.add_argument(
        "--adapters", action="store_true", help="write only the LoRA weights, in peft's format, by component"
    )
    parser.add_argument(
        "--rank",
        type=int,
        help="reduce the LoRA weights of a backbone by reference to this rank (default: the sum of the ranks "
        "of all stages)",
    )
    option(
        parser,
        "--average-with",
        "write the mean of its weights and the checkpoint's: a model of the same sizes, such as the one "
        "that the run started from",
        metavar="MODEL",
    )
    parser.add_argument(
        "--without-generator",
        action="store_true",
        help="leave the generator out: the model shows the forecast of its states, in about half of the time",
    )
    web = parser.add_argument_group("a page that plays a model")
    option(web, "--web", "folder of the page to write, for any static web server", kind=Path, metavar="DIR")
    web.add_argument(
        "--single-file",
        action="store_true",
        help="write one HTML file, named by --web, that plays from a disk",
    )
    option(
        web,
        "--runtime",
        "folder with the archives of the JavaScript libraries (default: fetched from the npm registry once)",
        kind=Path,
        metavar="DIR",
    )
    add_base_option(web)
    args = parser.parse_args(argv)
    if args.web is not None:
        whole = (args.folder, args.adapters, args.average_with, args.rank is not None, args.without_generator)
        if any(whole):
            parser.error("--web writes a page; leave out the folder and the options of checkpoints")
        return _export_web(args)
    if args.single_file or args.runtime or args.base:
        parser.error("--single-file, --runtime and --base are for --web")
    if args.folder is None:
        parser.error("name the folder to write, or a page (--web DIR)")
    if args.adapters and (args.average_with or args.without_generator):
        parser.error("--average-with and --without-generator are for whole models; leave out --adapters")
    if args.rank is not None and (args.adapters or args.rank < 1):
        parser.error("--rank is 1 or more, without --adapters")

    checkpoint = Path(args.checkpoint)
    Manifest.read(checkpoint)  # before PyTorch is imported, which takes seconds
    from worldmodel.train.checkpoint import export

    if args.adapters:
        written = export.export_adapters(checkpoint, args.folder)
    else:
        written = export.export(checkpoint, args.folder, args.rank, args.average_with, args.without_generator)
    print(f"wrote {written}")


def _export_web(args: argparse.Namespace) -> None:
    check_model(args.checkpoint)
    from worldmodel.export.web import export_web

    model = load_model(args.checkpoint, base=args.base)
    name = Path(args.checkpoint).name
    written = export_web(model, args.web, name, args.single_file, args.runtime)
    print(f"wrote {written}")
    if args.single_file:
        print(f"open it in a browser, or send it to somebody: {written.stat().st_size / 2**20:.0f} MB")
    else:
        print(f"play it: python -m http.server --directory {written}")
