"""`worldmodel eval`: evaluate a model and write a report."""

import json
import sys
from pathlib import Path

from worldmodel.cli.eval_data import add_data_options, check_options, data_suite
from worldmodel.cli.model import add_inference_options, load_model
from worldmodel.cli.parser import Parser, seed_number
from worldmodel.errors import InputError


def main(argv: list[str]) -> None:
    """Evaluate a model, write its report and print a table."""
    args = _parser().parse_args(argv)

    from worldmodel.eval.goals import measured
    from worldmodel.eval.report import check_folder, json_values, write_report
    from worldmodel.eval.suite import EvalSettings, check_split, evaluate, suite_of
    from worldmodel.eval.tables import aligned, data_tables, goals_table, split_tables
    from worldmodel.io import atomic_file
    from worldmodel.models.loading import model_folder

    name = Path(args.model).resolve().name
    folder = check_folder(args.report or Path("outputs", f"eval-{name}"))
    if args.json and Path(args.json).expanduser().is_dir():
        raise InputError(f"--json is {args.json!r}, which is a folder; pass a file name.")
    config = model_folder.read_config(model_folder.resolve(args.model))
    settings = EvalSettings(args.split, args.num_samples, args.rounds, args.seed, args.num_inference_steps)
    if args.data is None:
        check_options(args)
        suite = suite_of(config)
    else:
        settings, suite = data_suite(args, config, settings)
    check_split(suite, settings.split)
    model = load_model(args.model, args)
    results = evaluate(model, settings, suite, progress=sys.stderr.isatty() or args.progress)
    results["model"] = name
    page = write_report(results, folder, suite)
    if args.json:
        with atomic_file(args.json) as temporary:
            temporary.write_text(json.dumps(json_values(results), indent=1) + "\n", encoding="utf-8")
    print(goals_table(measured(suite.goals, results)))
    for split, figures in results["figures"].get("action_following", {}).items():
        for table in split_tables(figures):
            print(f"\n{suite.splits[split]}, {table.title}. {table.about}\n{aligned(table.rows)}")
    for table in data_tables(results["figures"]):
        print(f"\n{table.title}. {table.about}\n{aligned(table.rows)}")
    print(f"\nreport: {page}")


def _parser() -> Parser:
    parser = Parser(
        "worldmodel eval",
        "Evaluate a model by the evaluation suite of its world: action following, drift over long rollouts,\n"
        "descriptions, speed; or with --data on recorded episodes. Prints tables and writes a report with\n"
        "plots and examples.",
        "worldmodel eval shapes-tiny\n"
        "  worldmodel eval shapes-tiny --split held-out --num-samples 100     one split, about a minute\n"
        "  worldmodel eval shapes-tiny --split paraphrases     sentences in other words than the world's\n"
        "  worldmodel eval runs/mine/model --data held-out --inverse left=right     your own episodes\n"
        "  worldmodel eval runs/mine/model --json figures.json --report outputs/mine",
    )
    parser.add_argument("model", metavar="MODEL", help="name of a shipped model, or path of a model folder")
    parser.add_argument(
        "--split",
        metavar="SPLIT",
        help="action following on one split of the suite, for example held-out; default: all figures",
    )
    parser.add_argument(
        "--num-samples",
        type=int,
        default=400,
        metavar="N",
        help="samples per figure; the comparison of denoising steps uses a quarter (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds", type=int, default=10, metavar="N", help="rounds per rollout (default: %(default)s)"
    )
    add_inference_options(parser)
    parser.add_argument("--json", metavar="FILE", help="also write all figures to a JSON file")
    parser.add_argument(
        "--report", metavar="FOLDER", help="folder of the report (default: outputs/eval-MODEL)"
    )
    parser.add_argument(
        "--seed", type=seed_number, default=1234, help="equal seeds give equal samples (default: %(default)s)"
    )
    parser.add_argument(
        "--num-inference-steps", type=int, metavar="N", help="denoising steps (default: the model's)"
    )
    parser.add_argument(
        "--progress", action="store_true", help="show a progress bar even if stderr is not a terminal"
    )
    add_data_options(parser)
    return parser
