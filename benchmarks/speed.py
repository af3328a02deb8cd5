"""Speed of one session, and the cost of round 50 relative to round 2."""

import argparse

from worldmodel.eval.speed import machine, speed
from worldmodel.eval.suite import suite_of
from worldmodel.eval.tables import text_table
from worldmodel.models.world_model import WorldModel


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="shapes-tiny")
    parser.add_argument("--num-samples", type=int, default=3, help="sessions of 58 rounds")
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    model = WorldModel.from_pretrained(args.model)
    inputs = suite_of(model.config).session_inputs if model.config.world else None
    figures = speed(model, args.num_samples, args.seed, inputs=inputs)
    print(text_table("speed", figures))
    mean, high = figures["first_frame_mean_s"], figures["first_frame_p99_s"]
    print(f"action to first frame: mean {mean:.3f} s, 99th percentile {high:.3f} s")
    print(machine())


if __name__ == "__main__":
    main()
