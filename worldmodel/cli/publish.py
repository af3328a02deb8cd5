"""`worldmodel publish`: evaluate a finished run and write its model folder."""

from pathlib import Path

from worldmodel.cli.parser import Parser, option
from worldmodel.cli.suite import add_data_options, chosen_suite


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
    option(parser, "--num-samples", "samples per figure", 400)
    option(parser, "--rounds", "rounds per rollout", 10)
    add_data_options(parser)
    args = parser.parse_args(argv)

    from worldmodel.train.run.log import finished_model

    model = finished_model(args.run)  # before PyTorch is imported, which takes seconds
    from worldmodel.eval.suite import EvalSettings
    from worldmodel.models.loading import model_folder
    from worldmodel.train.run.publish import publish

    settings = EvalSettings(num_samples=args.num_samples, rounds=args.rounds)
    config = model_folder.read_config(model)
    settings, suite = chosen_suite(args, config, settings)
    publish(args.run, args.folder, suite, settings)
    print(f"model: {args.folder}")
