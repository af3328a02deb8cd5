"""A server under load: latency of steps for 1 and 8 live worlds, then ten times its capacity of videos.

Requests are counted as completed, rejected (429) or failed. Memory is the resident set of the server.
"""

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.resources import as_file, files
from pathlib import Path

import httpx
import numpy as np

from worldmodel.serving.client import AsyncClient

ACTION = "the white diamond jumps"


def start(model: str, folder: str) -> tuple["subprocess.Popen[str]", str]:
    """Start a server on a free port; returns it and its address."""
    command = [sys.executable, "-P", "-m", "worldmodel", "serve", model, "--port", "0", "--data-dir", folder]
    command += ["--requests-per-minute", "1000000", "--max-jobs-per-key", "1000", "--engine", "in-process"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        found = re.search(r"http://[\d.]+:\d+", line)
        if found:
            return server, found.group()
    raise SystemExit("The server did not start.")


def resident_mib(pid: int) -> float:
    """Return the resident set of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024


async def steer(url: str, live: int, rounds: int) -> list[float]:
    """Play rounds in so many worlds at once; returns the seconds from every action to its frames."""
    async with AsyncClient(url) as client:
        with as_file(files("worldmodel.demo") / "first_frame.png") as image:
            worlds = [await client.worlds.create(image, seed=seed) for seed in range(live)]

        async def play(world: object) -> list[float]:
            seconds = []
            for _ in range(rounds):
                began = time.perf_counter()
                await world.step(ACTION)  # type: ignore[attr-defined]
                seconds.append(time.perf_counter() - began)
            return seconds

        played = await asyncio.gather(*(play(world) for world in worlds))
        for world in worlds:
            await world.close()
    return [second for seconds in played for second in seconds[1:]]


async def make_videos(url: str, rate: float, duration_s: float) -> tuple[Counter[str], float]:
    """Ask for videos at a fixed rate whatever the answers; returns the outcomes and the videos per second."""
    outcomes: Counter[str] = Counter()
    body = {"prompt": "night background, a small red ball at the left", "actions": ["the red ball jumps"]}
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=200)) as http:

        async def one() -> None:
            answer = await http.post("/v1/videos", json=body)
            if answer.status_code != 200:
                outcomes["rejected" if answer.status_code == 429 else f"http {answer.status_code}"] += 1
                return
            video = answer.json()
            while video["status"] in ("queued", "in_progress"):
                await asyncio.sleep(0.5)
                video = (await http.get(f"/v1/videos/{video['id']}")).json()
            outcomes[video["status"]] += 1

        began = time.perf_counter()
        tasks = []
        for index in range(int(rate * duration_s)):
            await asyncio.sleep(max(0.0, began + index / rate - time.perf_counter()))
            tasks.append(asyncio.create_task(one()))
        await asyncio.gather(*tasks)
    assert sum(outcomes.values()) == len(tasks), "a request was lost"
    return outcomes, outcomes["completed"] / (time.perf_counter() - began)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="shapes-tiny")
    parser.add_argument("--num-samples", type=int, default=40, help="rounds of each live world")
    parser.add_argument("--seconds", type=float, default=60, help="length of the overload")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server, url = start(args.model, folder)
        try:
            for live in (1, 8):
                seconds = asyncio.run(steer(url, live, args.num_samples))
                half, most = np.percentile(seconds, [50, 95])
                print(f"{live} live: action to frames p50 {half:.3f} s, p95 {most:.3f} s, n = {len(seconds)}")
            before = resident_mib(server.pid)
            _, capacity = asyncio.run(make_videos(url, 3.0, 10))
            print(f"videos at 3 a second: {capacity:.2f} completed a second")
            outcomes, kept = asyncio.run(make_videos(url, 10 * capacity, args.seconds))
            print(f"videos at {10 * capacity:.1f} a second for {args.seconds:.0f} s: {dict(outcomes)}")
            print(f"completed a second: {kept:.2f}, {kept / capacity:.2f} of before")
            print(f"resident: {before:.0f} MiB before, {resident_mib(server.pid):.0f} MiB after")
            assert server.poll() is None, "the server is gone"
        finally:
            server.terminate()
            print(f"exit code after SIGTERM: {server.wait(90)}")


if __name__ == "__main__":
    main()
