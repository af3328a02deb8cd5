"""Tiers of machines without Ray: one fetches and filters, one encodes, one trains, and each is killed once.

They are network namespaces, and share PostgreSQL and an object store over TCP, and one YAML.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from machines import Machines
from object_store import object_store
from postgres import PostgresServer
from safetensors.torch import load_file
from web import Answer, Exchange, Web, served

from worldmodel.config import build, to_dict
from worldmodel.config.flow import FlowConfig
from worldmodel.flow.log.log import Log
from worldmodel.flow.log.status import StatusReader
from worldmodel.media.encoding import encode_video

pytestmark = pytest.mark.slow
CLIPS, SEGMENT, STEPS = 24, 4, 8
LIMIT_S = 1500.0
TIERS = {"cpu": ["--stages", "feed,fetch,probe,split,filter"], "gpu": ["--stages", "encode"]}
WORLDMODEL = [sys.executable, "-P", "-m", "worldmodel"]


def write(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


@pytest.fixture
def machines() -> Iterator[Machines]:
    made = Machines("cpu", "gpu", "trainer")
    yield made
    made.close()


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.stop()


@pytest.fixture
def web(machines: Machines) -> Iterator[Web]:
    """A server of films, each of a texture that moves, which takes its time."""
    rng = np.random.default_rng(0)
    pages: dict[str, Answer] = {}
    for number in range(CLIPS):
        first = rng.integers(0, 255, (8, 8, 3), np.uint8).repeat(4, axis=0).repeat(4, axis=1)
        film = encode_video(np.stack([np.roll(first, step, axis=1) for step in range(17)]), fps=8)

        def slowly(exchange: Exchange, film: bytes = film) -> None:
            time.sleep(0.2)
            exchange.reply(200, film)

        pages[f"{number}.mp4"] = slowly
    with served(machines.ip, **pages) as server:
        yield server


def flow_values(web: Web, machines: Machines, folder: Path, model: Path) -> dict[str, Any]:
    """The settings of a flow, but for where its parts are kept."""
    table = folder / "clips.jsonl"
    host = f"http://{machines.ip}:{web.server_address[1]}"
    rows = [{"address": f"{host}/{number}.mp4", "text": f"clip {number}"} for number in range(CLIPS)]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fetch = {"allow_private": [machines.network], "robots": "ignore", "concurrency": 2}
    return {
        "sources": {"web": {"path": str(table), "columns": {"address": "address", "text": "text"}}},
        "stages": {
            "fetch": {"batch_size": 2, "settings": fetch},
            "probe": {},
            "split": {"settings": {"min_s": 1.0}},
            "filter": {},
            "encode": {"batch_size": 2, "settings": {"model": str(model), "device": "cpu"}},
        },
        "pack": ["latents", "text"], "segment_size": SEGMENT, "max_in_flight": 2 * SEGMENT, "lease_s": 5.0,
    }  # fmt: skip


def train_values(model: Path) -> dict[str, Any]:
    stage = {
        "objective": "joint", "steps": STEPS, "batch_size": SEGMENT, "rounds": 2, "tasks": {"rounds": 1.0},
        "lr": 1e-3, "muon_lr": 0.0, "warmup_steps": 1, "train": {"adapters": {}, "generator": {}},
    }  # fmt: skip
    return {
        "init_from": str(model), "log_every": 1, "sample_every": 0, "checkpoint_every": 2,
        "data": {"sources": {"web": {"kind": "flow"}}, "timeout_s": LIMIT_S}, "stages": {"joint": stage},
    }  # fmt: skip


def digests(config: FlowConfig) -> list[str]:
    log = Log(config.place("log"))
    assert log.end() == (CLIPS // SEGMENT, CLIPS)
    indices = [log.storage.read(f"{number:06d}.json") for number in range(CLIPS // SEGMENT)]
    return [json.loads(index)["sha256"] for index in indices]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return {
        f"{file.relative_to(run)}/{name}": tensor
        for file in (run / "model").rglob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def run_tiers(machines: Machines, commands: dict[str, list[str]], config: FlowConfig, run: Path) -> set[str]:
    """Run a command on each machine, kill each once on the way, and start it again; return who ran what."""
    running = {name: machines.start(name, command) for name, command in commands.items()}
    left, seen, deadline = {*commands}, set(), time.monotonic() + LIMIT_S
    try:
        with closing(StatusReader(config, create=True)) as reader:
            while any(process.poll() is None for process in running.values()):
                assert time.monotonic() < deadline, f"it hangs; {left} were not killed yet"
                status = {stage.name: stage for stage in reader.read().stages}
                seen |= {f"{host} runs {stage.name}" for stage in status.values() for host in stage.machines}
                begun = {
                    "cpu": status["fetch"].done >= 4,
                    "gpu": status["encode"].done >= 4,
                    "trainer": any((run / "checkpoints").glob("*")),
                }
                for name in [name for name in left if begun[name]]:
                    assert running[name].poll() is None, f"{name} has ended before its kill"
                    running[name].kill()
                    running[name].wait()
                    running[name] = machines.start(name, commands[name])
                    left.remove(name)
                time.sleep(0.1)
    finally:
        codes = {name: process.poll() for name, process in running.items()}
        for process in running.values():
            process.kill()
            process.wait()
    assert codes == dict.fromkeys(commands, 0)
    assert not left
    return seen


def test_three_tiers_that_are_killed_give_what_one_machine_gives(
    machines: Machines,
    server: PostgresServer,
    web: Web,
    tmp_path: Path,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    values = flow_values(web, machines, tmp_path, model_folder)
    train = str(write(tmp_path / "train.yaml", train_values(model_folder)))
    with object_store(machines.ip) as store:
        places = {
            "catalog": server.database(server.listen(machines.network, machines.ip)),
            "buffer": f"{store}/buffer", "log": f"{store}/log", "max_lead": 1,
        }  # fmt: skip
        config = build(FlowConfig, {**values, **places})
        path = str(write(tmp_path / "flow.yaml", to_dict(config)))
        run = tmp_path / "run"
        commands = {name: [*WORLDMODEL, "flow", "work", path, *options] for name, options in TIERS.items()}
        commands["trainer"] = [
            *WORLDMODEL, "flow", "work", path, "--train", train, "--", f"run_dir={run}",
        ]  # fmt: skip
        seen = run_tiers(machines, commands, config, run)
        assert seen == {
            "cpu runs fetch", "cpu runs probe", "cpu runs split", "cpu runs filter", "cpu runs pack",
            "gpu runs encode",
        }  # fmt: skip
        with closing(StatusReader(config)) as reader:
            status = reader.read()
        assert {(stage.done, stage.waiting) for stage in status.stages} == {(CLIPS, 0)}, "none twice"
        tiers = digests(config)
    quiet = build(FlowConfig, {**values, "folder": str(tmp_path / "quiet")})
    path = str(write(tmp_path / "quiet.yaml", to_dict(quiet)))
    subprocess.run([*WORLDMODEL, "flow", "run", path], check=True, timeout=LIMIT_S)
    assert tiers == digests(quiet)
    log = f"data.sources.web.path={quiet.place('log')}"
    command = [*WORLDMODEL, "train", train, log, f"run_dir={tmp_path / 'alone'}"]
    subprocess.run(command, check=True, timeout=LIMIT_S)
    found, expected = weights(run), weights(tmp_path / "alone")
    assert found.keys() == expected.keys() != set()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
