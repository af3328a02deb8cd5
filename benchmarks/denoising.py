"""Denoising many chunks in one loop against one after the other."""

import argparse
import asyncio
import time

import torch

from worldmodel.diffusion.sampler import Chunk
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


async def chunks_per_second(model: WorldModel, work: list[Job], max_batch: int, repeats: int) -> float:
    """Denoise all jobs at once with batches of at most `max_batch`; the best of some repeats."""
    compute = Compute()
    loop = DenoisingLoop(model.generator, compute, max_batch)
    best = float("inf")
    for _ in range(1 + repeats):
        began = time.perf_counter()
        chunks = [
            Chunk(noise, model.generator.solver(n), (known,), context) for known, context, noise, n in work
        ]
        await asyncio.gather(*(loop.run(chunk) for chunk in chunks))
        best = min(best, time.perf_counter() - began)
    compute.close()
    return len(work) / best


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="shapes-tiny")
    parser.add_argument("--num-samples", type=int, default=8, help="repeats, of which the best counts")
    parser.add_argument("--num-inference-steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    model = WorldModel.from_pretrained(args.model).eval()
    print("live  one by one  together  ratio   (chunks/s)")
    for live in (1, 4, 8, 16):
        work = jobs(model, live, args.num_inference_steps, args.seed)
        alone = asyncio.run(chunks_per_second(model, work, 1, args.num_samples))
        together = asyncio.run(chunks_per_second(model, work, live, args.num_samples))
        print(f"{live:4d}  {alone:10.1f}  {together:8.1f}  {together / alone:5.2f}")


if __name__ == "__main__":
    main()
