"""Rounds of one frame: one step of an environment is one round, in training, sessions and evaluation."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from worldmodel.actions import Action
from worldmodel.cli import main
from worldmodel.config import (
    ActionConfig,
    ActionSpec,
    CodecConfig,
    DataConfig,
    SourceConfig,
    StageConfig,
    TrainConfig,
    TrainedConfig,
    ValidationConfig,
    to_dict,
)
from worldmodel.env import WorldEnv
from worldmodel.models.world_model import WorldModel
from worldmodel.recording.episode import RecordedEpisode, RecordingFormat
from worldmodel.recording.lerobot import LeRobotStore
from worldmodel.train import finetune
from worldmodel.train.run.log import read_metrics

SIDE, KEYS = 32, ("left", "right")
SPECS = tuple(ActionSpec(name, "key", rate=10) for name in KEYS)


def walk(seed: int, steps: int = 8) -> RecordedEpisode:
    """A square that its actions move by its width."""
    rng = np.random.default_rng(seed)
    chosen, place, frames = rng.integers(0, 2, steps), 8, []
    for action in [*chosen, None]:
        frame = np.full((SIDE, SIDE, 3), 40, np.uint8)
        frame[12:20, place : place + 8] = (230, 60, 60)
        frames.append(frame)
        place = place if action is None else int(np.clip(place + (8 if action else -8), 0, SIDE - 8))
    numbers = np.eye(2, dtype=np.float32)[chosen]
    actions = tuple(Action.of_numbers(SPECS, row) for row in numbers)
    return RecordedEpisode(
        {"render": np.stack(frames)}, actions, numbers, np.zeros(steps, np.float32), truncated=True, seed=seed
    )


@pytest.fixture
def config(make_model: Callable[..., WorldModel], tokenizer_folder: str, tmp_path: Path) -> TrainConfig:
    """All stages on recorded walks, one of which is held out."""
    store = LeRobotStore(tmp_path / "walks", RecordingFormat(10, SPECS, {}))
    for seed in range(4):
        store.write(walk(seed))
    store.finish()
    path = str(tmp_path / "walks")
    (tmp_path / "walks" / "meta" / "split.json").write_text(json.dumps({"held-out": [3]}))
    tiny = make_model().config
    model = replace(
        tiny,
        codec=replace(tiny.codec, image_size=SIDE, temporal_factor=1),
        action=ActionConfig(text=False, keys=KEYS),
        fps=10,
        chunk_frames=1,
    )
    stage = StageConfig(steps=2, batch_size=2, tasks={"rounds": 1.0}, rounds=3, self_rollout=(1.0, 1.0))
    parts = {name: TrainedConfig() for name in ("backbone", "adapters", "generator")}
    trained = {"codec": {"codec": TrainedConfig()}, "state": parts, "generator": parts, "joint": parts}
    return TrainConfig(
        model=model,
        stages={name: replace(stage, objective=name, train=train) for name, train in trained.items()},  # type: ignore[arg-type]
        data=DataConfig(
            {
                "mine": SourceConfig("lerobot", path),
                "held": SourceConfig("lerobot", path, split="held-out", weight=0),
            }
        ),
        tokenizer=tokenizer_folder,
        run_dir=str(tmp_path / "run"),
        validation=ValidationConfig("held", every=2, batches=1, codec_frames=16),
        precision="fp32",
        log_every=1,
    )


@pytest.mark.slow
def test_one_step_of_an_environment_is_one_round(config: TrainConfig, tmp_path: Path) -> None:
    folder = finetune.train(config)
    for stage, lines in read_metrics(Path(config.run_dir)).items():
        losses = [line["rounds/loss"] for line in lines.values() if "rounds/loss" in line]
        assert losses and np.isfinite(losses).all() and min(losses) > 0, stage

    model = WorldModel.from_pretrained(str(folder))
    session = model.session(seed=0)
    session.reset(walk(0).cameras["render"][0])
    played = [session.step({"keys": [key]}).frames for key in ("left", "right", "left", "right", "left")]
    assert [frames.shape for frames in played] == [(1, SIDE, SIDE, 3)] * 5
    branch = session.fork()
    assert np.array_equal(branch.step({"keys": ["left"]}).frames, session.step({"keys": ["left"]}).frames)

    environment = WorldEnv(str(folder))
    assert isinstance(environment, gymnasium.Env)
    environment.reset(seed=0, options={"observation": walk(0).cameras["render"][0]})
    observation, *_ = environment.step(environment.action_space.sample())
    assert environment.observation_space.contains(observation)

    (tmp_path / "run.json").write_text(json.dumps(to_dict(config)))
    path = (tmp_path / "run.json").rename(tmp_path / "run.yaml")  # JSON is YAML
    report = tmp_path / "figures.json"
    command = ["eval", str(folder), "--data", str(path), "--num-samples", "1", "--rounds", "4"]
    assert main([*command, "--inverse-dynamics-steps", "2", "--json", str(report)]) == 0
    horizon = json.loads(report.read_text())["figures"]["horizon"]
    assert len(horizon["psnr"]["codec"]) == 4


@pytest.mark.parametrize(
    ("chunk", "factor", "rounds"),
    [(1, 1, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 1, 3), (2, 2, 1)))],
)
def test_a_codec_learns_from_rounds_of_one_group(
    config: TrainConfig, chunk: int, factor: int, rounds: int
) -> None:
    model = replace(
        config.model,
        codec=CodecConfig(image_size=SIDE, temporal_factor=factor, widths=(8, 16), latent_channels=4),
        chunk_frames=chunk,
        fps=10 * chunk,
    )
    stage = replace(config.stages["codec"], rounds=rounds, self_rollout=(0.0, 0.0))
    finetune.train(replace(config, model=model, stages={"codec": stage}))
    losses = [line.get("rounds/pixel") for line in read_metrics(Path(config.run_dir))["codec"].values()]
    assert any(losses) and np.isfinite([loss for loss in losses if loss is not None]).all()
