"""Rounds of states per second of the engines, for several concurrent sessions.

Every session plays consecutive rounds with a growing history, which is emptied when it is full, as in a
rollout. The in-process engine, vLLM (if it is installed) and a backbone without caches, one session at a
time, are compared. The embeddings are random.
"""

import argparse
import asyncio
import importlib.util
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from worldmodel.eval.speed import machine
from worldmodel.models.backbone.causal_lm import Backbone
from worldmodel.models.backbone.prefix_cache import History, remembered
from worldmodel.models.loading import base_models, model_folder
from worldmodel.serving.engine.batching import Compute
from worldmodel.serving.engine.local import Engine, InProcessEngine

States = Callable[[History, int], Awaitable[torch.Tensor]]


@dataclass
class Way:
    """An engine, and its measurements for each number of sessions."""

    states: States
    processes: bool = False
    """Whether it runs in separate processes."""
    rates: dict[int, list[float]] = field(default_factory=dict)
    """Rounds per second."""
    costs: dict[int, list[float]] = field(default_factory=dict)
    """Milliseconds of processor time per round, which depend less on other load."""
    waits: dict[int, list[float]] = field(default_factory=dict)
    """Milliseconds from the request of a round to its states, of every round."""


async def measure(way: Way, width: int, sessions: int, seed: int, args: argparse.Namespace) -> None:
    """Play sessions at the same time and record their durations."""
    generator = torch.Generator().manual_seed(seed)
    shape = (sessions, args.num_rounds, args.num_positions, width)
    rounds = torch.randn(shape, generator=generator) * width**-0.5

    async def play(session: int) -> None:
        history: History = ()
        for part in rounds[session]:
            history = (*remembered(history, args.history_rounds), part)
            asked = time.perf_counter()
            await way.states(history, args.num_queries)
            way.waits.setdefault(sessions, []).append(1000 * (time.perf_counter() - asked))

    worked, began = processor_seconds(way.processes), time.perf_counter()
    await asyncio.gather(*(play(session) for session in range(sessions)))
    taken, worked = time.perf_counter() - began, processor_seconds(way.processes) - worked
    way.rates.setdefault(sessions, []).append(sessions * args.num_rounds / taken)
    way.costs.setdefault(sessions, []).append(1000 * worked / (sessions * args.num_rounds))


def processor_seconds(with_children: bool) -> float:
    """Return the processor time that this process has taken, and those that it started."""
    seconds = time.process_time()
    if with_children:
        import psutil  # vLLM brings it

        times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
        seconds += sum(each.user + each.system for each in times)
    return seconds


async def compare(args: argparse.Namespace) -> dict[str, Way]:
    """Measure every way at every number of sessions, taking turns."""
    name = args.backbone or model_folder.resolve("shapes-tiny") / "backbone"
    folder = base_models.find(name) or Path(name)
    backbone, compute = Backbone.from_pretrained(folder).eval(), Compute()

    async def uncached(history: History, num_queries: int) -> torch.Tensor:
        return await compute.run(lambda: backbone(torch.cat(history)[None])[0, -num_queries:])

    engines: list[Engine] = [InProcessEngine(backbone, compute)]
    if importlib.util.find_spec("vllm"):
        from worldmodel.serving.engine.limits import EngineLimits
        from worldmodel.serving.engine.vllm_engine import VllmEngine

        limits = EngineLimits(torch.float32, 4096, kv_bytes=2**30, max_sessions=16)
        engines.append(await VllmEngine.start(folder, limits=limits))
    ways = {engine.name: Way(engine.predict_states, engine.name == "vllm") for engine in engines}
    ways["no cache, batch 1"] = Way(uncached)
    for repeat in range(args.num_samples + 1):
        for sessions in args.num_sessions:
            for way in ways.values():
                await measure(way, backbone.width, sessions, args.seed + 100 * repeat + sessions, args)
        if repeat == 0:  # it only warmed up
            for way in ways.values():
                way.rates.clear(), way.costs.clear(), way.waits.clear()
    history = tuple(torch.randn(args.num_positions, backbone.width) * backbone.width**-0.5 for _ in range(3))
    expected = await uncached(history, args.num_queries)
    for engine in engines:
        apart = (await engine.predict_states(history, args.num_queries) - expected).abs().max()
        print(f"{engine.name}: states within {apart:.1e} of those without caches")
        await engine.close()
    compute.close()
    return ways


def table(title: str, rows: dict[str, dict[int, list[float]]]) -> str:
    """Return medians with the lowest and highest as aligned lines."""
    counts = next(iter(rows.values()))
    lines = [f"{title:28}" + "".join(f"{f'{sessions} at once':>22}" for sessions in counts)]
    for name, row in rows.items():
        cells = (f"{statistics.median(each):.1f} ({min(each):.1f}–{max(each):.1f})" for each in row.values())
        lines.append(f"  {name:26}" + "".join(f"{cell:>22}" for cell in cells))
    return "\n".join(lines)


def waiting(ways: dict[str, Way]) -> str:
    """Return the mean and the 99th percentile of the time of a round as aligned lines."""
    lines = ["ms per round: mean, p99"]
    for name, way in ways.items():
        cells = (f"{statistics.mean(each):.1f}, {np.percentile(each, 99):.1f}" for each in way.waits.values())
        lines.append(f"  {name:26}" + "".join(f"{cell:>22}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backbone", help="folder, or name of a base model; else that of shapes-tiny")
    parser.add_argument("--num-sessions", type=int, nargs="+", default=[1, 4, 16], help="sessions at once")
    parser.add_argument("--num-samples", type=int, default=3, help="repeats: median, lowest, highest")
    parser.add_argument("--num-rounds", type=int, default=12, help="rounds that each session plays")
    parser.add_argument("--history-rounds", type=int, default=3, help="rounds that a history holds at most")
    parser.add_argument("--num-positions", type=int, default=96, help="positions of a round")
    parser.add_argument("--num-queries", type=int, default=64, help="positions of a round that are queries")
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    ways = asyncio.run(compare(args))
    print(table("rounds per second", {name: way.rates for name, way in ways.items()}))
    print(waiting(ways))
    print(table("processor ms per round", {name: way.costs for name, way in ways.items()}))
    print(machine())


if __name__ == "__main__":
    main()
