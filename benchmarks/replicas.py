"""Two replicas with one thread each against one server with two: rounds per second over HTTP, and failover.

Every world is a closed loop: its next round is asked for when the last one has arrived. Both variants store
worlds in a SQLite database after every round; the baseline also runs without a database. The variants take
turns. Failover is the time from SIGKILL of one replica to a round of one of its worlds on the other.
"""

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np

from worldmodel.eval.speed import machine
from worldmodel.eval.tables import aligned
from worldmodel.serving.client import AsyncClient

ACTION = "the white diamond jumps"

Replica = tuple[str, "subprocess.Popen[str]"]
"""Address and process of a server."""


def start(model: str, folder: Path, threads: int, stored: bool, stack: ExitStack) -> Replica:
    """Start a server on a free port."""
    command = [sys.executable, "-P", "-m", "worldmodel", "serve", model, "--port", "0"]
    command += ["--engine", "in-process", "--data-dir", str(folder), "--requests-per-minute", "1000000"]
    command += ["--database", f"sqlite:///{folder / 'worlds.db'}"] if stored else []
    environ = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    stack.callback(server.wait, 90)
    stack.callback(server.terminate)  # does nothing if it has ended
    assert server.stdout is not None
    found = re.search(r"http://[\d.]+:\d+", server.stdout.readline())
    if found is None:
        raise SystemExit("The server did not start.")
    return found.group(), server


async def play(urls: list[str], live: int, seconds: float) -> list[float]:
    """Play worlds, spread evenly over servers, for some time; returns the seconds of every round."""
    taken: list[float] = []

    async def one(client: AsyncClient, seed: int) -> None:
        with as_file(files("worldmodel.demo") / "first_frame.png") as image:
            world = await client.worlds.create(image, seed=seed)
        async with world:
            await world.step(ACTION)
            await together.wait()
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                began = time.perf_counter()
                await world.step(ACTION)
                taken.append(time.perf_counter() - began)

    together, clients = asyncio.Barrier(live), [AsyncClient(url) for url in urls]
    await asyncio.gather(*(one(clients[seed % len(clients)], seed) for seed in range(live)))
    for client in clients:
        await client.close()
    return taken


async def fail_over(model: str, stack: ExitStack) -> float:
    """Kill the replica that plays a world; returns the seconds until its next round on the other one."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    (first, killed), (second, _) = (start(model, folder, 1, True, stack) for _ in range(2))
    async with AsyncClient(first) as one, AsyncClient(second) as two:
        with as_file(files("worldmodel.demo") / "first_frame.png") as image:
            world = await one.worlds.create(image)
        await world.step(ACTION)
        killed.kill()
        began = time.perf_counter()
        await (await two.worlds.open(world.id)).step(ACTION)
        return time.perf_counter() - began


def measure_rounds(args: argparse.Namespace) -> None:
    """Print the table of rounds: medians of repeats, between which the variants take turns."""
    variants = {
        "1 server, 2 threads, no database": (1, 2, False),
        "1 server, 2 threads": (1, 2, True),
        "2 replicas, 1 thread each": (2, 1, True),
    }
    runs: dict[tuple[str, int], list[list[float]]] = {}
    with ExitStack() as stack:
        urls: dict[str, list[str]] = {}
        for name, (count, threads, stored) in variants.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            urls[name] = [start(args.model, folder, threads, stored, stack)[0] for _ in range(count)]
        for _ in range(args.repeats):
            for live in args.worlds:
                for name in variants:
                    run = asyncio.run(play(urls[name], live, args.seconds))
                    runs.setdefault((name, live), []).append(run)
    rows = [("variant", "live worlds", "rounds/s, median (min to max)", "p50, s", "p95, s")]
    for (name, live), repeats in runs.items():
        rates = np.array([len(run) for run in repeats]) / args.seconds
        half, most = np.percentile(np.concatenate(repeats), [50, 95])
        spread = f"{np.median(rates):.1f} ({rates.min():.1f} to {rates.max():.1f})"
        rows.append((name, f"{live}", spread, f"{half:.3f}", f"{most:.3f}"))
    print(aligned(rows), flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="shapes-tiny")
    parser.add_argument("--seconds", type=float, default=20, help="length of each measurement")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 8], help="live worlds")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kills", type=int, default=5, help="replicas that are killed to measure failover")
    args = parser.parse_args()
    if args.repeats:
        measure_rounds(args)
    waits = []
    for _ in range(args.kills):
        with ExitStack() as stack:
            waits.append(asyncio.run(fail_over(args.model, stack)))
    if waits:
        print(f"failover: {np.median(waits):.1f} s (median), {max(waits):.1f} s at most, {len(waits)} kills")
    print(machine())


if __name__ == "__main__":
    main()
