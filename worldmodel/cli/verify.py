"""`worldmodel verify`: measure the published figures of a model again."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worldmodel.cli.model import check_model
from worldmodel.cli.parser import Parser, option
from worldmodel.cli.suite import data_suite
from worldmodel.errors import InputError

if TYPE_CHECKING:
    from worldmodel.config import WorldModelConfig
    from worldmodel.eval.published import Recording, Run
    from worldmodel.eval.suite import EvalSettings, EvalSuite

OUTSIDE = 1
"""Exit code if a figure lies outside its published interval."""


def main(argv: list[str]) -> None:
    """Measure the rows of a model's figures.json, print them beside the published ones."""
    args = _parser().parse_args(argv)

    check_model(args.model)  # before PyTorch is imported, which takes seconds
    from worldmodel.eval.card import with_figures
    from worldmodel.eval.published import FILE, SPEED, compare, comparison_text, read_runs, runs_text
    from worldmodel.eval.suite import evaluate
    from worldmodel.io import atomic_file
    from worldmodel.models.loading import location, model_folder
    from worldmodel.models.world_model import WorldModel

    folder = model_folder.resolve(args.model)
    runs = read_runs(folder)
    if args.quick and args.write:
        raise InputError("--write publishes what was measured; leave out --quick.")
    imports = any(run.recording or run.settings.get("judge") or run.settings.get("metrics") for run in runs)
    if imports and not args.trust and args.model not in location.shipped_models():
        raise InputError(
            f"{FILE} of {args.model!r} names environments and functions to import; pass --trust if you know "
            "where the model comes from."
        )
    model = None
    if not args.card:
        model = WorldModel.from_pretrained(folder)
    written: list[Run] = []
    outside = 0
    for run in runs:
        timed = any(row.path[0] == SPEED for row in run.rows)
        rows = [row for row in run.rows if args.speed or row.path[0] != SPEED]
        if model is None or not rows:
            written.append(run)
            continue
        chosen = replace(run, rows=rows)
        chosen = chosen.quick() if args.quick else chosen
        settings, suite = _suite(chosen, model.config, Path(args.data_folder).expanduser())
        results = evaluate(
            model, settings, suite, progress=sys.stderr.isatty() or args.progress, only=chosen.needs
        )
        comparisons = compare(chosen, results["figures"], args.quick)
        outside += sum(each.inside is False for each in comparisons)
        print(f"{_described(chosen)}\n{comparison_text(comparisons)}\n")
        conditions = results["machine"] if args.speed or not timed else run.conditions
        measured = {row.path: row for row in _measured(run, results["figures"])}
        updated = [measured.get(row.path, row) for row in run.rows]
        written.append(replace(run, rows=updated, conditions=conditions))
    if args.card or args.write:
        with atomic_file(folder / FILE) as temporary:
            temporary.write_text(runs_text(written), encoding="utf-8")
        card = folder / "README.md"
        text = with_figures(card.read_text(encoding="utf-8"), written)
        with atomic_file(card) as temporary:
            temporary.write_text(text, encoding="utf-8")
        print(f"written: {folder / FILE} and {card.name}")
    elif outside:
        print(f"{outside} figure{'s' * (outside != 1)} outside.")
        raise SystemExit(OUTSIDE)
    else:
        print("All measured figures are inside.")


def _suite(run: "Run", config: "WorldModelConfig", data_folder: Path) -> "tuple[EvalSettings, EvalSuite]":
    """Return settings and suite of a run, after recording the episodes that it needs."""
    from worldmodel.eval.suite import EvalSettings

    values: dict[str, Any] = dict(run.settings)
    values["metrics"] = tuple(values.get("metrics", ()))
    if run.recording is None and "data" not in values:
        from worldmodel.worlds import suite_of

        return EvalSettings(**values), suite_of(config)

    from worldmodel.eval.data.suite import DataSettings

    if run.recording is not None:
        path = _recorded(run.recording, data_folder)
        values["data"] = str(path) if run.recording.held_out_by else f"lerobot:{path}"
    settings = DataSettings(**{**values, "inverse": tuple(values.get("inverse", ()))})
    return settings, data_suite(settings, config)


def _recorded(recording: "Recording", data_folder: Path) -> Path:
    """Record the episodes, or go on with a recording that was interrupted, and divide them."""
    from worldmodel.cli.data import divide
    from worldmodel.recording import record_environment
    from worldmodel.recording.settings import EnvironmentSettings

    settings = EnvironmentSettings(
        recording.env_id, recording.policy, recording.seed, recording.max_steps, recording.size
    )
    env = recording.env_id.rpartition(":")[2]
    path = data_folder / f"{env}-{recording.policy.rpartition(':')[2]}-{recording.seed}"
    record_environment(settings, path, recording.episodes, progress=sys.stderr.isatty())
    if recording.held_out_by and not (path / "meta" / "split.json").is_file():
        divide(str(path), by=recording.held_out_by)
    return path


def _measured(run: "Run", figures: dict[str, Any]) -> list[Any]:
    """Return the rows of a run with the figures measured now; rows that were not measured are left out."""
    from worldmodel.eval.table import find

    rows: list[Any] = []
    for row in run.rows:
        figure = find(figures, row.path)
        if figure is None:
            continue
        beside = {name: find(figures, path) for name, path in row.baseline_paths.items()}
        known = {name: each or row.baselines[name] for name, each in beside.items()}
        rows.append(replace(row, figure=figure, baselines=known))
    return rows


def _described(run: "Run") -> str:
    settings = run.settings
    split = settings.get("split") or (run.recording.env_id if run.recording else "all figures")
    return f"{split}: n = {settings['num_samples']}, seed {settings['seed']}"


def _parser() -> Parser:
    parser = Parser(
        "worldmodel verify",
        "Measure the published figures of a model again, from the settings and seeds in its figures.json,\n"
        "and print each beside the published value. A row is inside if the measured value lies in the\n"
        "published 95 % interval; with --quick, which measures an eighth of the samples, if the two\n"
        "intervals overlap. Exit code 1 if a row is outside.",
        "worldmodel verify shapes-tiny --quick     minutes on two cores\n"
        "  worldmodel verify shapes-memory\n"
        "  worldmodel verify runs/mine/published --write     publish what is measured now",
    )
    parser.add_argument("model", metavar="MODEL", help="name of a shipped model, or path of a model folder")
    parser.add_argument("--quick", action="store_true", help="an eighth of the samples, at least 24")
    parser.add_argument(
        "--speed", action="store_true", help="also measure speed, which depends on the machine"
    )
    parser.add_argument(
        "--write", action="store_true", help="write what is measured to figures.json and the model card"
    )
    parser.add_argument(
        "--card", action="store_true", help="measure nothing; write the stored figures to the model card"
    )
    option(
        parser,
        "--data-folder",
        "where episodes are recorded for models of an environment",
        "outputs/verify",
        metavar="DIR",
    )
    parser.add_argument(
        "--trust", action="store_true", help="import environments and functions that figures.json names"
    )
    parser.add_argument(
        "--progress", action="store_true", help="show a progress bar even if stderr is not a terminal"
    )
    return parser
