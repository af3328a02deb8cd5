"""A real server under load, by HTTP and WebSocket. All requests come from one process beside it.

rounds      rounds per second of 1, 4 and 16 worlds that are steered without a pause, against one in process
keys        what it costs to share the model fairly: the same 16 worlds, of one key and of 4 and 16 keys
live        seconds from an action to its first frame on WebSockets of pace `asap`, 1 and 8 sessions
soak        clients that steer, ask, fork and order videos without a pause, for `--minutes`
kills       SIGKILL at random moments under load: which accepted videos and stored worlds are lost
"""

import argparse
import asyncio
import itertools
import json
import random
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from importlib.resources import as_file, files
from pathlib import Path

import httpx
import numpy as np
import psutil
from tqdm import tqdm
from websockets.asyncio.client import connect

from worldmodel.eval.speed import machine
from worldmodel.eval.table import aligned
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout import Session
from worldmodel.serving.client import AsyncClient
from worldmodel.serving.client.aio import AsyncRemoteWorld

ACTION = "the white diamond jumps"
VIDEO = {"prompt": "night background, a small red ball at the left", "actions": ["the red ball jumps"]}
LIMITS = {"max-jobs-per-key": 1000, "requests-per-minute": 1_000_000}
MAX_SLOPE_MIB = 1.0
"""Growth of a server's memory, in MiB a minute over the second half of a soak, that counts as level."""
JUDGED_S = 600.0
"""Shortest soak whose memory is judged: a server still warms up in the first minutes."""
PARTS = 10
"""Parts of a long run that are compared."""


class Server:
    """A process of `worldmodel serve` on one data folder, which can be started again at the same address."""

    def __init__(self, model: str, folder: str, *options: str) -> None:
        self.port = "0"
        self._command = [sys.executable, "-P", "-m", "worldmodel", "serve", model, "--engine", "in-process"]
        self._command += ["--data-dir", folder, *options]
        self._command += [part for name, value in LIMITS.items() for part in (f"--{name}", str(value))]
        self.start()

    def start(self) -> None:
        """Start the process and wait until it answers."""
        self.process = subprocess.Popen(
            [*self._command, "--port", self.port],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"http://[\d.]+:(\d+)", line):
                self.url, self.port = found.group(), found[1]
                return
        raise SystemExit("The server did not start.")

    def resident_mib(self) -> float:
        """Return the resident set of the process."""
        return psutil.Process(self.process.pid).memory_info().rss / 2**20

    def processor_s(self) -> float:
        """Return the processor time that the process has taken, which other load disturbs least."""
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def mean_batch(self) -> float:
        """Return the mean number of chunks per denoising step since the server started."""
        text = httpx.get(f"{self.url}/metrics").text
        return float(re.findall(r"^worldmodel_batch_occupancy\S* (\S+)$", text, flags=re.MULTILINE)[0])


@contextmanager
def serving(model: str, *, stored: bool = False, keys: Sequence[str] = ()) -> Iterator[Server]:
    """Start a server in a folder of its own, with a database if worlds are stored, and stop it."""
    with tempfile.TemporaryDirectory() as folder:
        options = ("--database", f"sqlite:///{folder}/worlds.db") if stored else ()
        if keys:
            file = Path(folder, "keys")
            file.touch(0o600)
            file.write_text("\n".join(keys), "ascii")
            options += ("--keys-file", str(file))
        server = Server(model, folder, *options)
        try:
            yield server
            assert server.process.poll() is None, "the server is gone"
        finally:
            server.process.terminate()
            server.process.wait(90)


# ---- rounds ----------------------------------------------------------------------------------------------


async def steer(
    server: Server, live: int, rounds: int, keys: Sequence[str | None] = (None,)
) -> tuple[list[float], float, float]:
    """Play rounds in so many worlds at once, which belong to the keys in turn.

    Returns:
        The seconds of each round, rounds per second, and milliseconds of processor time per round.
    """
    async with AsyncExitStack() as opened:
        clients = [await opened.enter_async_context(AsyncClient(server.url, key)) for key in keys]
        with as_file(files("worldmodel.demo") / "first_frame.png") as image:
            worlds = [await clients[seed % len(keys)].worlds.create(image, seed=seed) for seed in range(live)]
        await asyncio.gather(*(world.step(ACTION) for world in worlds))

        async def play(world: AsyncRemoteWorld) -> list[float]:
            seconds = []
            for _ in range(rounds):
                began = time.perf_counter()
                await world.step(ACTION)
                seconds.append(time.perf_counter() - began)
            return seconds

        worked, began = server.processor_s(), time.perf_counter()
        played = await asyncio.gather(*(play(world) for world in worlds))
        taken, worked = time.perf_counter() - began, server.processor_s() - worked
        for world in worlds:
            await world.close()
    total = live * rounds
    return [second for seconds in played for second in seconds], total / taken, 1000 * worked / total


