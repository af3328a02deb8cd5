"""`worldmodel export`: convert a training checkpoint to a model folder."""

from pathlib import Path

from worldmodel.cli.parser import Parser, option


def main(argv: list[str]) -> None:
    """Write the model of a checkpoint, or only its LoRA weights."""
    parser = Parser(
        "worldmodel export",
        "Convert a training checkpoint to a model folder: LoRA weights are merged, averaged (EMA) weights\n"
        "are used where there are any.",
        "worldmodel export runs/mine/checkpoints/00007-state-400 mine\n"
        "  worldmodel export runs/mine/checkpoints/00007-state-400 lora --adapters",
    )
    parser.add_argument("checkpoint", type=Path, help="a folder in RUN_DIR/checkpoints")
    parser.add_argument("folder", type=Path, help="folder to write")
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
    args = parser.parse_args(argv)
    if args.adapters and args.average_with:
        parser.error("--average-with is for whole models; leave out --adapters")
    if args.rank is not None and (args.adapters or args.rank < 1):
        parser.error("--rank is 1 or more, without --adapters")

    from worldmodel.train.checkpoint import export

    if args.adapters:
        written = export.export_adapters(args.checkpoint, args.folder)
    else:
        written = export.export(args.checkpoint, args.folder, args.rank, args.average_with)
    print(f"wrote {written}")
