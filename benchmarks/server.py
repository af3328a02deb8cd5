"""A real server under load, by HTTP and WebSocket. All requests come from one process beside it.

rounds      rounds per second of 1, 4 and 16 worlds that are steered without a pause, against one in process
live        seconds from an action to its first frame on WebSockets of pace `asap`, 1 and 8 sessions
overload    ten times as many videos as it can generate; memory. `--seconds` makes it a soak
kills       SIGKILL at random moments while videos are ordered: which of the accepted ones are lost
"""

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.resources import as_file, files
from pathlib import Path

import httpx
import numpy as np
from tqdm import tqdm
from websockets.asyncio.client import connect

from worldmodel.eval.tables import aligned
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.client import AsyncClient

ACTION = "the white diamond jumps"
VIDEO = {"prompt": "night background, a small red ball at the left", "actions": ["the red ball jumps"]}


class Server:
    """A process of `worldmodel serve` on one data folder, which can be started again at the same address."""

    def __init__(self, model: str, folder: str) -> None:
        self.model, self.folder, self.port = model, folder, "0"
        self.start()

    def start(self) -> None:
        """Start the process and wait until it answers."""
        command = [sys.executable, "-P", "-m", "worldmodel", "serve", self.model, "--port", self.port]
        command += ["--data-dir", self.folder, "--engine", "in-process", "--max-jobs-per-key", "1000"]
        command += ["--requests-per-minute", "1000000"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"http://[\d.]+:(\d+)", line):
                self.url, self.port = found.group(), found[1]
                return
        raise SystemExit("The server did not start.")

    def resident_mib(self) -> float:
        """Return the resident set of the process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024

    def mean_batch(self) -> float:
        """Return the mean number of chunks per denoising step since the server started."""
        text = httpx.get(f"{self.url}/metrics").text
        return float(re.findall(r"^worldmodel_batch_occupancy\S* (\S+)$", text, flags=re.MULTILINE)[0])


@contextmanager
def serving(model: str) -> Iterator[Server]:
    """Start a server in a folder of its own, and stop it."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(model, folder)
        try:
            yield server
            assert server.process.poll() is None, "the server is gone"
        finally:
            server.process.terminate()
            server.process.wait(90)


# ---- rounds ----------------------------------------------------------------------------------------------


async def steer(url: str, live: int, rounds: int) -> tuple[list[float], float]:
    """Play rounds in so many worlds at once; returns the seconds of each, and the rounds per second."""
    async with AsyncClient(url) as client:
        with as_file(files("worldmodel.demo") / "first_frame.png") as image:
            worlds = [await client.worlds.create(image, seed=seed) for seed in range(live)]
        for world in worlds:
            await world.step(ACTION)

        async def play(world: object) -> list[float]:
            seconds = []
            for _ in range(rounds):
                began = time.perf_counter()
                await world.step(ACTION)  # type: ignore[attr-defined]
                seconds.append(time.perf_counter() - began)
            return seconds

        began = time.perf_counter()
        played = await asyncio.gather(*(play(world) for world in worlds))
        rate = live * rounds / (time.perf_counter() - began)
        for world in worlds:
            await world.close()
    return [second for seconds in played for second in seconds], rate


def in_process(model: str, rounds: int) -> tuple[list[float], float]:
    """Play rounds of one world with the library."""
    session = WorldModel.from_pretrained(model).session()
    with as_file(files("worldmodel.demo") / "first_frame.png") as image:
        session.reset(image)
    session.step(ACTION)
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        session.step(ACTION)
        seconds.append(time.perf_counter() - began)
    return seconds, rounds / sum(seconds)


def measure_rounds(args: argparse.Namespace) -> None:
    """Print the table of rounds."""
    seconds, one = in_process(args.model, args.num_samples)
    half, most = np.percentile(seconds, [50, 95])
    rows = [("worlds", "rounds/s", "p50, s", "p95, s", "mean batch", "against one in process")]
    rows.append(("1, in process", f"{one:.1f}", f"{half:.3f}", f"{most:.3f}", "1.0", "1.00x"))
    for live in (1, 4, 16):
        with serving(args.model) as server:
            seconds, rate = asyncio.run(steer(server.url, live, args.num_samples))
            half, most = np.percentile(seconds, [50, 95])
            batch = f"{server.mean_batch():.1f}"
        rows.append(
            (f"{live}, HTTP", f"{rate:.1f}", f"{half:.3f}", f"{most:.3f}", batch, f"{rate / one:.2f}x")
        )
    print(aligned(rows))


# ---- live ------------------------------------------------------------------------------------------------


