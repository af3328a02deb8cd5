"""Time that a data flow saves: training while clips arrive, against one stage after the other.

A web server of this machine sends videos of the shapes world, with a latency per request and a bandwidth per
connection; nothing else waits. The stages fetch, probe, filter and encode run in processes, and the shipped
model is trained on the log by `worldmodel train` (objective joint, latents of the stage encode).

one-pass  the flow with training beside it, and the same three phases one after the other: fetch all, then
          probe, filter and encode all, then train. Workers, connections, batches and steps are the same.
memory    memory of the flow with few clips, and with ten times as many that a slow training reads.
"""

import argparse
import http.server
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import yaml

from worldmodel.flow.log.log import READER
from worldmodel.flow.storage import Storage

SEGMENT, BATCH = 32, 8
COLUMNS = {"address": "path", "text": "text", "keys": "keys"}


def main() -> None:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("one-pass", "memory", "serve"))
    parser.add_argument("--clips", type=int, default=256, help="clips of a pass (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=2, help="of a clip; training reads two (default: %(default)s)"
    )
    parser.add_argument("--pairs", type=int, default=2, help="of runs (default: %(default)s)")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--latency-ms", type=float, default=200.0, help="of a request (default: %(default)s)")
    parser.add_argument(
        "--kilobytes-s", type=float, default=40.0, help="per connection (default: %(default)s)"
    )
    parser.add_argument("--connections", type=int, default=4, help="of fetch (default: %(default)s)")
    parser.add_argument("--folder", help="folder of the videos, kept for the next run")
    args = parser.parse_args()
    if args.what == "serve":
        return serve(Path(args.folder), args.port, args.latency_ms / 1000, args.kilobytes_s * 1000)
    videos = recorded(args)
    work = Path(tempfile.mkdtemp(prefix="flow-benchmark-"))
    with server(videos, args) as root:
        {"one-pass": one_pass, "memory": memory}[args.what](work, videos, root, args)
    return None


def recorded(args: argparse.Namespace) -> Path:
    """Return the folder of the videos; record them unless it has some."""
    videos = Path(args.folder or tempfile.mkdtemp(prefix="flow-videos-"))
    if not (videos / "clips.jsonl").exists():
        length = ("--episodes", str(args.clips), "--rounds", str(args.rounds))
        run("record", "shapes", "--out", str(videos), *length)
    if (count := len((videos / "clips.jsonl").read_text().splitlines())) != args.clips:
        sys.exit(f"{videos} has {count} clips, not {args.clips}; use --clips {count} or another --folder.")
    return videos


