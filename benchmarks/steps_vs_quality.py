"""What more denoising steps buy; 0 is the regressed forecast alone."""

import argparse

from worldmodel.eval.action_following import steps_against_quality
from worldmodel.eval.runner import ModelSubject
from worldmodel.eval.tables import text_table
from worldmodel.models.world_model import WorldModel


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="shapes-tiny")
    parser.add_argument("--num-samples", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    subject = ModelSubject(WorldModel.from_pretrained(args.model))
    for row in steps_against_quality(subject, args.num_samples, args.seed):
        print(text_table(f"{row.pop('steps')} steps", row))


if __name__ == "__main__":
    main()
