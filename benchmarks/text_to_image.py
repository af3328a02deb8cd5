"""Scenes imagined from their captions."""

import argparse

from worldmodel.eval.pictures import text_to_image
from worldmodel.eval.runner import ModelSubject
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
    print(text_table("text to image", text_to_image(subject, args.num_samples, args.seed)))


if __name__ == "__main__":
    main()
