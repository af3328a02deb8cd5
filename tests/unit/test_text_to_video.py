"""Text to image and text to video: a generator that reads words instead of predicted states."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from worldmodel import shapes
from worldmodel.actions import Action
from worldmodel.config import (
    ActionConfig,
    ConditionAdapterConfig,
    DataConfig,
    GeneratorConfig,
    SourceConfig,
    StageConfig,
    TrainConfig,
    TrainedConfig,
    WorldModelConfig,
)
from worldmodel.errors import ConfigError, InputError
from worldmodel.models.loading import deferred
from worldmodel.models.world_model import WorldModel
from worldmodel.shapes.captions import sample_captioned_clip
from worldmodel.shapes.evaluation.captions import text_to_video
from worldmodel.shapes.evaluation.cases import judge_frame
from worldmodel.shapes.source import ShapesSource
from worldmodel.train import finetune, start

TEXT = ConditionAdapterConfig(kind="text", forecast="none")
COUNT = 48


@pytest.fixture(scope="module")
def writer(make_model: Callable[..., WorldModel]) -> WorldModel:
    """A tiny model whose generator reads words."""
    return make_model(condition_adapter=TEXT, num_inference_steps=2)


def test_a_caption_determines_its_clip() -> None:
    changed = 0
    for index in range(COUNT):
        sample = sample_captioned_clip(7, index)
        seen, _, happens = sample.text.partition("; ")
        scene = shapes.parse_caption(seen)
        clip = shapes.simulate(scene, shapes.parse(happens))
        assert np.array_equal(clip.frames, sample.clip.frames), sample.text
        changed += not np.array_equal(clip.frames[0], clip.frames[-1])
    assert changed > COUNT / 2


def test_the_source_has_clips_with_their_captions() -> None:
    source = ShapesSource("captions")
    episode, sample = source.episode("imagine", 7, 3), sample_captioned_clip(7, 3)
    assert episode.actions == (Action(sample.text),)
    assert len(episode.observations[0]) == 0
    assert np.array_equal(episode.observations[1], sample.clip.frames)


class Writer:
    """Makes the clip that a caption determines, or its first frame alone."""

    def __init__(self, moves: bool) -> None:
        self.moves = moves

    def imagine(self, texts: Sequence[str], seeds: Sequence[int]) -> np.ndarray:
        clips = []
        for text in texts:
            seen, _, happens = text.partition("; ")
            scene = shapes.parse_caption(seen)
            plan = shapes.parse(happens) if self.moves else shapes.STAY
            clips.append(shapes.simulate(scene, plan).frames)
        return np.stack(clips)


def test_figures_tell_a_clip_from_a_still_picture() -> None:
    subject: Any = Writer(moves=True)
    figures = text_to_video(subject, judge_frame, COUNT, 7)
    assert all(figures[name]["value"] == 1 for name in ("first", "named", "strict", "every_frame"))
    subject = Writer(moves=False)
    still = text_to_video(subject, judge_frame, COUNT, 7)
    assert still["named"]["value"] == still["still_named"]["value"] == figures["still_named"]["value"] < 0.2


def test_words_alone_condition_the_generator(writer: WorldModel, image: np.ndarray) -> None:
    said = [Action("a red ball; it moves left"), Action("a blue box; it grows"), Action()]
    states = torch.randn(3, writer.config.num_queries, writer.backbone.width)
    context = writer.blank_observation(3).latents
    together = writer.condition(writer.read_state(states, context, said), context, said)
    assert together.forecast is None and together.tokens is not None and together.pooled is not None
    for row, action in enumerate(said):  # other states, and no other texts beside it
        alone = writer.condition(writer.read_state(0 * states[:1], context[:1], [action]), context[:1])
        assert alone.tokens is not None and alone.pooled is not None
        torch.testing.assert_close(alone.tokens[0], together.tokens[row])
        torch.testing.assert_close(alone.pooled[0], together.pooled[row])
    assert not torch.allclose(together.tokens[0], together.tokens[1])
    played = writer(context[:, None], [[action] for action in said]).condition
    torch.testing.assert_close(played.tokens, together.tokens)


def test_a_text_starts_a_world_with_a_whole_clip(writer: WorldModel) -> None:
    session = writer.session(seed=3)
    clip = session.reset(text="a red ball; it moves left")
    assert clip.shape == (writer.config.chunk_frames, 32, 32, 3)
    other = writer.session(seed=3).reset(text="a blue box; it grows")
    assert not np.array_equal(clip, other)
    assert len(session.step("the red ball moves right").frames) == writer.config.chunk_frames
    guided = writer.session(seed=3, guidance_scale=3.0).reset(text="a red ball; it moves left")
    assert not np.array_equal(clip, guided)


def test_it_is_saved_and_read(writer: WorldModel, tmp_path: Path) -> None:
    folder = writer.save_pretrained(tmp_path / "writer", dtype=torch.float32)
    again = WorldModel.from_pretrained(folder)
    text = "a red ball; it moves left"
    assert np.array_equal(again.session(seed=1).reset(text=text), writer.session(seed=1).reset(text=text))


def test_only_the_generator_and_its_adapter_learn(run_config: TrainConfig, tmp_path: Path) -> None:
    stage = StageConfig(
        "generator",
        steps=2,
        batch_size=4,
        rounds=1,
        tasks={"imagine": 1.0},
        train={"generator": TrainedConfig(), "condition_adapter": TrainedConfig()},
    )
    model = replace(
        run_config.model,
        condition_adapter=TEXT,
        action=replace(run_config.model.action, text={"max_tokens": 128}),
        generator=replace(run_config.model.generator or GeneratorConfig(), condition_dropout=0.3),
        num_inference_steps=2,
    )
    sources = {"captions": SourceConfig(kind="shapes", split="captions", weight=1.0)}
    config = replace(
        run_config,
        model=model,
        data=DataConfig(sources=sources),
        stages={"videos": stage},
        init_from=None,
        run_dir=str(tmp_path / "videos"),
        sample_every=2,
    )
    torch.manual_seed(0)
    trained = WorldModel.from_pretrained(finetune.train(config))
    assert list((tmp_path / "videos" / "samples").iterdir())
    assert isinstance(trained.config, WorldModelConfig)
    assert trained.condition_adapter.null_tokens.any()
    assert trained.session(num_inference_steps=1).reset(text="a red ball").shape[0] == model.chunk_frames


def test_a_world_starts_from_the_generator_that_words_trained(
    writer: WorldModel, run_config: TrainConfig, tmp_path: Path
) -> None:
    folder = writer.save_pretrained(tmp_path / "writer", dtype=torch.float32)
    config = replace(writer.config, condition_adapter=ConditionAdapterConfig(forecast="none"))
    world = start.build_model(replace(run_config, model=config, init_from={"generator": str(folder)}))
    deferred.load_shards(world)
    assert world.config.condition_adapter.kind != "text"
    learned = writer.generator.state_dict()
    assert learned and all(torch.equal(world.generator.state_dict()[name], x) for name, x in learned.items())


@pytest.mark.parametrize(
    "settings",
    [
        {"condition_adapter": ConditionAdapterConfig(kind="text")},
        {"condition_adapter": TEXT, "outcomes": True},
        {"condition_adapter": TEXT, "action": ActionConfig(text=False, keys=("left",))},
        {"condition_adapter": TEXT, "generator": None, "num_inference_steps": 0},
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"condition_adapter|forecast"):
        WorldModelConfig(**settings)


def test_zero_steps_are_refused(writer: WorldModel) -> None:
    with pytest.raises((ConfigError, InputError), match=r"forecast|steps"):
        writer.session(num_inference_steps=0)
