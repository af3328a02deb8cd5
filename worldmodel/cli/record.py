"""`worldmodel record`: sample clips to train on."""

from worldmodel.cli.parser import Parser


def main(argv: list[str]) -> None:
    """Record clips of the shapes world."""
    parser = Parser(
        "worldmodel record",
        "Record clips of the shapes world: one mp4 per clip, and a table (clips.csv) with the actions and\n"
        "their times. Your own recordings can have the same layout; see `data.sources` of kind `clips`.",
        "worldmodel record clips --num-clips 24",
    )
    parser.add_argument("folder", metavar="FOLDER", help="folder to write")
    parser.add_argument(
        "--num-clips", type=int, default=100, metavar="N", help="number of clips (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="actions per clip (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the clips (default: %(default)s)")
    args = parser.parse_args(argv)

    from worldmodel.worlds import recorder

    table = recorder.record(args.folder, args.num_clips, args.rounds, args.seed)
    print(f"{args.num_clips} clips: {table}")
