"""Two replicas with one thread each against one server with two: rounds per second of live worlds over HTTP.

Every world is a closed loop: its next round is asked for when the last one has arrived. Both variants store
worlds in a SQLite database after every round; the baseline also runs without a database.
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

from worldmodel.serving.client import AsyncClient

ACTION = "the white diamond jumps"


def start(model: str, folder: Path, threads: int, stored: bool, stack: ExitStack) -> str:
    """Start a server on a free port; returns its address."""
    command = [sys.executable, "-P", "-m", "worldmodel", "serve", model, "--port", "0"]
    command += ["--engine", "in-process", "--data-dir", str(folder), "--requests-per-minute", "1000000"]
    command += ["--database", f"sqlite:///{folder / 'worlds.db'}"] if stored else []
    environ = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    stack.callback(server.wait, 90)
    stack.callback(server.terminate)
    assert server.stdout is not None
    found = re.search(r"http://[\d.]+:\d+", server.stdout.readline())
    if found is None:
        raise SystemExit("The server did not start.")
    return found.group()


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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="shapes-tiny")
    parser.add_argument("--seconds", type=float, default=20, help="length of each measurement")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 8], help="live worlds")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    variants = {
        "1 server, 2 threads, no database": (1, 2, False),
        "1 server, 2 threads": (1, 2, True),
        "2 replicas, 1 thread each": (2, 1, True),
    }
    print("| variant | live worlds | rounds/s, median (min to max) | p50 s | p95 s |")
    print("|---|---:|---:|---:|---:|")
    for name, (count, threads, stored) in variants.items():
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            urls = [start(args.model, folder, threads, stored, stack) for _ in range(count)]
            for live in args.worlds:
                runs = [asyncio.run(play(urls, live, args.seconds)) for _ in range(args.repeats)]
                rates = np.array([len(run) for run in runs]) / args.seconds
                half, most = np.percentile(np.concatenate(runs), [50, 95])
                spread = f"{np.median(rates):.1f} ({rates.min():.1f} to {rates.max():.1f})"
                print(f"| {name} | {live} | {spread} | {half:.3f} | {most:.3f} |", flush=True)


if __name__ == "__main__":
    main()
