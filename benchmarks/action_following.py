"""Does it do what it is told: known combinations, held-out ones, two acts; and the control."""

import argparse

from worldmodel.eval.action_following import action_following, control
from worldmodel.eval.runner import ModelSubject
from worldmodel.eval.suite import SPLITS
from worldmodel.eval.tables import text_table
from worldmodel.models.world_model import WorldModel


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="shapes-tiny")
    parser.add_argument("--num-samples", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    subject = ModelSubject(WorldModel.from_pretrained(args.model))
    for split in SPLITS:
        print(text_table(split, action_following(subject, split, args.num_samples, args.seed)))
    print(text_table("control", control(subject, args.num_samples, args.seed)))


if __name__ == "__main__":
    main()
