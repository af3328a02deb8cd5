"""`worldmodel eval`: measure a model by the suite of its world."""

import argparse
import json
import sys
from pathlib import Path
from typing import NoReturn

from worldmodel.errors import InputError, WorldModelError


class _Parser(argparse.ArgumentParser):
    """Reports usage errors as `InputError`."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; `{self.prog} --help` shows how it is used.")


def main(argv: list[str]) -> int:
    """Evaluate a model, write its report and print a table; return the exit code."""
    try:
        return _run(_parser().parse_args(argv))
    except WorldModelError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    from worldmodel import hub
    from worldmodel.eval.goals import measured
    from worldmodel.eval.report import check_folder, json_values, write_report
    from worldmodel.eval.suite import EvalSettings, check_split, evaluate, suite_of
    from worldmodel.eval.tables import goals_table
    from worldmodel.io import atomic_file

    settings = EvalSettings(args.split, args.num_samples, args.rounds, args.seed, args.num_inference_steps)
    folder = check_folder(args.report or Path("outputs", f"eval-{Path(args.model).resolve().name}"))
    if args.json and Path(args.json).expanduser().is_dir():
        raise InputError(f"--json {args.json!r} is a folder; name a file in it.")
    suite = suite_of(hub.read_config(hub.resolve(args.model)))
    check_split(suite, settings.split)
    model = hub.from_pretrained(args.model)
    results = evaluate(model, settings, suite, progress=sys.stderr.isatty() or args.progress)
    results["model"] = Path(args.model).resolve().name
    page = write_report(results, folder, suite)
    if args.json:
        with atomic_file(args.json) as temporary:
            temporary.write_text(json.dumps(json_values(results), indent=1) + "\n", encoding="utf-8")
    print(goals_table(measured(suite.goals, results)))
    print(f"\nreport: {page}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="worldmodel eval",
        description="Measure a model by the evaluation suite of its world: action following, drift over\n"
        "long rollouts, descriptions, speed. Prints a table and writes a report with charts and examples.",
        epilog="example:\n"
        "  worldmodel eval shapes-tiny\n"
        "  worldmodel eval shapes-tiny --split held-out --num-samples 100     one split, a minute\n"
        "  worldmodel eval runs/mine/model --json figures.json --report outputs/mine",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="a shipped model or a model folder")
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
        help="samples of every figure; the comparison of denoising steps takes a quarter (%(default)s)",
    )
    parser.add_argument(
        "--rounds", type=int, default=10, metavar="N", help="length of the rollouts (%(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write all figures to a JSON file")
    parser.add_argument("--report", metavar="FOLDER", help="folder of the report (outputs/eval-MODEL)")
    parser.add_argument(
        "--seed", type=int, default=1234, help="seed of the samples and the noise (%(default)s)"
    )
    parser.add_argument(
        "--num-inference-steps", type=int, metavar="N", help="denoising steps (default: the model's)"
    )
    parser.add_argument(
        "--progress", action="store_true", help="show the progress bar even without a terminal"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