def play_in_process(session: Session, rounds: int) -> tuple[list[float], float, float]:
    """Play rounds of one world with the library; returns what `steer` does."""
    with as_file(files("worldmodel.demo") / "first_frame.png") as image:
        session.reset(image)
    session.step(ACTION)
    seconds, worked = [], time.process_time()
    for _ in range(rounds):
        began = time.perf_counter()
        session.step(ACTION)
        seconds.append(time.perf_counter() - began)
    return seconds, rounds / sum(seconds), 1000 * (time.process_time() - worked) / rounds


def measure_rounds(args: argparse.Namespace) -> None:
    """Print the table of rounds: medians of repeats, with the lowest and highest rate."""
    session = WorldModel.from_pretrained(args.model).session()
    runs: dict[str, list[tuple[list[float], float, float, float]]] = {}
    for _ in tqdm(range(args.repeats), desc="repeats"):
        runs.setdefault("1, in process", []).append((*play_in_process(session, args.num_samples), 1.0))
        for live in args.live or (1, 4, 16):
            with serving(args.model) as server:
                measured = asyncio.run(steer(server, live, args.num_samples))
                runs.setdefault(f"{live}, HTTP", []).append((*measured, server.mean_batch()))
    rows = [("worlds", "rounds/s", "p50, s", "p95, s", "processor ms/round", "mean batch", "against 1")]
    one = statistics.median(rate for _, rate, _, _ in runs["1, in process"])
    for name, repeats in runs.items():
        half, most = np.percentile(np.concatenate([seconds for seconds, *_ in repeats]), [50, 95])
        rates = [rate for _, rate, _, _ in repeats]
        worked = statistics.median(worked for _, _, worked, _ in repeats)
        batch = statistics.median(batch for *_, batch in repeats)
        rate = statistics.median(rates)
        spread = f"{rate:.1f} ({min(rates):.1f} to {max(rates):.1f})"
        cells = (f"{half:.3f}", f"{most:.3f}", f"{worked:.0f}", f"{batch:.1f}", f"{rate / one:.2f}x")
        rows.append((name, spread, *cells))
    print(aligned(rows))


# ---- keys ------------------------------------------------------------------------------------------------


def measure_keys(args: argparse.Namespace) -> None:
    """Print what a round of the same worlds costs if they belong to one key, and to several.

    With one key the scheduler has nothing to divide. Repeats of all numbers of keys follow each other on one
    server, so that other load on the machine meets all alike.
    """
    worlds, keys = max(args.live or (16,)), [secrets.token_urlsafe(16) for _ in range(16)]
    counts = (1, 4, 16)
    worked: dict[int, list[float]] = {count: [] for count in counts}
    rates: dict[int, list[float]] = {count: [] for count in counts}
    with serving(args.model, keys=keys) as server:
        asyncio.run(steer(server, worlds, 3, keys))  # warms up
        for _ in tqdm(range(args.repeats), desc="repeats"):
            for count in counts:
                _, rate, cost = asyncio.run(steer(server, worlds, args.num_samples, keys[:count]))
                worked[count].append(cost)
                rates[count].append(rate)
    rows = [("keys", "processor ms/round", "rounds/s", "throughput against one key, by processor time")]
    for count in counts:
        cost = statistics.median(worked[count])
        # Of each repeat by itself: its runs are neighbours in time.
        ratios = [one / own for one, own in zip(worked[1], worked[count], strict=True)]
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        rows.append((f"{count}", f"{cost:.1f}", f"{statistics.median(rates[count]):.1f}", spread))
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
    """Print the latency of live sessions, and the processor time of an action."""
    latencies: dict[int, list[float]] = {}
    worked: dict[int, list[float]] = {}

    async def play(url: str, live: int) -> list[list[float]]:
        return await asyncio.gather(*(act_live(url, args.num_samples) for _ in range(live)))

    for _ in range(args.repeats):
        with serving(args.model) as server:
            asyncio.run(play(server.url, 1))  # warms up
            for live in args.live or (1, 8):
                began = server.processor_s()
                seconds = np.concatenate(asyncio.run(play(server.url, live)))
                latencies.setdefault(live, []).extend(seconds)
                worked.setdefault(live, []).append(1000 * (server.processor_s() - began) / len(seconds))
    rows = [("live sessions", "p50, ms", "p95, ms", "processor ms/action", "actions")]
    for live, seconds in latencies.items():
        half, most = 1000 * np.percentile(seconds, [50, 95])
        cost = statistics.median(worked[live])
        rows.append((f"{live}", f"{half:.0f}", f"{most:.0f}", f"{cost:.0f}", f"{len(seconds)}"))
    print(aligned(rows))


