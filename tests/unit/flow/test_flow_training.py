"""A whole flow: clips are encoded while a model trains on them; the finished log trains the same model."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import yaml
from flow_stages import flow_config
from safetensors.torch import load_file
from torch import Tensor

from worldmodel.config import to_dict
from worldmodel.config.flow import FlowConfig
from worldmodel.flow.log.log import Log
from worldmodel.flow.work.run import run_flow, train_program
from worldmodel.media.encoding import encode_video

NUM_CLIPS, SEGMENT, BATCH, STEPS = 24, 4, 4, 9
WORLDMODEL = [sys.executable, "-P", "-m", "worldmodel"]
LIMIT_S = 900.0

pytestmark = pytest.mark.slow


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Videos of a moving square, of 2 rounds each, and a table of them."""
    folder = tmp_path / "videos"
    folder.mkdir()
    rows = []
    for number in range(NUM_CLIPS):
        frames = np.full((17, 32, 32, 3), 9 * number, np.uint8)
        for at, frame in enumerate(frames):
            frame[8:16, at : at + 8] = 255 - 9 * number
        (folder / f"{number}.mp4").write_bytes(encode_video(frames, fps=8))
        rows.append(json.dumps({"address": f"{number}.mp4", "text": f"clip {number}", "keys": ["left"]}))
    path = folder / "clips.jsonl"
    path.write_text("\n".join(rows) + "\n")
    return path


def train_file(path: Path, model: Path) -> str:
    stage = {
        "objective": "joint", "steps": STEPS, "batch_size": BATCH, "rounds": 2, "tasks": {"rounds": 1.0},
        "lr": 1e-3, "muon_lr": 0.0, "warmup_steps": 1, "train": {"adapters": {}, "generator": {}},
    }  # fmt: skip
    values = {
        "init_from": str(model), "log_every": 1, "sample_every": 0, "checkpoint_every": 1000,
        "data": {"sources": {"web": {"kind": "flow"}}}, "stages": {"joint": stage},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return str(path)


def trained(run: Path) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """The weights after a run, and the losses of every step, which are not rounded."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [{name: x for name, x in line.items() if name.startswith("rounds/")} for line in lines]
    return weights_of(run / "model"), [each for each in losses if each]


def weights_of(model: Path) -> dict[str, Tensor]:
    return {
        f"{file.relative_to(model)}/{name}": tensor
        for file in model.rglob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def flow(folder: Path, table: Path, model: Path) -> FlowConfig:
    return flow_config(
        folder, table,
        {"read": {}, "encode": {"function": "", "settings": {"model": str(model), "device": "cpu"}}},
        pack=["latents", "text"], segment_size=SEGMENT, max_lead=1,
    )  # fmt: skip


def test_training_beside_a_flow_is_a_replay_of_its_log(
    tmp_path: Path, table: Path, model_folder: Path
) -> None:
    config = flow(tmp_path / "flow", table, model_folder)
    settings = train_file(tmp_path / "train.yaml", model_folder)
    beside = train_program(config, settings, 1, [f"run_dir={tmp_path / 'beside'}"])
    assert run_flow(config, train=beside) == 0  # max_lead: segment n is begun before n + 2 is sealed
    log = Log(config.place("log"))
    assert log.end() == (NUM_CLIPS // SEGMENT, NUM_CLIPS)
    columns = Counter(
        tuple(sorted(clip.parts)) for n in range(NUM_CLIPS // SEGMENT) for clip in log.segment(n)
    )
    assert columns == {("json", "latents"): NUM_CLIPS}  # there is no video that a step could encode
    _, replay = train_program(config, settings, 1, [f"run_dir={tmp_path / 'replay'}"])
    subprocess.run([*WORLDMODEL, *replay], check=True)
    (weights, losses), (expected, again) = trained(tmp_path / "beside"), trained(tmp_path / "replay")
    assert losses == again
    assert len(losses) == STEPS
    assert losses[0]["rounds/loss"] > losses[-1]["rounds/loss"] > 0
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    start = weights_of(model_folder)
    names = [name for name in start if name.startswith("generator")]
    assert not any(torch.equal(weights[name], start[name].to(weights[name].dtype)) for name in names)


def trainers(run: Path) -> list[psutil.Process]:
    """The processes that train into a folder: the first holds its lock, those of torchrun are told of it."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            told = f"run_dir={run}" in process.cmdline() and "train" in process.cmdline()
            if told or any(file.path == str(run / ".lock") for file in process.open_files()):
                found.append(process)
    return found


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_flow_takes_its_trainer_with_it_and_goes_on(
    processes: int, tmp_path: Path, table: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # with the stages of the tests
    settings, path = train_file(tmp_path / "train.yaml", model_folder), tmp_path / "flow.yaml"
    path.write_text(yaml.safe_dump(to_dict(flow(tmp_path / "flow", table, model_folder)), sort_keys=False))
    run, options = tmp_path / "run", ["--train", settings, "--processes", str(processes)]
    command = [*WORLDMODEL, "flow", "run", str(path), *options, "--", "checkpoint_every=2"]
    first, deadline = subprocess.Popen([*command, f"run_dir={run}"]), time.monotonic() + LIMIT_S
    try:
        while not any((run / "checkpoints").glob("*")):
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        began = trainers(run)
    finally:
        first.kill()
        first.wait()
    assert len(began) == processes
    # At once: it waits for the trainer, which writes a checkpoint before it ends.
    assert subprocess.run([*command, f"run_dir={run}"], timeout=LIMIT_S).returncode == 0
    assert [trainer for trainer in began if trainer.is_running()] == []
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(line["step"] for line in lines) == STEPS
    if processes == 1:
        assert subprocess.run([*command, f"run_dir={tmp_path / 'whole'}"], timeout=LIMIT_S).returncode == 0
        (weights, _), (expected, _) = trained(run), trained(tmp_path / "whole")
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