def one_pass(work: Path, videos: Path, root: str, args: argparse.Namespace) -> None:
    """Compare training beside the flow with one phase after the other, in pairs whose order alternates."""
    train = train_config(work / "train.yaml", args.clips // BATCH)
    ratios = []
    for number in range(args.pairs):
        folder = work / f"pair-{number}"
        folder.mkdir()
        arms = [partial(arm, folder, videos, root, args, train) for arm in (streamed, staged)]
        seconds = {arm.func: arm() for arm in (arms if number % 2 == 0 else arms[::-1])}
        ratios.append(seconds[staged] / seconds[streamed])
        print(f"{ratios[-1]:.2f} times as fast", flush=True)
    print(f"median of {len(ratios)} pairs: {statistics.median(ratios):.2f} times as fast")


def streamed(folder: Path, videos: Path, root: str, args: argparse.Namespace, train: Path) -> float:
    """Run the flow with training beside it; return its seconds."""
    flow = flow_config(folder / "streamed.yaml", folder / "streamed", videos, root, args)
    began = time.monotonic()
    with first_times(folder / "streamed") as seen:
        used = run(
            "flow", "run", str(flow), "--train", str(train), "--", f"run_dir={folder / 'streamed-run'}"
        )
    took = time.monotonic() - began
    print(
        f"streamed: {took:.1f} s ({used:.1f} s of CPU); first segment after {seen['segment'] - began:.1f} s"
    )
    print(f"first batch {seen['batch'] - seen['segment']:.2f} s after the first segment")
    return took


def staged(folder: Path, videos: Path, root: str, args: argparse.Namespace, train: Path) -> float:
    """Run one phase after the other; return their seconds."""
    configs = [
        flow_config(folder / f"staged-{len(stages)}.yaml", folder / "staged", videos, root, args, stages)
        for stages in (["fetch"], ["fetch", "probe", "filter", "encode"])
    ]
    log = f"data.sources.web.path={folder / 'staged' / 'log'}"
    phases = {
        "fetch": ("flow", "run", str(configs[0])),
        "encode": ("flow", "run", str(configs[1])),
        "train": ("train", str(train), f"run_dir={folder / 'staged-run'}", log),
    }
    times = {}
    for name, command in phases.items():
        began = time.monotonic()
        used = run(*command)
        times[name] = (time.monotonic() - began, used)
    walls = [wall for wall, _ in times.values()]
    each = " + ".join(f"{name} {wall:.1f} ({used:.1f} of CPU)" for name, (wall, used) in times.items())
    print(
        f"one after the other: {sum(walls):.1f} s = {each}; this balance allows {sum(walls) / max(walls):.2f}"
    )
    return sum(walls)


def copied(videos: Path, table: Path, copies: int) -> Path:
    """Write a table that names every video several times, under an address of its own, and return it."""
    rows = [json.loads(row) for row in (videos / "clips.jsonl").read_text().splitlines()]
    with table.open("w") as file:
        for copy in range(copies):
            file.writelines(json.dumps({**row, "path": f"{row['path']}?{copy}"}) + "\n" for row in rows)
    return table


def memory(work: Path, videos: Path, root: str, args: argparse.Namespace) -> None:
    """Compare the memory of a short flow and of a long one whose reader is slow."""
    for times in (1, 10):
        table = copied(videos, work / f"clips-{times}.jsonl", times)
        config = flow_config(
            work / f"memory-{times}.yaml", work / f"memory-{times}", videos, root, args,
            ["fetch", "probe", "filter"], table=table, max_lead=2 if times > 1 else 0, max_in_flight=128,
        )  # fmt: skip
        command = [sys.executable, "-P", "-m", "worldmodel", "flow", "run", str(config)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        most, shown, began = 0, psutil.Process(process.pid), time.monotonic()
        log = work / f"memory-{times}" / "log"
        while process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                each = [shown, *shown.children(recursive=True)]
                most = max(most, sum(child.memory_full_info().uss for child in each))
            for layout in log.glob("*/layout.json"):  # a reader that begins a segment every second
                Storage(str(layout.parent)).write(READER, str(int(time.monotonic() - began)).encode())
            time.sleep(0.25)
        print(f"{times * args.clips} clips: {time.monotonic() - began:.0f} s, {most / 2**20:.0f} MiB at most")


def flow_config(
    path: Path,
    folder: Path,
    videos: Path,
    root: str,
    args: argparse.Namespace,
    stages: list[str] | None = None,
    table: Path | None = None,
    **settings: Any,
) -> Path:
    """Write the config of a flow and return its path."""
    count = args.connections
    fetch = {"allow_private": True, "robots": "ignore", "concurrency": count, "per_host": count}
    known = {
        "fetch": {"settings": fetch, "batch_size": 2 * count},
        "probe": {},
        "filter": {},
        "encode": {"settings": {"model": "shapes-tiny", "columns": {"text": "text", "keys": "keys"}}},
    }
    source = {"path": str(table or videos / "clips.jsonl"), "root": root, "columns": COLUMNS}
    values = {
        "folder": str(folder),
        "sources": {"web": source},
        "stages": {name: known[name] for name in stages or known},
        "pack": ["latents", "text"],
        "segment_size": SEGMENT,
        "max_in_flight": 256,
        **settings,
    }
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def train_config(path: Path, steps: int) -> Path:
    """Write the config of a training and return its path."""
    stage = {
        "objective": "joint", "steps": steps, "batch_size": BATCH, "rounds": 2, "tasks": {"rounds": 1.0},
        "lr": 1e-4, "muon_lr": 0.0, "train": {"adapters": {}, "generator": {}, "backbone": {"lora_rank": 16}},
    }  # fmt: skip
    values = {
        "init_from": "shapes-tiny",
        "checkpoint_every": 10**6,
        "sample_every": 0,
        "data": {"sources": {"web": {"kind": "flow", "columns": {"text": "text", "keys": "keys"}}}},
        "stages": {"joint": stage},
    }
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


@contextmanager
def first_times(flow: Path) -> Iterator[dict[str, float]]:
    """Yield when the first segment was sealed, and when a loader that waited for it had the first batch."""
    from worldmodel import config as configs
    from worldmodel.data import loader

    seen: dict[str, float] = {}
    ended = threading.Event()

    def look() -> None:
        while "segment" not in seen and not ended.wait(0.005):
            if list(flow.glob("log/*/000000.json")):
                seen["segment"] = time.monotonic()

    def load() -> None:
        while not (flow / "log" / "log.json").exists() and not ended.wait(0.05):
            pass
        data = configs.DataConfig({"web": configs.SourceConfig("flow", str(flow / "log"))}, timeout_s=600)
        stage = configs.StageConfig(batch_size=BATCH, rounds=1, tasks={"rounds": 1.0})
        model = configs.load("shapes_tiny").model
        with loader.batches(data, model, stage, 0) as batches:
            next(batches)
            seen["batch"] = time.monotonic()

    threads = [threading.Thread(target=each, daemon=True) for each in (look, load)]
    for thread in threads:
        thread.start()
    yield seen
    ended.set()


def run(*arguments: str) -> float:
    """Run a command of `worldmodel` and stop if it fails; return its processor time in seconds."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "worldmodel", *arguments]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@contextmanager
def server(videos: Path, args: argparse.Namespace) -> Iterator[str]:
    """Run a web server in a process of its own and yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    limits = ["--latency-ms", str(args.latency_ms), "--kilobytes-s", str(args.kilobytes_s)]
    command = [sys.executable, "-P", __file__, "serve", "--folder", str(videos), "--port", str(port), *limits]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


class SlowHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files with a latency, and a bandwidth per connection."""

    latency_s, bytes_s = 0.0, 1e9

    def copyfile(self, source: Any, outputfile: Any) -> None:
        """Send a file slowly."""
        time.sleep(self.latency_s)
        while part := source.read(4096):
            outputfile.write(part)
            time.sleep(len(part) / self.bytes_s)


def serve(folder: Path, port: int, latency_s: float, bytes_s: float) -> None:
    """Serve a folder until the process is killed."""
    SlowHandler.latency_s, SlowHandler.bytes_s = latency_s, bytes_s
    handler = partial(SlowHandler, directory=str(folder))
    http.server.ThreadingHTTPServer(("127.0.0.1", port), handler).serve_forever()


if __name__ == "__main__":
    main()