# ---- soak ------------------------------------------------------------------------------------------------


class Record:
    """Record of a long run: outcomes of requests, and memory and throughput of its parts."""

    def __init__(self, server: Server, duration_s: float) -> None:
        self.server, self.duration_s, self.began = server, duration_s, time.perf_counter()
        self.outcomes: Counter[str] = Counter()
        self.finished = [0] * PARTS
        self.resident: list[float] = []

    @property
    def left_s(self) -> float:
        """Seconds until the end of the run."""
        return self.began + self.duration_s - time.perf_counter()

    def status(self, code: int) -> None:
        """Count a response by its status."""
        self.outcomes[f"{code // 100}xx" if code != 429 else "429"] += 1

    def finish(self) -> None:
        """Count a finished piece of work."""
        if self.left_s > 0:
            self.finished[int(PARTS * (1 - self.left_s / self.duration_s))] += 1

    async def watch(self) -> None:
        """Measure the memory of the server after each part."""
        for part in range(PARTS + 1):
            await asyncio.sleep(max(0.0, self.began + part * self.duration_s / PARTS - time.perf_counter()))
            self.resident.append(self.server.resident_mib())

    @property
    def slope_mib(self) -> float:
        """Growth of the memory in MiB a minute over the second half, after what warms up.

        It is the median over pairs of moments, which one moment of large buffers does not change.
        """
        part_min, half = self.duration_s / PARTS / 60, self.resident[PARTS // 2 :]
        pairs = itertools.combinations(enumerate(half), 2)
        return statistics.median((b - a) / ((j - i) * part_min) for (i, a), (j, b) in pairs)

    @property
    def faults(self) -> list[str]:
        """What a server under constant load must not show; empty if it showed none."""
        failed = [name for name in self.outcomes if name.startswith(("5", "videos failed", "answers"))]
        found = [f"{self.outcomes[name]} x {name}" for name in failed]
        if self.slope_mib > MAX_SLOPE_MIB and self.duration_s >= JUDGED_S:
            found.append(f"memory grows by {self.slope_mib:.2f} MiB a minute, more than {MAX_SLOPE_MIB:g}")
        return found

    def __str__(self) -> str:
        part_s = self.duration_s / PARTS
        first, last = self.finished[1] / part_s, self.finished[-1] / part_s
        settled, end = self.resident[1], self.resident[-1]
        return (
            f"{self.duration_s / 60:.1f} min: {dict(self.outcomes)}\n"
            f"finished a second: {first:.2f} in the second tenth, {last:.2f} in the last "
            f"({last / first:.2f} of it)\n"
            f"resident, MiB, by tenths: {', '.join(f'{each:.0f}' for each in self.resident)} "
            f"({100 * (end / settled - 1):+.1f} % since the first; slope of the second half "
            f"{self.slope_mib:+.2f} MiB a minute)\n"
            f"verdict: {'; '.join(self.faults) or 'no errors'}, "
            f"{'memory judged' if self.duration_s >= JUDGED_S else 'too short to judge the memory'}"
        )


async def order_video(http: httpx.AsyncClient, record: Record) -> None:
    """Order a video and wait for its end, as a client that is told to come back would."""
    answer = await http.post("/v1/videos", json=VIDEO)
    record.status(answer.status_code)
    if answer.status_code != 200:
        return
    video = answer.json()
    while video["status"] in ("queued", "in_progress"):
        await asyncio.sleep(0.5)
        answer = await http.get(f"/v1/videos/{video['id']}")
        record.status(answer.status_code)
        if answer.status_code == 200:
            video = answer.json()
        elif answer.status_code != 429:
            record.outcomes[f"answers to a poll: {answer.text[:200]}"] += 1
            return
    record.outcomes[f"videos {video['status']}"] += 1
    if video["status"] == "completed":
        record.finish()
        await http.delete(f"/v1/videos/{video['id']}")  # a key may keep 1,000


async def soak(server: Server, clients: int, duration_s: float) -> Record:
    """Let clients use all kinds of requests in a closed loop; a finished round counts as a piece of work."""
    record = Record(server, duration_s)

    async def counted(response: httpx.Response) -> None:
        record.status(response.status_code)

    async def one(seed: int) -> None:
        async with httpx.AsyncClient(
            base_url=server.url, timeout=120, event_hooks={"response": [counted]}
        ) as http:
            while record.left_s > 0:
                body = {"text": VIDEO["prompt"], "seed": seed}
                started = (await http.post("/v1/worlds", json=body)).json()
                world = started["id"]
                for step_id in range(started["round"] + 1, started["round"] + 5):
                    step = {"step_id": step_id, "action": {"text": ACTION}}
                    await http.post(f"/v1/worlds/{world}/step", json=step)
                    record.finish()
                await http.post(f"/v1/worlds/{world}/describe", json={})
                fork = (await http.post(f"/v1/worlds/{world}/fork")).json()["id"]
                await asyncio.gather(*(http.delete(f"/v1/worlds/{each}") for each in (world, fork)))
                if seed == 0:
                    await order_video(http, record)
                    await act_live(server.url, 2)

    await asyncio.gather(record.watch(), *(one(seed) for seed in range(clients)))
    return record


def measure_soak(args: argparse.Namespace) -> None:
    """Print whether a server under constant load keeps its memory and throughput; exit with 1 if not."""
    with serving(args.model) as server:
        record = asyncio.run(soak(server, 8, 60 * args.minutes))
    print(record)
    if record.faults:
        sys.exit(1)


# ---- kills -----------------------------------------------------------------------------------------------


def order(url: str, number: int) -> str | None:
    """Order a video as a client that repeats itself until it has an answer; None while the server is away."""
    with suppress(httpx.TransportError):
        answer = httpx.post(f"{url}/v1/videos", json=VIDEO, headers={"Idempotency-Key": f"order-{number}"})
        if answer.status_code == 200:
            return answer.json()["id"]
    return None


class StoredWorld:
    """A world that is steered while its server is killed, and the last round that was acknowledged."""

    def __init__(self, url: str, seed: int) -> None:
        body = {"text": VIDEO["prompt"], "seed": seed}
        answer = httpx.post(f"{url}/v1/worlds", json=body, timeout=60).raise_for_status()
        self.path, self.round = f"{url}/v1/worlds/{answer.json()['id']}", answer.json()["round"]

    def step(self) -> None:
        """Play the next round; a client whose answer was lost repeats the same step."""
        body = {"step_id": self.round + 1, "action": {"text": ACTION}}
        answer = httpx.post(f"{self.path}/step", json=body, timeout=60)
        if answer.status_code == 200:
            self.round += 1

    def kept(self) -> bool:
        """Return whether the server goes on after the last acknowledged round."""
        before = self.round
        self.step()
        return self.round == before + 1


def measure_kills(args: argparse.Namespace) -> None:
    """Print how many of the accepted videos and of the stored worlds were lost."""
    rng = random.Random(args.seed)
    accepted: dict[int, str] = {}
    away: list[float] = []
    outcomes: Counter[str] = Counter()
    with serving(args.model, stored=True) as server:
        worlds = [StoredWorld(server.url, seed) for seed in range(4)]
        for _ in tqdm(range(args.kills), desc="kills"):
            killer = threading.Timer(rng.uniform(0.2, 3.0), server.process.kill)
            killer.start()
            while server.process.poll() is None:
                number = len(accepted)
                if identity := order(server.url, number):
                    accepted[number] = identity
                with suppress(httpx.TransportError):
                    rng.choice(worlds).step()
            began = time.perf_counter()
            server.start()
            away.append(time.perf_counter() - began)
            outcomes.update("worlds kept" if world.kept() else "worlds lost" for world in worlds)
        for number, identity in accepted.items():
            assert order(server.url, number) == identity, "an order was accepted twice"
            video = httpx.get(f"{server.url}/v1/videos/{identity}").json()
            while video.get("status") in ("queued", "in_progress"):
                time.sleep(0.2)
                video = httpx.get(f"{server.url}/v1/videos/{identity}").json()
            outcomes[f"videos {video.get('status', 'lost')}"] += 1
    lost = len(accepted) - outcomes["videos completed"]
    print(f"{args.kills} kills, {len(accepted)} accepted videos, {len(worlds)} worlds: {dict(outcomes)}")
    print(f"{lost} videos and {outcomes['worlds lost']} worlds lost")
    print(f"back after {np.median(away):.1f} s (median), {max(away):.1f} s at most")


MEASURES = {
    "rounds": measure_rounds,
    "keys": measure_keys,
    "live": measure_live,
    "soak": measure_soak,
    "kills": measure_kills,
}


def main() -> None:
    """Measure and print."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("what", choices=MEASURES)
    parser.add_argument("--model", default="shapes-tiny")
    parser.add_argument("--num-samples", type=int, default=40, help="rounds of a world or session")
    parser.add_argument("--repeats", type=int, default=3, help="servers of each kind that are measured")
    parser.add_argument("--live", type=int, nargs="+", help="numbers of worlds or sessions")
    parser.add_argument("--minutes", type=float, default=10, help="length of the soak")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    MEASURES[args.what](args)
    print(machine())


if __name__ == "__main__":
    main()
