"""Time of a denoising step with the generator on one process and on several, one thread each.

    python benchmarks/shared_generator.py --sizes 1 2

The generator is our transformer with random weights, in place of that of shapes-tiny, for chunks of 8 latent
frames of 64 tokens. Processor time says how the work is divided also where other programs keep the machine
busy; wall time needs a free core for each process.
"""

import argparse
import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import torch

from worldmodel.config import GeneratorConfig
from worldmodel.diffusion.sampler import Chunk, Denoiser
from worldmodel.models.conditioning import Condition
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.engine.generator_processes import OPTIONS, GeneratorProcesses, Parallelism, keep_part


def chunk_of(model: WorldModel, num_steps: int) -> Chunk[Condition]:
    """Return a chunk of drawn states, context and noise."""
    torch.manual_seed(0)
    shape = model.config.latent_shape
    states = torch.randn(1, model.config.num_queries, model.backbone.width)
    context = torch.randn(1, model.config.context_latents, *shape[1:])
    solver = model.generator.solver(num_steps)
    return Chunk(torch.randn(1, *shape), solver, (model.condition(states, context),), context)


def measure(folder: Path, size: int, num_steps: int, parallelism: Parallelism) -> dict[str, Any]:
    """Time the steps of a chunk after its first, which also computes the context."""
    model = WorldModel.from_pretrained(folder)
    chunk, denoiser = chunk_of(model, num_steps), Denoiser(model.generator)
    processes = None
    if size > 1:
        if parallelism == "tensor":
            keep_part(model, 0, size, model.device)
        processes = GeneratorProcesses.start(folder, model, size, parallelism=parallelism)
    here = psutil.Process()
    everyone = [here, *here.children()]
    times: list[tuple[float, list[float]]] = []
    while not chunk.finished:
        before, began = [sum(each.cpu_times()[:2]) for each in everyone], time.perf_counter()
        if processes is None:
            denoiser.step([chunk])
        else:
            with processes.step([chunk], None, [chunk]):
                denoiser.step([chunk])
        wall = time.perf_counter() - began
        after = [sum(each.cpu_times()[:2]) for each in everyone]
        times.append((wall, [end - start for start, end in zip(before, after, strict=True)]))
    rss = [each.memory_info().rss / 2**20 for each in everyone]
    if processes is not None:
        processes.close()
    return {
        "processes": size,
        "parameters": sum(parameter.numel() for parameter in model.generator.parameters()),
        "frames": chunk.latents.shape[1],
        "tokens_per_frame": chunk.latents[0, 0, 0].numel() // model.generator.cells_per_token,
        "wall_s": [round(wall, 2) for wall, _ in times[1:]],
        "processor_s": [[round(each, 2) for each in used] for _, used in times[1:]],
        "rss_mib": [round(each) for each in rss],
        "latents": chunk.latents,
    }


def main() -> None:
    """Measure and print one line of JSON for each number of processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--parallelism", choices=list(OPTIONS), default="sequence")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent, torch.no_grad():
        base = WorldModel.from_pretrained("shapes-tiny")
        sizes = GeneratorConfig(width=args.width, num_layers=args.layers, num_heads=args.width // 64)
        config, vision = base.config, replace(base.config.vision, max_frames=18)
        made = WorldModel(replace(config, generator=sizes, vision=vision, chunk_frames=16), base.backbone)
        torch.nn.init.normal_(made.generator.project.weight, std=0.02)
        folder = made.save_pretrained(Path(parent) / "model", dtype=torch.float32)
        del base, made
        first = None
        for size in args.sizes:
            found = measure(folder, size, args.steps, args.parallelism)
            latents = found.pop("latents")
            first = latents if first is None else first
            found["difference"] = float((latents - first).abs().max() / first.abs().max())
            print(json.dumps({**found, "load": os.getloadavg()[0]}), flush=True)


if __name__ == "__main__":
    main()
