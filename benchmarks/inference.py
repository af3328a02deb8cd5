"""Switches of inference: memory of the weights, processor time of a round, and how the frames differ."""

import argparse
import statistics
import time

import numpy as np

from worldmodel.eval.metrics.psnr import psnr
from worldmodel.models.inference import optimize
from worldmodel.models.quantization import num_bytes
from worldmodel.models.world_model import WorldModel
from worldmodel.worlds import start_images

ACTIONS = ("the red ball moves left", "the blue box jumps", "wait", "nothing happens")


def measure(name: str, rounds: int, seed: int, **switches: str | bool) -> tuple[str, np.ndarray]:
    """Play rounds; returns a row of the table, and the frames."""
    model = WorldModel.from_pretrained(name)
    optimize(model, **switches)  # type: ignore[arg-type]
    session = model.session(seed)
    session.reset(start_images(model)[0].image)
    times = []
    for index in range(rounds):
        began = time.process_time()
        session.step(ACTIONS[index % len(ACTIONS)])
        times.append(time.process_time() - began)
    parts = " + ".join(f"{num_bytes(part) / 2**20:.1f}" for part in (model.backbone, model.generator))
    row = f"{parts} MiB  first {times[0]:6.2f} s  median {1000 * statistics.median(times[2:]):6.1f} ms"
    return row, session.frames


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="shapes-smol")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--switches", nargs="*", default=["int8", "fp8", "compile"])
    args = parser.parse_args()
    print(f"{args.model}: backbone + generator, {args.rounds} rounds")
    row, plain = measure(args.model, args.rounds, args.seed)
    print(f"{'plain':8s} {row}", flush=True)
    for switch in args.switches:
        chosen: dict[str, str | bool] = {"compile": True} if switch == "compile" else {"quantization": switch}
        row, frames = measure(args.model, args.rounds, args.seed, **chosen)
        largest = int(np.abs(frames.astype(int) - plain).max())
        print(f"{switch:8s} {row}  {psnr(frames, plain):5.1f} dB, at most {largest} of 255", flush=True)


if __name__ == "__main__":
    main()
