"""`worldmodel eval`: evaluate a model and write a report."""

import json
import re
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from worldmodel.cli.model import (
    add_base_option,
    add_device_option,
    add_inference_options,
    check_model,
    load_model,
)
from worldmodel.cli.parser import Parser, option, seed_number
from worldmodel.cli.suite import add_data_options, chosen_suite
from worldmodel.errors import InputError


def main(argv: list[str]) -> None:
    """Evaluate a model, write its report and print a table."""
    args = _parser().parse_args(argv)

    check_model(args.model)  # before PyTorch is imported, which takes seconds
    if args.data is not None:
        from worldmodel.data.argument import read_held_out

        read_held_out(args.data, args.train_data)
    from worldmodel.eval.report import check_folder, json_values, write_report
    from worldmodel.eval.suite import EvalSettings, check_settings, evaluate
    from worldmodel.eval.table import Table
    from worldmodel.io import atomic_file
    from worldmodel.models.loading import model_folder

    name = Path(args.model).resolve().name
    folder = check_folder(args.report or Path("outputs", "-".join(["eval", name, *_kind(args)])))
    if args.json and Path(args.json).expanduser().is_dir():
        raise InputError(f"--json is {args.json!r}, which is a folder; pass a file name.")
    config = model_folder.read_config(model_folder.resolve(args.model))
    settings = EvalSettings(
        args.split, args.num_samples, args.rounds, args.seed, args.num_inference_steps, tuple(args.metric)
    )
    settings, suite = chosen_suite(args, config, settings)
    check_settings(suite, settings)
    model = load_model(args.model, args, args.base, args.device)
    progress = sys.stderr.isatty() or args.progress
    started = time.monotonic()

    def keep(part: str, results: dict[str, Any]) -> None:
        """Write the report so far, which stays if the evaluation is interrupted."""
        write_report(results | {"model": name}, folder)
        if not progress:
            print(f"{part}: measured after {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)

    if not progress:
        print(f"evaluating {name}; what is measured is kept in {folder}", file=sys.stderr, flush=True)
    results = evaluate(model, settings, suite, progress, measured=keep)
    results["model"] = name
    page = write_report(results, folder)
    if args.json:
        with atomic_file(args.json) as temporary:
            temporary.write_text(json.dumps(json_values(results), indent=1) + "\n", encoding="utf-8")
    for table in map(Table.from_json, results["tables"]):
        if not table.details:
            print(f"{table.title}. {table.about}".rstrip(), table.text(), "", sep="\n")
    print(f"report: {page}")


def _kind(args: Namespace) -> list[str]:
    """Return what tells the report of a part or of own episodes from that of all figures."""
    chosen = args.split or (args.data and Path(args.data).name)
    return [re.sub(r"[^\w.]+", "-", chosen).strip("-")] if chosen else []


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
    option(
        parser,
        "--split",
        "action following on one split of the suite, for example held-out; default: all figures",
        metavar="SPLIT",
    )
    option(
        parser, "--num-samples", "samples per figure; the comparison of denoising steps uses a quarter", 400
    )
    option(parser, "--rounds", "rounds per rollout", 10)
    option(
        parser,
        "--metric",
        "also measure this metric: a name of worldmodel.eval.metrics, or MODULE:CLASS; may be repeated",
        metavar="NAME",
        repeated=True,
    )
    add_device_option(parser)
    add_base_option(parser)
    add_inference_options(parser)
    option(parser, "--json", "also write all figures to a JSON file", metavar="FILE")
    option(
        parser,
        "--report",
        "folder of the report, written part by part (default: outputs/eval-MODEL[-SPLIT|-SOURCE])",
        metavar="FOLDER",
    )
    option(parser, "--seed", "equal seeds give equal samples", 1234, kind=seed_number)
    option(parser, "--num-inference-steps", "denoising steps (default: the model's)", kind=int)
    parser.add_argument(
        "--progress", action="store_true", help="show a progress bar even if stderr is not a terminal"
    )
    add_data_options(parser)
    return parser
