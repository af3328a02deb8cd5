"""`worldmodel publish`: evaluate a finished run and write its model folder."""

from pathlib import Path

from worldmodel.cli.parser import Parser


def main(argv: list[str]) -> None:
    """Evaluate the model of a run and write it with its model card."""
    parser = Parser(
        "worldmodel publish",
        "Evaluate the model of a finished run, write the report to RUN/report, and write a model folder\n"
        "with a model card that lists the figures.",
        "worldmodel publish runs/shapes-tiny runs/shapes-tiny/published",
    )
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="folder of a finished run (`run_dir` of its config)"
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="model folder to write")
    parser.add_argument(
        "--num-samples", type=int, default=400, metavar="N", help="samples per figure (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=10, metavar="N", help="rounds per rollout (default: %(default)s)"
    )
    args = parser.parse_args(argv)

    from worldmodel.train.publish import publish

    publish(args.run, args.folder, args.num_samples, args.rounds)
    print(f"model: {args.folder}")
