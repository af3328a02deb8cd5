"""How long a rollout stays true, on its own frames."""

import argparse

from worldmodel.eval.drift import rollouts
from worldmodel.eval.runner import ModelSubject
from worldmodel.eval.tables import text_table
from worldmodel.models.world_model import WorldModel


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="shapes-tiny")
    parser.add_argument("--num-samples", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    subject = ModelSubject(WorldModel.from_pretrained(args.model))
    by_round = rollouts(subject, args.num_samples, args.rounds, args.seed)
    for number in range(args.rounds):
        print(text_table(f"round {number + 1}", {name: values[number] for name, values in by_round.items()}))


if __name__ == "__main__":
    main()
