"""The suite of Crafter: tiles read from pixels against the game, and the true game as a model."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from worldmodel import worlds
from worldmodel.actions import Action
from worldmodel.config import ActionConfig, CodecConfig, StateConfig, VisionConfig, WorldModelConfig
from worldmodel.episodes import Outcome
from worldmodel.errors import InputError
from worldmodel.eval.runner import Clips
from worldmodel.eval.suite import EvalSettings, evaluate
from worldmodel.eval.table import find
from worldmodel.models.world_model import WorldModel

pytest.importorskip("gymnasium")
pytest.importorskip("crafter")

from worldmodel.games.crafter import RULES, Crafter
from worldmodel.games.crafter.evaluation import CrafterSuite
from worldmodel.games.crafter.films import Film, films, places, returns
from worldmodel.games.crafter.tiles import moment, read_bag, read_tiles

SEED, COUNT = 1234, 4


PARTS: dict[str, Any] = {
    "world": "crafter",
    "codec": CodecConfig(image_size=72, temporal_factor=1, latent_channels=4, widths=(8, 16), num_blocks=2),
    "vision": VisionConfig(width=32, num_blocks=1, merge=3),
    "action": ActionConfig(text=False, keys=tuple(RULES.actions)),
    "state": StateConfig(width=32, num_layers=1, num_heads=2, code_groups=1, code_block=3),
    "generator": None,
    "num_inference_steps": 0,
    "chunk_frames": 1,
    "query_merge": 3,
    "history_rounds": 2,
    "context_latents": 3,
    "outcomes": True,
}


@pytest.fixture(scope="module")
def shown() -> dict[bytes, Film]:
    """The films of the suite, by the last frame of their past."""
    every = [*films(SEED, COUNT, 30), *returns(SEED, COUNT // 2, 4), *returns(SEED, COUNT // 2, 8)]
    return {film.past[-1].tobytes(): film for film in every}


class Told:
    """A subject that knows the films: it shows their frames, or repeats the last frame before them."""

    def __init__(self, films: dict[bytes, Film], copies: bool = False) -> None:
        self.films, self.copies = films, copies

    def open(self, starts: Any, seeds: Sequence[int], actions: Sequence[Sequence[Action]] = ()) -> Any:
        assert {len(start) - 1 for start in starts} == {len(done) for done in actions}
        return ToldWorlds([self.films[start[-1].tobytes()] for start in starts], self.copies)

    def reconstruct(self, clips: Clips) -> Clips:
        return clips

    def with_steps(self, num_inference_steps: int) -> "Told":
        return self


class ToldWorlds:
    def __init__(self, films: Sequence[Film], copies: bool) -> None:
        self.films, self.copies, self.number = films, copies, -1
        self.outcomes: tuple[Outcome, ...] = ()

    def step(self, actions: Sequence[Action]) -> Clips:
        self.number += 1
        at = [min(self.number, len(film.frames) - 1) for film in self.films]
        if self.copies:
            self.outcomes = (Outcome(0.0, False),) * len(at)
            return np.stack([film.past[-1:] for film in self.films])
        late = [self.number > number for number in at]
        self.outcomes = tuple(
            Outcome(0.0, False) if after else film.outcomes[i]
            for film, i, after in zip(self.films, at, late, strict=True)
        )
        return np.stack([film.frames[i : i + 1] for film, i in zip(self.films, at, strict=True)])


@pytest.mark.slow
def test_tiles_and_bag_are_read_as_the_game_has_them() -> None:
    env = Crafter()
    rng = np.random.default_rng(0)
    env.reset(seed=5)
    game = env.game
    for light, asleep in ((1.0, False), (0.6, False), (0.3, False), (0.8, True)):
        for number in range(20):
            game._player.inventory = {name: int(rng.integers(10)) for name in game._player.inventory}
            place = rng.integers(5, 59, 2)
            if game._world[place][1] is None:
                game._world.move(game._player, place)
            game._player.sleeping, game._world.daylight = asleep, light
            game._player.facing = ((0, 1), (0, -1), (1, 0), (-1, 0))[number % 4]
            frame, known = game.render(), moment(game)
            assert np.array_equal(read_bag(frame), known.bag)
            if game._world[place][0] in ("grass", "sand", "path"):  # it stands in water where we put it
                assert np.array_equal(read_tiles(frame, known), known.tiles)
            tree = frame.copy()
            tree[:8, :8], tree[:8, 8:16] = frame[:8, 8:16], frame[:8, :8]
            swapped = known.tiles.copy()
            swapped[0, [0, 1]] = swapped[0, [1, 0]]
            if light > 0.5:  # noise is another in each tile
                assert np.array_equal(read_tiles(tree, known)[0, :2], swapped[0, :2])
    assert moment(game).tiles.shape == (7, 9) and places(moment(game))[31] == tuple(game._player.pos)


@pytest.mark.slow
def test_the_true_game_is_right_and_a_copy_is_as_good_as_a_copy(shown: dict[bytes, Film]) -> None:
    settings = EvalSettings(num_samples=COUNT, seed=SEED)
    suite = CrafterSuite()
    true, copied = (
        evaluate(cast(Any, Told(shown, copies)), settings, suite)["figures"] for copies in (False, True)
    )
    for goal in suite.goals:
        figure = find(true, goal.path)
        if goal.path[0] == "speed" or "end_f1" in goal.path:  # perhaps nobody dies in so few films
            continue
        assert figure is not None and figure["n"] > 0, goal.title
        assert figure["value"] == (0.0 if {"difference", "borders"} & set(goal.path) else 1.0), goal.title
        assert goal.at_least is None or figure["value"] >= goal.at_least
    for number, measures in copied["films"]["rounds"].items():
        for name, rows in measures.items():
            assert rows["model"] == rows["copy"], (number, name)
            assert true["films"]["rounds"][number][name]["copy"] == rows["copy"]
        assert measures["changed"]["copy"]["value"] < 0.05  # what changed is not as it was
    assert copied["films"]["outcomes"]["reward_f1"]["model"]["value"] == 0
    for steps in ("4", "8"):
        assert true["returns"][steps]["copy"]["value"] < 1


@pytest.mark.slow
def test_ways_there_and_back_end_where_they_began(shown: dict[bytes, Film]) -> None:
    for steps in (4, 8):
        for film in returns(SEED, COUNT // 2, steps):
            assert film.moments[-1].place == film.start.place
            turn = film.moments[steps - 1].place
            assert abs(turn[0] - film.start.place[0]) + abs(turn[1] - film.start.place[1]) == steps
            assert len(film.past) == 17 and len(film.done) == 16


@pytest.mark.slow
def test_a_model_of_crafter_is_evaluated_by_its_world(make_model: Callable[..., WorldModel]) -> None:
    model = make_model(**PARTS)
    suite = worlds.suite_of(model.config)
    found = evaluate(model, EvalSettings(num_samples=2, seed=SEED), suite, only=lambda part: part == "films")
    row = found["figures"]["films"]["rounds"]["1"]["cells"]["model"]
    assert row["n"] > 60 and 0 <= row["value"] < 1


def test_the_suite_refuses_models_of_other_frames() -> None:
    config = WorldModelConfig(**PARTS)
    with pytest.raises(InputError, match="72 x 72"):
        worlds.suite_of(replace(config, codec=replace(config.codec, image_size=144)))
    with pytest.raises(InputError, match="make_iron_sword"):
        worlds.suite_of(replace(config, action=ActionConfig(text=False, keys=("noop",))))


def test_borders_are_lawful_that_occur_in_the_game() -> None:
    from worldmodel.games.crafter.evaluation import _borders, _lawful_borders

    tiles = np.full((7, 9), "tree", dtype="<U16")
    tiles[:, 0] = "water"
    new = np.zeros((7, 9), bool)
    new[:, 0] = True
    assert list(_borders(tiles, new, ~new)) == ["tree|water"] * 7
    assert "sand|water" in _lawful_borders() and "diamond|water" not in _lawful_borders()
    assert "cow|water" in _lawful_borders()  # it may have walked there
