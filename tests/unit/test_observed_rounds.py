"""Rounds that were observed before the first action: remembered by sessions, not predicted in training."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from worldmodel.actions import Action
from worldmodel.data.loader import Batch
from worldmodel.episodes import Episode
from worldmodel.errors import ConfigError, InputError
from worldmodel.experiments.distillation import DistillationObjective
from worldmodel.models.world_model import WorldModel
from worldmodel.train.objectives.base import Objective, SampleRng
from worldmodel.train.objectives.generator import JointObjective
from worldmodel.train.objectives.state import StateObjective

LEFT = "the red ball moves left"


def frames(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


@pytest.mark.parametrize("history", [0, 1, 2])
def test_a_film_is_remembered_as_the_rounds_that_it_shows(
    make_model: Callable[..., WorldModel], history: int
) -> None:
    model = make_model(history_rounds=history)
    chunk = model.config.chunk_frames
    film = frames(1 + 2 * chunk)
    session, played = model.session(seed=3), model.session(seed=3)
    shown = session.reset(film)
    assert np.array_equal(shown[-1], film[-1])
    assert session.state.round == 0 and len(session.clips) == 1 and session.actions == ()
    assert len(session.state.histories[0]) == history
    played.reset(film[:1])
    for start in range(1, len(film), chunk):
        played.observe(film[start : start + chunk])
    newest = played.state.histories[0][2 - history :]
    for one, other in zip(session.state.histories[0], newest, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(session.state.context, played.state.context)


def test_a_film_with_its_actions_is_remembered_as_the_rounds_that_were_played(
    make_model: Callable[..., WorldModel],
) -> None:
    model = make_model(history_rounds=2)
    chunk = model.config.chunk_frames
    film = frames(1 + 3 * chunk)
    session, played = model.session(seed=3), model.session(seed=3)
    session.reset(film, actions=[LEFT, None, "the red ball grows"])
    played.reset(film[: 1 + chunk])
    played.observe(film[1 + chunk : 1 + 2 * chunk], None)
    played.observe(film[1 + 2 * chunk :], "the red ball grows")
    for one, other in zip(session.state.histories[0], played.state.histories[0][-2:], strict=True):
        torch.testing.assert_close(one, other)
    # Rounds before the given actions have none.
    session.reset(film, actions=["the red ball grows"])
    for one, other in zip(session.state.histories[0], played.state.histories[0][-2:], strict=True):
        torch.testing.assert_close(one, other)
    session.reset(film)
    assert not torch.equal(session.state.histories[0][-1], played.state.histories[0][-1])


def test_actions_of_a_film_that_is_too_short_are_refused(make_model: Callable[..., WorldModel]) -> None:
    model = make_model()
    chunk, session = model.config.chunk_frames, model.session()
    with pytest.raises(InputError, match="2 actions for a video"):
        session.reset(frames(1 + chunk), actions=[LEFT, LEFT])
    with pytest.raises(InputError, match="1 actions for a video of 1 frames"):
        session.reset(frames(1), actions=[LEFT])
    with pytest.raises(InputError, match="actions="):
        session.reset(text="a red ball", actions=[LEFT])
    with pytest.raises(InputError, match="jump"):
        session.reset(frames(1 + chunk), actions=[{"keys": ["jump"]}])


def test_films_with_the_same_end_continue_differently(make_model: Callable[..., WorldModel]) -> None:
    model = make_model(history_rounds=1)
    end = frames(model.config.chunk_frames)
    pair = [np.concatenate([frames(1, seed), end]) for seed in (2, 3)]
    futures = []
    for film in pair:
        session = model.session(seed=3)
        session.reset(film)
        futures.append(session.step(LEFT).frames)
    assert not np.array_equal(*futures)
    forgetful = make_model(history_rounds=0)
    same = []
    for film in pair:
        session = forgetful.session(seed=3)
        session.reset(film)
        same.append(session.step(LEFT).frames)
    assert np.array_equal(*same)


def losses(model: WorldModel, objective: Objective, episodes: list[Episode]) -> tuple[dict, dict]:
    batch = Batch(step=0, task="rounds", indices=(0,), episodes=episodes, self_rollout=False)
    with torch.no_grad():
        inputs = objective.teach(model, objective.prepare(model, batch, SampleRng([(0,)] * len(episodes))))
        return {k: float(v) for k, v in objective(model, inputs).items()}, {
            k: float(v) for k, v in inputs.counts.items()
        }


@pytest.mark.parametrize("kind", [StateObjective, JointObjective, DistillationObjective])
def test_observed_rounds_have_no_part_in_the_loss(
    make_model: Callable[..., WorldModel], kind: type[Objective]
) -> None:
    model = make_model(history_rounds=2)
    clips = frames(3 * 8).reshape(3, 8, 32, 32, 3)
    episode = Episode("one", (frames(1), *clips), (Action(), Action(), Action(LEFT)))
    objective = kind(model)
    whole, counted = losses(model, objective, [episode])
    parts, counts = losses(model, objective, [replace(episode, observed=2)])
    none, empty = losses(model, objective, [replace(episode, observed=3)])
    for loss in {"changed", "unchanged", "flow", "pixel"} & whole.keys():
        assert counts[loss] < counted[loss] and empty[loss] == none[loss] == 0
        assert 0 <= parts[loss] < whole[loss]
    if kind is JointObjective:
        assert counts["pixel"] == 1
    if kind is StateObjective:
        cells = counted["changed"] + counted["unchanged"]
        assert 3 * (counts["changed"] + counts["unchanged"]) == cells


def test_after_observed_rounds_a_self_rollout_sees_what_was_observed(
    make_model: Callable[..., WorldModel],
) -> None:
    model = make_model(history_rounds=2)
    clips = frames(3 * 8).reshape(3, 8, 32, 32, 3)
    episode = Episode("one", (frames(1), *clips), (Action(), Action(LEFT), Action(LEFT)), observed=1)
    objective = StateObjective(model)
    seen = []
    for self_rollout in (False, True):
        batch = Batch(step=0, task="rounds", indices=(0,), episodes=[episode], self_rollout=self_rollout)
        with torch.no_grad():
            inputs = objective.prepare(model, batch, SampleRng([(0,)]))
            context, _ = objective.observed(model, inputs)  # type: ignore[operator]
        seen.append(context)
    true, played = seen
    assert torch.equal(true[:, :2], played[:, :2])
    assert not torch.allclose(true[:, 2], played[:, 2])


@pytest.mark.parametrize("observed", [0, 1, 2, 5])
def test_a_self_rollout_begins_after_the_rounds_that_a_stage_observes(
    make_model: Callable[..., WorldModel], observed: int
) -> None:
    """All rounds are still trained on; only what they see differs."""
    model = make_model(history_rounds=2)
    clips = frames(3 * 8).reshape(3, 8, 32, 32, 3)
    episode = Episode("one", (frames(1), *clips), (Action(), Action(LEFT), Action(LEFT)))
    objective = StateObjective(model, observed_rounds=observed)
    seen = []
    for self_rollout in (False, True):
        batch = Batch(step=0, task="rounds", indices=(0,), episodes=[episode], self_rollout=self_rollout)
        with torch.no_grad():
            inputs = objective.prepare(model, batch, SampleRng([(0,)]))
            seen.append(objective.observed(model, inputs)[0])
    true, played = seen
    assert true.shape == played.shape
    equal = [torch.allclose(true[:, index], played[:, index]) for index in range(3)]
    assert equal == [index <= observed for index in range(3)]
    assert bool(inputs.content.scored.all())


def test_negative_numbers_of_observed_rounds_are_refused(make_model: Callable[..., WorldModel]) -> None:
    with pytest.raises(ConfigError, match="observed_rounds -1"):
        StateObjective(make_model(), observed_rounds=-1)
    with pytest.raises(ConfigError, match=r"through_time 1\.5"):
        StateObjective(make_model(), through_time=1.5)
