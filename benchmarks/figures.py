"""Single figures of a model's evaluation suite, for example `figures.py codec rollouts --num-samples 200`."""

import argparse
from collections.abc import Mapping
from typing import Any

from worldmodel.eval.examples import Album
from worldmodel.eval.runner import ModelSubject
from worldmodel.eval.suite import EvalSettings, suite_of
from worldmodel.eval.tables import text_table
from worldmodel.models.world_model import WorldModel


def rows(name: str, value: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Return titles and figures: one table, or one for each entry of a list or of lists."""
    if isinstance(value, list):
        return [(f"{name}, {row['steps']} steps", row) for row in value]
    if all(isinstance(each, list) for each in value.values()):
        length = len(next(iter(value.values())))
        return [
            (f"{name}, round {index + 1}", {key: each[index] for key, each in value.items()})
            for index in range(length)
        ]
    return [(name, value)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="figures, as action_following or codec; none lists them")
    parser.add_argument("--model", default="shapes-tiny")
    parser.add_argument("--num-samples", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    model = WorldModel.from_pretrained(args.model)
    settings = EvalSettings(num_samples=args.num_samples, rounds=args.rounds, seed=args.seed)
    parts = suite_of(model.config).parts(settings, model.config, Album())
    names = {part.name.split("/")[0] for part in parts}
    if not args.names or not names.issuperset(args.names):
        parser.exit(2, f"figures: {', '.join(sorted(names))}\n")
    for part in parts:
        if part.name.split("/")[0] in args.names:
            for title, figures in rows(part.name, part.measure(ModelSubject(model))):
                print(text_table(title, figures))


if __name__ == "__main__":
    main()
