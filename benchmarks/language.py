"""What it says: descriptions, answers, and which action it saw."""

import argparse

from worldmodel.eval.language import describe, inverse_dynamics, questions
from worldmodel.eval.runner import ModelSubject
from worldmodel.eval.tables import text_table
from worldmodel.models.world_model import WorldModel


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="shapes-tiny")
    parser.add_argument("--num-samples", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    subject = ModelSubject(WorldModel.from_pretrained(args.model))
    for measure in (describe, questions, inverse_dynamics):
        print(text_table(measure.__name__, measure(subject, args.num_samples, args.seed)))


if __name__ == "__main__":
    main()
