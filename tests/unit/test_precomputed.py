"""Training on latents that were computed before it: a step equals the one that encodes its videos."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import precomputed
import pytest
import torch
from runs import ALIGNED, WHOLE
from safetensors.torch import save

from worldmodel import media
from worldmodel.actions.track import Track
from worldmodel.batch import from_array
from worldmodel.config import StageConfig, TrainConfig
from worldmodel.data.clips import Clip, Files, RoundFormat
from worldmodel.data.latents import LatentFormat, StoredLatents, StoredTexts
from worldmodel.data.worker import BadClip, Request, make_episode
from worldmodel.errors import ConfigError, InputError
from worldmodel.media.tensors import to_tensor
from worldmodel.models.rounds import RoundEncoder
from worldmodel.models.world_model import WorldModel
from worldmodel.shapes.source import LABEL_WORDS

TEXTS = ("push the red ball left", "stop")


@pytest.fixture
def frames() -> np.ndarray:
    """A clip of three rounds."""
    return np.random.default_rng(0).integers(0, 255, (25, 64, 64, 3), dtype=np.uint8)


def stage_of(objective: str, train: dict[str, Any], task: str) -> StageConfig:
    return StageConfig(objective, steps=1, batch_size=2, rounds=2, train=train, tasks={task: 1.0})


CASES = [
    ("joint", WHOLE, "rounds", {}),
    ("joint", WHOLE, "rounds", {"self_rollout": True}),
    pytest.param("joint", WHOLE, "imagine", {}, marks=pytest.mark.slow),
    pytest.param("generator", WHOLE, "rounds", {}, marks=pytest.mark.slow),
    ("state", ALIGNED, "describe", {}),
    ("alignment", {"vision": WHOLE["adapters"]}, "rounds", {}),
]


@pytest.mark.parametrize(("objective", "train", "task", "batch"), CASES)
def test_a_step_on_latents_equals_the_step_that_encodes(
    run_config: TrainConfig,
    make_model: Callable[..., WorldModel],
    frames: np.ndarray,
    objective: str,
    train: dict[str, Any],
    task: str,
    batch: dict[str, bool],
) -> None:
    model = make_model(image_size=64, world="shapes")
    config = replace(run_config, stages={"only": stage_of(objective, train, task)})
    texts = TEXTS if task == "rounds" else TEXTS[:1]
    pairs = [precomputed.pair(model, frames, task, texts, first) for first in (0, 1)]
    words = np.eye(sum(map(len, LABEL_WORDS.values())), dtype=np.float32)[np.arange(64) % 9]
    labels = {"words": words.reshape(8, 8, -1), "named": np.eye(8, dtype=np.float32)}
    encoding, encoded = (
        precomputed.step(config, model, task, [replace(each, labels=labels) for each in episodes], **batch)
        for episodes in zip(*pairs, strict=True)
    )
    assert encoding["gradient_norm"] > 0
    assert encoded == pytest.approx(encoding, rel=1e-6)


def test_latents_in_bfloat16_change_losses_by_their_rounding(
    run_config: TrainConfig, make_model: Callable[..., WorldModel], frames: np.ndarray
) -> None:
    model = make_model(image_size=64, world="shapes")
    config = replace(run_config, stages={"only": stage_of("joint", WHOLE, "rounds")})
    encoding, encoded = (
        precomputed.step(config, model, "rounds", [episode])
        for episode in precomputed.pair(model, frames, "rounds", TEXTS, dtype=torch.bfloat16)
    )
    assert encoded == pytest.approx(encoding, rel=2e-2)


def test_latents_of_another_model_are_refused(
    run_config: TrainConfig, make_model: Callable[..., WorldModel], frames: np.ndarray
) -> None:
    model = make_model(image_size=64, world="shapes")
    codec = replace(model.config.codec, latent_channels=6)
    other = make_model(image_size=64, world="shapes", codec=codec)
    _, encoded = precomputed.pair(other, frames, "rounds", TEXTS)
    config = replace(run_config, stages={"only": stage_of("joint", WHOLE, "rounds")})
    with pytest.raises(ConfigError, match=r"plain.*6.*precomputed"):
        precomputed.step(config, model, "rounds", [encoded])


def test_the_codec_is_not_trained_on_latents(
    run_config: TrainConfig, make_model: Callable[..., WorldModel], frames: np.ndarray
) -> None:
    model = make_model(image_size=64, world="shapes")
    _, encoded = precomputed.pair(model, frames, "rounds", TEXTS)
    config = replace(run_config, stages={"only": stage_of("codec", {"codec": WHOLE["adapters"]}, "rounds")})
    with pytest.raises(ConfigError, match="precomputed: false"):
        precomputed.step(config, model, "rounds", [encoded])


@pytest.fixture(scope="module")
def latents(model: WorldModel, counting: Path) -> bytes:
    """The latents of a video's seven rounds."""
    size, fps = model.config.codec.image_size, model.config.fps
    frames = to_tensor([media.read_video(counting, size, fps, 57)])
    with torch.no_grad():
        return save({name: each[0] for name, each in RoundEncoder.of(model).chunks(frames).items()})


