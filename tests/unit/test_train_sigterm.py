"""A training run inside another program does not change its signal handlers: SIGTERM ends pytest."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from worldmodel import config as configs
from worldmodel.models.world_model import WorldModel

TRAINING = """
import json
from pathlib import Path

from worldmodel.config import DataConfig, SourceConfig, StageConfig, TrainConfig, TrainedConfig
from worldmodel.config import WorldModelConfig, build
from worldmodel.train import finetune

HERE = Path(__file__).parent


def test_training():
    model = build(WorldModelConfig, json.loads((HERE / "model.json").read_text()))
    train = {"codec": TrainedConfig()}
    stage = StageConfig("codec", steps=10**6, batch_size=1, tasks={"rounds": 1.0}, train=train)
    data = DataConfig({"shapes": SourceConfig("shapes")})
    stages, run = {"codec": stage}, str(HERE / "run")
    finetune.train(TrainConfig(model=model, stages=stages, data=data, run_dir=run, log_every=1))


def test_next():
    (HERE / "next").touch()
"""


@pytest.mark.slow
def test_sigterm_during_a_training_run_ends_pytest(
    tmp_path: Path, make_model: Callable[..., WorldModel]
) -> None:
    (tmp_path / "model.json").write_text(json.dumps(configs.to_dict(make_model(image_size=64).config)))
    (tmp_path / "test_it.py").write_text(TRAINING)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        "test_it.py",
    ]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as pytest_run:
        try:
            deadline = time.monotonic() + 600
            while not (tmp_path / "run" / "metrics.jsonl").is_file():
                assert pytest_run.poll() is None, pytest_run.communicate()[0].decode()
                assert time.monotonic() < deadline, "no training step in ten minutes"
                time.sleep(0.1)
            pytest_run.send_signal(signal.SIGTERM)
            assert pytest_run.wait(60) != 0
        finally:
            pytest_run.kill()
    assert not (tmp_path / "next").exists()
