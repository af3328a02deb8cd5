"""Batches whose frames are staged for the copy to the device ahead of their step."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from worldmodel.actions import Action
from worldmodel.config import DataConfig, SourceConfig, StageConfig, TrainConfig
from worldmodel.data import loader
from worldmodel.data.staging import FrameStager, StagedFrames
from worldmodel.episodes import Episode
from worldmodel.models.world_model import WorldModel
from worldmodel.train import distributed
from worldmodel.train.episodes import encode_first_frames, encode_rounds
from worldmodel.train.trainer import Trainer

CPU = torch.device("cpu")
SHAPES = {"shapes": SourceConfig("shapes")}
STAGE = StageConfig(steps=2, batch_size=3, rounds=2, tasks={"rounds": 1})


def test_frames_are_staged_beside_the_training_thread() -> None:
    threads = []

    def stage_frames(episodes: list[Episode]) -> StagedFrames | None:
        threads.append(threading.current_thread())
        return FrameStager(CPU)(episodes)

    data = DataConfig(SHAPES, num_workers=1)
    with loader.batches(data, TrainConfig().model, STAGE, 0, stage_frames=stage_frames) as stream:
        batches = [batch for step in stream for batch in step]
    assert threads and threading.current_thread() not in threads
    for batch in batches:
        assert batch.frames is not None
        clips = batch.frames.take()
        assert all(clip.dtype == torch.uint8 for clip in clips)
        columns = zip(*(episode.observations for episode in batch.episodes), strict=True)
        for clip, column in zip(clips, columns, strict=True):
            np.testing.assert_array_equal(clip.numpy(), np.stack(column))


def test_staged_frames_train_as_those_of_the_episodes(make_model: Callable[..., WorldModel]) -> None:
    model = make_model(image_size=64, world="shapes")
    with loader.batches(DataConfig(SHAPES), model.config, STAGE, 0) as stream:
        (batch,) = next(stream)
    staged = replace(batch, frames=FrameStager(CPU)(batch.episodes))
    # Nothing is read from the episodes.
    dark = [
        replace(each, observations=tuple(np.zeros_like(clip) for clip in each.observations))
        for each in batch.episodes
    ]
    staged = replace(staged, episodes=dark)
    with torch.no_grad():
        expected, found = encode_rounds(model, batch), encode_rounds(model, staged)
        assert torch.equal(encode_first_frames(model, batch), encode_first_frames(model, staged))
    assert torch.equal(found.context, expected.context)
    assert torch.equal(found.target, expected.target)


def test_frames_of_the_next_microbatch_are_copied_meanwhile(
    run_config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = replace(run_config.stages["state"], microbatch_size=1, tasks={"rounds": 1})
    config = replace(run_config, stages={"state": stage})
    mesh = distributed.init(config)
    try:
        trainer, _ = Trainer.start(config, "state", mesh, None)
        stream = loader.batches(config.data, config.model, stage, 0, stage_frames=FrameStager(CPU))
        with stream:
            batches = next(stream)
        on_device, prepare = [], trainer.root.objective.prepare

        def recorded(*args: Any) -> Any:
            on_device.append([each.frames is not None and each.frames.started for each in batches])
            return prepare(*args)

        monkeypatch.setattr(trainer.root.objective, "prepare", recorded)
        trainer.prepare(batches)
    finally:
        distributed.shutdown()
    assert on_device == [[True, True, False], [False, True, True], [False, False, True]]


def test_texts_and_clips_of_several_lengths_are_left_to_the_step() -> None:
    clips = [np.zeros((length, 8, 8, 3), np.uint8) for length in (1, 4)]
    asked = [Episode("ask", (clip,), prompt="What is there?", answer="Nothing.") for clip in clips]
    assert FrameStager(CPU)(asked) is None
    assert FrameStager(CPU)([Episode("document", answer="Words.")]) is None
    assert FrameStager(CPU)([Episode("rounds", (clips[0], clips[1]), (Action(),))]) is not None
