"""Clips on disk, written once, and a short training run.

As in `tiny_models`, a fixture imports what it needs of the package.
"""

from __future__ import annotations

import sys
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from worldmodel.config import TrainConfig
    from worldmodel.models.world_model import WorldModel

NUM_CLIPS = 6


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The name of the pretrained base model, if it is on this machine; CI downloads it."""
    from worldmodel.errors import ModelError
    from worldmodel.models.loading import base_models

    name = "smollm2-135m-instruct"
    try:
        base_models.find(name)
    except ModelError as error:
        pytest.skip(str(error))
    return name


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of clips of the shapes world with its clips.jsonl; tests must not change it."""
    from worldmodel.worlds import get_world

    return get_world("shapes").record(tmp_path_factory.mktemp("recorded"), NUM_CLIPS, rounds=2).parent


@pytest.fixture(scope="session")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clip of 8 seconds at 8 fps whose frame `i` has the grey value `3 * i + 20`."""
    from worldmodel import media

    path = tmp_path_factory.mktemp("counting") / "counting.mp4"
    grey = np.arange(64, dtype=np.uint8) * 3 + 20
    media.write_video(np.broadcast_to(grey[:, None, None, None], (64, 32, 32, 3)).copy(), path, 8, scale=1)
    return path


@pytest.fixture(scope="session")
def shard(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded clips as a WebDataset shard with txt parts."""
    path = tmp_path_factory.mktemp("shards") / "shard-000.tar"
    with tarfile.open(path, "w") as tar:
        for index, clip in enumerate(sorted(recorded.glob("*.mp4"))):
            text = path.with_suffix(".txt")
            text.write_text(f"clip number {index}\n")
            tar.add(clip, f"train/{clip.stem}.mp4")
            tar.add(text, f"train/{clip.stem}.txt")
    return path


@pytest.fixture
def whole_runs() -> None:
    """The runs of this test plot, measure and look at frames as those of users do."""


@pytest.fixture(autouse=True)
def quick_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other runs do without a plot, and measure the device and look at held-out frames less: each takes as
    long as several steps of a tiny model.
    """
    if "whole_runs" in request.fixturenames:
        return
    if log := sys.modules.get("worldmodel.train.run.log"):
        monkeypatch.setattr(log, "plot_losses", lambda run: None)
    if validation := sys.modules.get("worldmodel.train.validation"):
        monkeypatch.setattr(validation, "NUM_KNOWN_FRAMES", 32)
    if throughput := sys.modules.get("worldmodel.train.diagnostics.throughput"):
        shortly = partial(throughput.measured_tflops, seconds=0.01)
        monkeypatch.setattr(throughput, "measured_tflops", shortly)
        if stage := sys.modules.get("worldmodel.train.stage"):
            monkeypatch.setattr(stage, "measured_tflops", shortly)


@pytest.fixture
def run_config(make_model: Callable[..., WorldModel], tokenizer_folder: str, tmp_path: Path) -> TrainConfig:
    """A run of six steps of state alignment, mixed with text tasks."""
    from runs import short_run

    return short_run(make_model(image_size=64, world="shapes").config, tokenizer_folder, tmp_path / "run")
