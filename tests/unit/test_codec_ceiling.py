"""The ceiling of a run: what the codec alone returns, measured once before anything is trained on it."""

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import changed

from worldmodel.config import (
    DataConfig,
    SourceConfig,
    StageConfig,
    TrainConfig,
    TrainedConfig,
    ValidationConfig,
)
from worldmodel.data.loader import Batch
from worldmodel.episodes import Episode
from worldmodel.errors import ConfigError
from worldmodel.eval.codec import Ceiling, ceiling
from worldmodel.eval.metrics.psnr import psnr
from worldmodel.media.tensors import to_tensor
from worldmodel.models.codec.autoencoder import Codec
from worldmodel.models.world_model import WorldModel
from worldmodel.train import finetune
from worldmodel.train.diagnostics import codec_ceiling
from worldmodel.train.objectives.base import SampleRng, StageBatch
from worldmodel.train.objectives.codec import CodecObjective, rarity_weight
from worldmodel.train.run.log import read_metrics

HELD_OUT = DataConfig(
    {"shapes": SourceConfig("shapes"), "held": SourceConfig("shapes", split="val", weight=0.0)}
)
CODEC = StageConfig(
    "codec", steps=2, batch_size=2, tasks={"rounds": 1.0}, train={"codec": TrainedConfig()}, rounds=1
)


def boards(key: bool = True) -> np.ndarray:
    """200 pictures of a square that is somewhere else in each; a tenth also has a key of twelve pixels."""
    rng, frames = np.random.default_rng(0), np.full((200, 48, 48, 3), 90, np.uint8)
    for index, frame in enumerate(frames):
        row, column = 8 * rng.integers(6), 8 * rng.integers(1, 6)
        frame[row : row + 8, column : column + 8] = 255, 0, 0
        if key and index % 10 == 0:
            frame[20:26, 3:5] = 255, 255, 0
    return frames


def test_the_loss_of_a_rare_small_object_is_seen_although_decibels_hide_it() -> None:
    truth, without = boards(), boards(key=False)
    error = np.sqrt(np.square(truth.astype(float) - without).mean())
    noise = np.random.default_rng(1).normal(0, error, truth.shape)
    noisy = (truth + noise).clip(0, 255).astype(np.uint8)
    lost, noised = ceiling(truth, without), ceiling(truth, noisy)
    assert lost.psnr == psnr(without, truth) > 35
    assert noised.psnr == pytest.approx(lost.psnr, abs=0.5)
    assert noised.kept == 1
    assert (lost.num_details, lost.num_kept) == (5, 1)  # four parts of the key, and the square
    assert lost.kept is not None and lost.kept < codec_ceiling.LEAST_KEPT
    assert ceiling(truth, truth) == Ceiling(200, 100.0, lost.num_details, lost.num_details)


def test_frames_without_details_have_no_share() -> None:
    still = np.full((8, 10, 18, 3), 70, np.uint8)  # not whole squares
    assert ceiling(still, still).kept is None


def test_a_low_share_is_a_warning_with_the_settings_to_change() -> None:
    low, high, none = (
        codec_ceiling.lines(Ceiling(256, 33.3, details, kept), held=True)
        for details, kept in ((50, 40), (50, 50), (0, 0))
    )
    assert len(low) == 2 and "codec.latent_channels" in low[1]
    assert len(high) == len(none) == 1
    faded, kept = codec_ceiling.contrast_lines(0.9), codec_ceiling.contrast_lines(0.97)
    assert len(faded) == 2 and "--size" in faded[1] and len(kept) == 1
    assert codec_ceiling.contrast_lines(None) == []


