"""`worldmodel publish`: evaluate a finished run and write its model folder."""

from pathlib import Path

from worldmodel.cli.eval_data import add_data_options, check_options, data_suite
from worldmodel.cli.parser import Parser


def main(argv: list[str]) -> None:
    """Evaluate the model of a run and write it with its model card."""
    parser = Parser(
        "worldmodel publish",
        "Evaluate the model of a finished run, write the report to RUN/report, and write a model folder\n"
        "with a model card that lists the figures.",
        "worldmodel publish runs/shapes-tiny runs/shapes-tiny/published\n"
        "  worldmodel publish runs/own-clips published --data held-out     figures on your own episodes",
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
    add_data_options(parser)
    args = parser.parse_args(argv)

    from worldmodel.eval.suite import EvalSettings
    from worldmodel.models.loading import model_folder
    from worldmodel.train.publish import publish

    settings, suite = EvalSettings(num_samples=args.num_samples, rounds=args.rounds), None
    if args.data is None:
        check_options(args)
    else:
        config = model_folder.read_config(args.run / "model")
        settings, suite = data_suite(args, config, settings)
    publish(args.run, args.folder, settings, suite)
    print(f"model: {args.folder}")
