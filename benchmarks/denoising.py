"""Denoising many chunks in one loop against one after the other."""

import argparse
import asyncio
import time

import numpy as np
import torch

from worldmodel.diffusion.sampler import Chunk
from worldmodel.eval.speed import machine
from worldmodel.eval.tables import aligned
from worldmodel.models.conditioning import Condition
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.engine.batching import Compute
from worldmodel.serving.engine.denoiser import DenoisingLoop

Job = tuple[Condition, torch.Tensor, torch.Tensor, int]


@torch.no_grad()
def jobs(model: WorldModel, count: int, steps: int, seed: int) -> list[Job]:
    """Draw conditions, contexts and noise of the model's shapes."""
    config, generator = model.config, torch.Generator().manual_seed(seed)
    made: list[Job] = []
    for _ in range(count):
        states = torch.randn(1, config.num_queries, model.backbone.width, generator=generator)
        context = torch.randn(1, config.context_latents, *model.blank_latents.shape, generator=generator)
        condition = model.condition(states, context)
        noise = torch.randn(1, *model.config.latent_shape, generator=generator)
        made.append((condition, context, noise, steps))
    return made


async def cost(model: WorldModel, work: list[Job], max_batch: int) -> tuple[float, float]:
    """Denoise all jobs at once, in batches of at most `max_batch`.

    Returns:
        Seconds, and seconds of processor time, which depend less on other load, of a chunk.
    """
    compute = Compute()
    loop = DenoisingLoop(model.generator, compute, max_batch)
    chunks = [Chunk(noise, model.generator.solver(n), (known,), context) for known, context, noise, n in work]
    began, worked = time.perf_counter(), time.process_time()
    await asyncio.gather(*(loop.run(chunk) for chunk in chunks))
    taken = time.perf_counter() - began, time.process_time() - worked
    compute.close()
    return taken[0] / len(work), taken[1] / len(work)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="shapes-tiny")
    parser.add_argument("--num-inference-steps", type=int, default=2)
    parser.add_argument("--num-samples", type=int, default=5, help="repeats, between which both take turns")
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    model = WorldModel.from_pretrained(args.model).eval()
    rows = [("live", "one by one, ms/chunk", "together", "ratio", "processor ms", "together", "ratio")]
    for live in (1, 4, 8, 16):
        work = jobs(model, live, args.num_inference_steps, args.seed)
        runs = [
            [asyncio.run(cost(model, work, batch)) for batch in (1, live)]
            for _ in range(1 + args.num_samples)
        ]
        cells = []
        for alone, together in 1000 * np.median(runs[1:], axis=0).T:  # the first one warms up
            cells += [f"{alone:.1f}", f"{together:.1f}", f"{alone / together:.2f}"]
        rows.append((f"{live}", *cells))
    print(aligned(rows))
    print(machine())


if __name__ == "__main__":
    main()
