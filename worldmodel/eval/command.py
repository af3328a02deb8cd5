"""`worldmodel eval`: measure a model against the world's truth."""

import argparse
import json
import sys
from pathlib import Path
from typing import NoReturn

from worldmodel.errors import InputError, WorldModelError


class _Parser(argparse.ArgumentParser):
    """Complains in one sentence, like every other error."""

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
    from worldmodel.eval.report import check_folder, json_values, table_rows, write_report
    from worldmodel.eval.suite import check_settings, evaluate
    from worldmodel.eval.tables import goals_table
    from worldmodel.io import atomic_file
    from worldmodel.models.world_model import WorldModel

    check_settings(args.split, args.num_samples, args.rounds, args.num_inference_steps)
    folder = check_folder(args.report or Path("outputs", f"eval-{Path(args.model).resolve().name}"))
    if args.json and Path(args.json).expanduser().is_dir():
        raise InputError(f"--json {args.json!r} is a folder; name a file in it.")
    model = WorldModel.from_pretrained(args.model)
    results = evaluate(
        model,
        args.split,
        args.num_samples,
        args.rounds,
        args.seed,
        progress=sys.stderr.isatty() or args.progress,
        num_inference_steps=args.num_inference_steps,
    )
    results["model"] = Path(args.model).resolve().name
    page = write_report(results, folder)
    if args.json:
        with atomic_file(args.json) as temporary:
            temporary.write_text(json.dumps(json_values(results), indent=1) + "\n", encoding="utf-8")
    print(goals_table(table_rows(results)))
    print(f"\nreport: {page}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="worldmodel eval",
        description="Measure a model against the procedural world, whose truth is known: does it do what\n"
        "it is told, for how many rounds, does it say what it sees, how fast. Writes a report with\n"
        "charts and pictures of what went right and wrong, and prints a table.",
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
        help="action following of one split only: val (combinations as in training), held-out (combinations "
        "never trained on), compositions (two acts in one sentence); default: every figure",
    )
    parser.add_argument(
        "--num-samples",
        type=int,
        default=400,
        metavar="N",
        help="samples of every figure; the sweep over denoising steps takes a quarter (%(default)s)",
    )
    parser.add_argument(
        "--rounds", type=int, default=10, metavar="N", help="length of the rollouts (%(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write all figures to a JSON file")
    parser.add_argument("--report", metavar="FOLDER", help="where the report goes (outputs/eval-MODEL)")
    parser.add_argument(
        "--seed", type=int, default=1234, help="the same seed measures on the same samples (%(default)s)"
    )
    parser.add_argument(
        "--num-inference-steps", type=int, metavar="N", help="denoising steps (the model's own)"
    )
    parser.add_argument(
        "--progress", action="store_true", help="show the progress bar where there is no terminal, too"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