def test_an_error_in_a_rare_colour_costs_more_than_in_a_frequent_one(
    make_model: Callable[..., WorldModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    assert isinstance(model.codec, Codec)
    frames = torch.full((2, 1, 3, 32, 32), -0.9)  # two clips of an episode
    frames[..., :16, :16] = 0.4  # a quarter of the pixels
    frames[..., 24:28, 24:28] = torch.tensor([0.9, 0.9, -0.9]).view(3, 1, 1)  # one of 64
    frames[..., 30, 30] = 0.9  # one of 1024
    made = (frames + 0.1).requires_grad_()  # every pixel is wrong by the same amount
    monkeypatch.setattr(Codec, "reconstruct", lambda codec, latents: made)
    inputs = StageBatch(Batch(0, "rounds", (0,), []), SampleRng([(0,)]), {}, frames)
    CodecObjective(model).forward(model, inputs)["pixel"].backward()
    assert made.grad is not None
    pull = made.grad[0, 0].sum(0)
    ground, often, rare, single = (pull[where].item() for where in ((20, 20), (5, 5), (25, 25), (30, 30)))
    assert rare / often == pytest.approx(4)  # 1 / sqrt(share)
    assert rare / single == pytest.approx(8 / 10)  # at most 10
    assert often / ground == pytest.approx(2 * (751 / 1024) ** 0.5)
    assert pull[24:28, 24:28].sum() / pull.sum() > 4 * 16 / 1024  # of its share of the pixels


def test_what_moves_has_a_loss_of_its_own(
    make_model: Callable[..., WorldModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A square of 4 pixels moves by as many; errors elsewhere do not count, and others are its mean."""
    model = make_model()
    films = np.full((2, 8, 32, 32, 3), 40, np.uint8)
    films[0, :, 8:12, 8:12] = films[1, :, 8:12, 12:16] = 230
    films[1, :, 20:30, 20:30] = 60  # less than 32 grey levels do not count as motion
    episode = Episode("one", (films[0], films[1]))
    frames = to_tensor([films[0][:2], films[1][:2]])
    where = torch.zeros(32, 32, dtype=torch.bool)
    where[8:12, 8:16] = True
    monkeypatch.setattr(CodecObjective, "frame_groups", lambda *_: [films[0][:2], films[1][:2]])
    objective = CodecObjective(model)
    inputs = objective.prepare(model, Batch(0, "rounds", (0,), [episode]), SampleRng([(0,)]))
    assert inputs.counts["moving"] == 2 * 2 * int(where.sum())
    made = frames.clone()
    made[..., ~where] += 0.3
    monkeypatch.setattr(Codec, "reconstruct", lambda codec, latents: made)
    assert objective(model, inputs)["moving"] == 0
    made[..., where] += 0.1
    error = (rarity_weight(frames) * (0.1 + 2 * 0.1**2))[..., where].sum()
    torch.testing.assert_close(objective(model, inputs)["moving"], error)


def ceilings(run: Path) -> list[dict[str, Any]]:
    """All records of the ceiling, repeated ones too."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "codec/psnr" in line]


@pytest.mark.slow
def test_the_codec_is_measured_once_after_its_stage(run_config: TrainConfig, tmp_path: Path) -> None:
    state = dataclasses.replace(run_config.stages["state"], steps=2, tasks={"rounds": 1.0})
    config = dataclasses.replace(
        run_config,
        data=HELD_OUT,
        stages={"codec": CODEC, "state": state},
        validation=ValidationConfig("held", batches=1, codec_frames=18),
        checkpoint_every=1,
    )
    asked = itertools.count(1)
    halves = dataclasses.replace(config, run_dir=str(tmp_path / "halves"))
    finetune.train(halves, stop=lambda: next(asked) >= 3)  # in the stage after it
    finetune.train(halves)
    finetune.train(config)
    (one,), (two,) = ceilings(tmp_path / "halves"), ceilings(tmp_path / "run")
    assert (one["stage"], one["step"], one["codec/frames"]) == ("codec", 2, 18)
    assert {k: v for k, v in one.items() if "/" in k} == {k: v for k, v in two.items() if "/" in k}
    assert 0 < one["codec/psnr"] < 60 and 0 <= one["codec/details"] <= 1

    unmeasured = dataclasses.replace(
        config,
        run_dir=str(tmp_path / "none"),
        validation=dataclasses.replace(config.validation, codec_frames=0),
    )
    torch.manual_seed(5)
    finetune.train(unmeasured)
    assert not ceilings(tmp_path / "none")
    for stage, records in read_metrics(tmp_path / "none").items():
        for step, line in records.items():  # the measurement changes no loss
            measured = read_metrics(tmp_path / "run")[stage][step]
            losses = {k: v for k, v in line.items() if k.startswith(("rounds/", "validation/"))}
            assert {name: measured[name] for name in losses} == losses


def test_a_codec_that_is_not_trained_is_measured_when_the_run_begins(run_config: TrainConfig) -> None:
    config = changed(run_config, steps=2, tasks={"rounds": 1.0})
    config = dataclasses.replace(config, validation=ValidationConfig(codec_frames=18))
    run = Path(config.run_dir)
    finetune.train(config, stop=lambda: True)
    assert [line["step"] for line in ceilings(run)] == [0]
    finetune.train(config)
    assert [line["step"] for line in ceilings(run)] == [0]


def test_data_without_frames_has_no_ceiling(run_config: TrainConfig, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "It rolls."}\n' * 4)
    stage = StageConfig(
        "language", steps=1, batch_size=2, tasks={"document": 1.0}, train={"backbone": TrainedConfig()}
    )
    config = dataclasses.replace(
        run_config,
        stages={"language": stage},
        data=DataConfig({"texts": SourceConfig("text", str(tmp_path / "texts.jsonl"))}),
        validation=ValidationConfig(codec_frames=18),
    )
    assert not ceilings(finetune.train(config).parent)
    with pytest.raises(ConfigError, match="codec_frames of validation is -1"):
        ValidationConfig(codec_frames=-1)