def clip_of(model: WorldModel, video: Path, latents: bytes, needs_frames: bool = False, **more: Any) -> Clip:
    format = replace(LatentFormat.of(model.config), needs_frames=needs_frames)
    files, rounds = Files((str(video),)), RoundFormat.of(model.config)
    return Clip("counting", files, rounds, latents=StoredLatents(latents, format), **more)


@pytest.mark.parametrize("task", precomputed.TASKS)
def test_clips_give_the_latents_of_their_frames(
    model: WorldModel, counting: Path, latents: bytes, task: str
) -> None:
    text = Track(tuple(f"round {index}" for index in range(7)), per_action=True)
    starts = set()
    for index in range(12):
        alone, seen = (
            clip_of(model, counting, latents, frames, text=text).episode(task, 0, index, 3)
            for frames in (False, True)
        )
        assert not alone.observations
        assert (alone.actions, alone.answer) == (seen.actions, seen.answer)
        clips = [to_tensor([clip]) for clip in seen.observations]
        starts.add(first := round((float(seen.observations[-1][0].mean()) - 23) / 3))
        words = [alone.answer] if task == "describe" else [action.text for action in alone.actions]
        assert words[-1] == f"round {first // 8}"
        encoder, blank = RoundEncoder.of(model), model.blank_observation(1).latents
        with torch.no_grad():
            expected = [encoder.encode(clips[0])] if task == "describe" else []
            expected += [] if expected else encoder.rounds(clips[0], clips[1:], blank)
        assert alone.encoded
        arrays = {"rounds": ("context", "target"), "imagine": (None, "target"), "describe": ("observed",)}
        for name, tensor in zip(arrays[task], expected, strict=True):
            if name:
                found = getattr(alone.encoded, name)
                assert np.allclose(found, tensor[0], atol=1e-6)
    assert starts <= set(range(0, 56, 8))
    assert len(starts) > 3


def test_damaged_latents_and_those_of_another_model_are_told_apart(
    model: WorldModel, counting: Path, latents: bytes
) -> None:
    with pytest.raises(InputError, match="counting"):
        clip_of(model, counting, latents[:100]).episode("rounds", 0, 0, 1)
    clip = clip_of(model, counting, latents)
    assert clip.latents
    other = replace(clip.latents.format, target=(4, 6, 4, 4))
    with pytest.raises(ConfigError, match=r"counting.*6.*precomputed"):
        replace(clip, latents=StoredLatents(latents, other)).episode("rounds", 0, 0, 1)
    damaged = Request(clip_of(model, counting, b""), "rounds", 0, 0, 1)
    assert isinstance(made := make_episode(damaged), BadClip)
    assert "run the stage encode again" in made.reason


def test_text_states_of_an_episode_are_those_of_its_actions(
    model: WorldModel, counting: Path, latents: bytes
) -> None:
    states = {
        "text:": torch.zeros(1, 3),
        "text:wave": torch.ones(2, 3).bfloat16(),
        "text:jump": torch.ones(4, 3),
    }
    clip = clip_of(model, counting, latents, text=Track(("wave",)), text_states=StoredTexts(save(states)))
    found = clip.episode("rounds", 0, 0, 2).text_states or {}
    assert set(found) == {"", "wave"}
    assert torch.equal(from_array(found["wave"]), states["text:wave"])