async def act_live(url: str, rounds: int) -> list[float]:
    """Play one live session; returns the seconds from each action to its first frame."""
    seconds: list[float] = []
    async with connect(f"{url.replace('http', 'ws', 1)}/v1/realtime/video", max_size=None) as socket:

        async def until(kind: str) -> None:
            while True:
                message = await socket.recv()
                if isinstance(message, str) and json.loads(message)["type"] == kind:
                    return

        await until("session.created")
        await socket.send(json.dumps({"type": "session.start", "text": VIDEO["prompt"], "pace": "asap"}))
        await until("video.chunk_metadata")
        for index in range(rounds + 1):
            interaction = {"event_id": f"e{index}", "event": {"action": "the red ball jumps"}}
            began = time.perf_counter()
            await socket.send(json.dumps({"type": "session.interaction", "interaction": interaction}))
            await until("video.chunk_metadata")
            while isinstance(await socket.recv(), str):
                pass
            seconds.append(time.perf_counter() - began)
    return seconds[1:]


def measure_live(args: argparse.Namespace) -> None:
    """Print the latency of live sessions."""
    with serving(args.model) as server:
        for live in (1, 8):

            async def play(live: int = live) -> list[list[float]]:
                return await asyncio.gather(*(act_live(server.url, args.num_samples) for _ in range(live)))

            seconds = np.concatenate(asyncio.run(play()))
            half, most = 1000 * np.percentile(seconds, [50, 95])
            print(f"{live} live: first frame after p50 {half:.0f} ms, p95 {most:.0f} ms, n = {len(seconds)}")


# ---- overload --------------------------------------------------------------------------------------------


async def make_videos(url: str, rate: float, duration_s: float) -> tuple[Counter[str], float]:
    """Ask for videos at a fixed rate whatever the answers; returns the outcomes and the videos per second."""
    outcomes: Counter[str] = Counter()
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=200)) as http:

        async def one() -> None:
            answer = await http.post("/v1/videos", json=VIDEO)
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


def measure_overload(args: argparse.Namespace) -> None:
    """Print what becomes of ten times the videos that the server can generate."""
    with serving(args.model) as server:
        _, capacity = asyncio.run(make_videos(server.url, 3.0, 10))
        print(f"videos at 3 a second: {capacity:.2f} completed a second")
        before = server.resident_mib()
        outcomes, kept = asyncio.run(make_videos(server.url, 10 * capacity, args.seconds))
        print(f"videos at {10 * capacity:.1f} a second for {args.seconds:.0f} s: {dict(outcomes)}")
        print(f"completed a second: {kept:.2f}, {kept / capacity:.2f} of before")
        print(f"resident: {before:.0f} MiB before, {server.resident_mib():.0f} MiB after")


# ---- kills -----------------------------------------------------------------------------------------------


def order(url: str, number: int) -> str | None:
    """Order a video as a client that repeats itself until it has an answer; None while the server is away."""
    with suppress(httpx.TransportError):
        answer = httpx.post(f"{url}/v1/videos", json=VIDEO, headers={"Idempotency-Key": f"order-{number}"})
        if answer.status_code == 200:
            return answer.json()["id"]
    return None


def measure_kills(args: argparse.Namespace) -> None:
    """Print how many of the accepted videos were lost."""
    rng = random.Random(args.seed)
    accepted: dict[int, str] = {}
    away: list[float] = []
    with serving(args.model) as server:
        for _ in tqdm(range(args.kills), desc="kills"):
            ends = time.perf_counter() + rng.uniform(0.2, 3.0)
            while time.perf_counter() < ends:
                number = len(accepted)
                if identity := order(server.url, number):
                    accepted[number] = identity
                time.sleep(rng.uniform(0, 0.4))
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
            began = time.perf_counter()
            server.start()
            away.append(time.perf_counter() - began)
        outcomes: Counter[str] = Counter()
        for number, identity in accepted.items():
            assert order(server.url, number) == identity, "an order was accepted twice"
            video = httpx.get(f"{server.url}/v1/videos/{identity}").json()
            while video.get("status") in ("queued", "in_progress"):
                time.sleep(0.2)
                video = httpx.get(f"{server.url}/v1/videos/{identity}").json()
            outcomes[video.get("status", "lost")] += 1
    lost = len(accepted) - outcomes["completed"]
    print(f"{args.kills} kills, {len(accepted)} accepted videos: {dict(outcomes)}, {lost} lost")
    print(f"back after {np.median(away):.1f} s (median), {max(away):.1f} s at most")


MEASURES = {
    "rounds": measure_rounds,
    "live": measure_live,
    "overload": measure_overload,
    "kills": measure_kills,
}


def main() -> None:
    """Measure and print."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("what", choices=MEASURES)
    parser.add_argument("--model", default="shapes-tiny")
    parser.add_argument("--num-samples", type=int, default=40, help="rounds of each world")
    parser.add_argument("--seconds", type=float, default=60, help="length of the overload")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    MEASURES[args.what](args)


if __name__ == "__main__":
    main()
