"""Planning: searches find known optima, play each prefix once, and work in real environments."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image

from worldmodel.actions import Action
from worldmodel.cli import main
from worldmodel.config import ActionConfig, StateConfig
from worldmodel.episodes import Outcome
from worldmodel.errors import ConfigError, InputError
from worldmodel.media import Frame, Frames
from worldmodel.models.world_model import WorldModel
from worldmodel.planning import (
    METHODS,
    Box,
    Choices,
    GoalImage,
    ModelSimulator,
    PlanSettings,
    Return,
    Trajectory,
    action_set,
    plan,
)
from worldmodel.planning.search import Method, SeenStates

KEYS = ("left", "right", "up", "down")
MOVES = dict(zip(KEYS, ((0, -1), (0, 1), (-1, 0), (1, 0)), strict=True))
REST = ((2, 3), (2, 2), (1, 2), (1, 1), (0, 1), (0, 0), (0, 1), (0, 0))
"""What is left to the goal after each key of the shortest walk of eight."""
WALKS = Choices(tuple(Action(keys=(key,)) for key in KEYS))


@dataclass
class Walk:
    """A point on 8 x 8 cells, moved by keys, or by vectors of two numbers."""

    steps: list[tuple[tuple[float, float], Action]] = field(default_factory=list)

    def step(
        self, states: Sequence[tuple[float, float]], actions: Sequence[Action]
    ) -> list[tuple[float, float]]:
        self.steps += zip(states, actions, strict=True)
        moves = [action.vector or MOVES[action.keys[0]] for action in actions]
        return [
            (min(max(row + down, 0), 7), min(max(column + right, 0), 7))
            for (row, column), (down, right) in zip(states, moves, strict=True)
        ]

    def frames(self, state: tuple[float, float]) -> Frames:
        frame = np.zeros((1, 32, 32, 3), np.uint8)
        row, column = (round(4 * x) for x in state)
        frame[0, row : row + 4, column : column + 4] = 255
        return frame

    def outcome(self, state: tuple[float, float]) -> Outcome:
        """The way ends in the last corner, with a reward."""
        return Outcome(float(state == (7, 7)), state == (7, 7))


def closeness(goal: tuple[float, float]) -> Return:
    """Minus the distance of the point after each round."""

    def reward(frames: Frames, action: Action) -> float:
        row, column, _ = (x.mean() for x in np.nonzero(frames[-1]))
        return -float(np.hypot((row - 1.5) / 4 - goal[0], (column - 1.5) / 4 - goal[1]))

    return Return(reward)


def test_search_finds_a_shortest_path_and_continues_each_state_once() -> None:
    world = Walk()
    found = plan(world, (0, 0), Return(), WALKS, PlanSettings("search", horizon=20, until=1))
    assert (len(found.trajectory.actions), found.score) == (14, 1)
    assert len({state for state, _ in world.steps}) == found.num_rounds / 4 <= 63
    assert len(world.steps) == found.num_rounds == len(set(world.steps))
    state: tuple[float, float] = (0, 0)
    for action, frames in zip(found.trajectory.actions, found.trajectory.rounds, strict=True):
        (state,) = world.step([state], [action])
        assert np.array_equal(frames, world.frames(state))
    assert state == (7, 7)


@pytest.mark.parametrize("method", ["cem", "mppi"])
@pytest.mark.parametrize("actions", [WALKS, Box((-1, -1), (1, 1))], ids=["keys", "vectors"])
def test_distributions_that_learn_beat_random_sequences(method: str, actions: Choices | Box) -> None:
    """The optimum walks straight to the goal, three cells down and three to the right."""

    def scores(method: str) -> np.ndarray:
        settings = [PlanSettings(method, horizon=8, candidates=64, iterations=6, seed=s) for s in range(5)]  # type: ignore[arg-type]
        return np.array([plan(Walk(), (1, 1), closeness((4, 4)), actions, each).score for each in settings])

    learned, random = scores(method), scores("random")
    assert (learned >= random).all()
    assert learned.mean() > random.mean() + 1
    if isinstance(actions, Choices):  # the last two of eight moves lead away and back
        assert learned.max() == pytest.approx(-np.hypot(*zip(*REST, strict=True)).sum(), abs=1e-3)
    else:
        assert -2 * np.hypot([2, 1], [2, 1]).sum() < learned.max()


def test_prefixes_are_played_once_and_results_repeat() -> None:
    world = Walk()
    settings = PlanSettings("cem", horizon=6, candidates=32, iterations=3, seed=7)
    found = plan(world, (1, 1), closeness((4, 4)), WALKS, settings)
    assert found.num_rounds == len(world.steps) < 32 * 6 * 3
    again = plan(Walk(), (1, 1), closeness((4, 4)), WALKS, replace(settings, batch_size=5))
    assert (again.trajectory.actions, again.score) == (found.trajectory.actions, found.score)
    other = plan(Walk(), (1, 1), closeness((4, 4)), WALKS, replace(settings, seed=8, iterations=1))
    assert other.trajectory.actions != found.trajectory.actions


def test_a_sequence_stops_where_its_episode_ends() -> None:
    world = Walk()
    down = Choices((Action(keys=("down",)),))
    found = plan(world, (5, 7), Return(), down, PlanSettings("random", horizon=9, candidates=2, iterations=1))
    assert (len(found.trajectory.actions), found.score, found.num_rounds) == (2, 1, 2)
    assert found.trajectory.ended
    unknown = replace(found.trajectory, outcomes=(None, None))
    with pytest.raises(InputError, match="outcomes"):
        Return()(unknown)


def test_frames_of_one_state_may_differ_a_little() -> None:
    seen, frame = SeenStates(24), np.full((9, 8, 3), 100, np.uint8)
    assert seen.add(frame)
    assert not seen.add(frame + 20)
    changed = frame.copy()
    changed[:4, 4:] += 30
    assert seen.add(changed)
    assert not seen.add(changed)


def test_in_a_model_a_plan_is_what_a_session_plays(model: WorldModel, image: np.ndarray) -> None:
    simulator = ModelSimulator(model, seed=3)
    goal = model.session(3)
    goal.reset(image)
    goal.step({"keys": ["left"]})
    wanted = goal.step({"keys": ["right"]}).frames[-1]
    objective = GoalImage(wanted, 32)
    actions = Choices((Action(keys=("left",)), Action(keys=("right",))))
    found = plan(
        simulator, simulator.start(image), objective, actions, PlanSettings("random", 2, 16, 1, seed=1)
    )
    assert found.num_rounds == 6
    assert found.trajectory.actions == (Action(keys=("left",)), Action(keys=("right",)))
    assert found.score == pytest.approx(0, abs=0.1)
    session = model.session(3)
    session.reset(image)
    for action, frames in zip(found.trajectory.actions, found.trajectory.rounds, strict=True):
        assert np.abs(session.step(action).frames.astype(int) - frames).max() <= 1


def test_actions_of_a_model(model: WorldModel) -> None:
    config = replace(model.config, action=ActionConfig(keys=("a", "b")))
    assert action_set(config) == Choices((Action(keys=("a",)), Action(keys=("b",)), Action()))
    assert len(action_set(replace(config, pace="on_action")).actions) == 2  # type: ignore[union-attr]
    vectors = ActionConfig(vector={"low": (0, -1), "high": (2, 1)})
    assert action_set(replace(config, action=vectors)) == Box((0, -1), (2, 1))
    with pytest.raises(InputError, match="name the actions"):
        action_set(replace(config, action=ActionConfig()))


def test_settings_that_cannot_be_used_are_named() -> None:
    assert METHODS == ("random", "cem", "mppi", "search")
    for wrong in ({"method": "astar"}, {"horizon": 0}, {"elites": 0.0}, {"temperature": float("nan")}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            PlanSettings(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cem"):
        plan(Walk(), (0, 0), closeness((1, 1)), Box((-1,), (1,)), PlanSettings("search"))
    with pytest.raises(InputError, match="at least one"):
        Choices(())


TURNS = Choices(tuple(Action(keys=(key,)) for key in ("left", "right", "forward")))


def empty_room(max_steps: int) -> Any:
    """Episodes of MiniGrid, in which the goal is two steps ahead and two to the right."""
    pytest.importorskip("minigrid")
    from worldmodel.recording.environment import EnvironmentEpisodes
    from worldmodel.recording.settings import EnvironmentSettings

    made = EnvironmentSettings("minigrid:MiniGrid-Empty-5x5-v0", max_steps=max_steps, size=40)
    return EnvironmentEpisodes(made)


def goal_reward() -> Callable[[Frames, Action], float]:
    """Return a reward of 1 for a round after which the agent is on the goal."""
    from worldmodel.games.minigrid_judge import MiniGridJudge

    judge = MiniGridJudge()
    return lambda frames, action: float(any("on the goal" in name for name in judge.read(frames[-1]).ravel()))


@pytest.mark.slow
def test_a_real_environment_is_solved_by_its_own_copies() -> None:
    played = empty_room(max_steps=12)
    from worldmodel.planning.environment import EnvironmentSimulator, control, random_attempt

    settings = PlanSettings("search", horizon=8, until=1)
    attempt = control(played, 0, EnvironmentSimulator(played), Return(goal_reward()), TURNS, settings)
    names = [action.keys[0] for action in attempt.actions]
    assert names == ["forward", "forward", "right", "forward", "forward"]
    assert (attempt.success, len(attempt.plans), len(attempt.frames)) == (True, 1, 6)
    assert attempt.reward > 0.5
    unlucky = random_attempt(played, 0, TURNS, np.random.default_rng(0))
    assert (unlucky.success, len(unlucky.actions)) == (False, 12)
    with pytest.raises(InputError, match="left"):
        played.advance(played.env, Action(keys=("jump",)))
    with pytest.raises(InputError, match="hold one"):
        played.advance(played.env, Action())
    played.close()


def test_a_plan_may_be_made_anew_after_some_actions() -> None:
    played = empty_room(max_steps=4)
    from worldmodel.planning.environment import EnvironmentSimulator, EnvironmentState, control

    settings, goal = PlanSettings("search", horizon=8, until=1), Return(goal_reward())
    begun = []

    class Simulator(EnvironmentSimulator):
        def start(self, frame: Frame) -> EnvironmentState:
            begun.append(frame)
            return super().start(frame)

    attempt = control(played, 0, Simulator(played), goal, TURNS, settings, replan=2)
    assert [action.keys[0] for action in attempt.actions] == ["forward", "forward", "right", "forward"]
    assert [len(each.trajectory.actions) for each in attempt.plans] == [5, 3]
    for number, frame in enumerate(begun):  # each from what the environment shows
        assert np.array_equal(frame, attempt.frames[2 * number])
    assert (attempt.rewards, attempt.success) == ([0.0] * 4, False)
    with pytest.raises(InputError, match="replan"):
        control(played, 0, Simulator(played), goal, TURNS, settings, replan=-1)
    played.close()


def test_actions_may_be_held_for_some_rounds() -> None:
    world = Walk()
    settings = PlanSettings("cem", horizon=8, hold=3, candidates=16, iterations=4)
    found = plan(world, (1, 1), closeness((4, 4)), Box((-1, -1), (1, 1)), settings)
    actions = found.trajectory.actions
    assert [len(list(same)) for _, same in itertools.groupby(actions)] == [3, 3, 2]
    assert len(world.steps) == found.num_rounds <= 16 * 8 * 4
    with pytest.raises(ConfigError, match="hold"):
        PlanSettings(hold=0)


def test_only_the_ends_of_sampled_sequences_are_scored() -> None:
    scored = []

    def score(trajectory: Trajectory) -> float:
        scored.append(len(trajectory.actions))
        return 0.0

    plan(Walk(), (1, 1), score, Box((-1, -1), (1, 1)), PlanSettings("random", 8, candidates=4, iterations=2))
    assert scored == [8] * 8


@pytest.mark.parametrize("actions", [WALKS, Box((-1, -1), (1, 1))], ids=["keys", "vectors"])
def test_samples_are_drawn_around_the_plan_before(actions: Choices | Box) -> None:
    settings = PlanSettings("cem", horizon=8, candidates=16, iterations=1)
    goal = closeness((6, 6))
    rest = plan(Walk(), (0, 0), goal, actions, replace(settings, candidates=64, iterations=8))
    scores = []
    for follow in (rest.trajectory.actions[1:], ()):
        made = [replace(settings, seed=seed) for seed in range(8)]
        scores.append(np.mean([plan(Walk(), (1, 0), goal, actions, each, follow).score for each in made]))
    assert scores[0] > scores[1] + 2


@pytest.mark.parametrize(("risk", "chosen", "value"), [("expected", "left", 4.0), ("worst", "right", 3.0)])
def test_several_futures_count_by_their_mean_or_by_the_worst(
    risk: Literal["expected", "worst"], chosen: str, value: float
) -> None:
    """Left wins 9 in one world and loses 1 in the other, where it ends; right wins 3 in both."""
    gains = {(0, "left"): 9.0, (1, "left"): -1.0, (0, "right"): 3.0, (1, "right"): 3.0}

    class Gamble:
        def step(self, states: Sequence[tuple[int, float]], actions: Sequence[Action]) -> list[Any]:
            return [
                (world, gains[world, action.keys[0]])
                for (world, _), action in zip(states, actions, strict=True)
            ]

        def frames(self, state: tuple[int, float]) -> Frames:
            return np.zeros((1, 8, 8, 3), np.uint8)

        def outcome(self, state: tuple[int, float]) -> Outcome:
            return Outcome(state[1], state[1] < 0)

    actions = Choices(tuple(Action(keys=(key,)) for key in ("left", "right")))
    settings = PlanSettings(method="random", horizon=1, candidates=16, iterations=1, risk=risk)
    found = plan(Gamble(), (0, 0.0), Return(), actions, settings, futures=[(1, 0.0)])
    assert found.trajectory.actions == (Action(keys=(chosen,)),)
    assert found.score == value and found.scores == ((9.0, -1.0) if chosen == "left" else (3.0, 3.0))
    longer = replace(settings, horizon=2, candidates=64)
    two = plan(Gamble(), (0, 0.0), Return(), actions, longer, futures=[(1, 0.0)])
    best = {"expected": (18.0, -1.0), "worst": (6.0, 6.0)}  # what ended in the second world stays so
    assert two.scores == best[risk]


def test_futures_of_a_model_differ_in_what_happens_next(
    make_model: Callable[..., WorldModel], image: np.ndarray
) -> None:
    state = StateConfig(width=32, num_layers=1, num_heads=2, code_groups=3)
    model = make_model(state=state, generator=None, num_inference_steps=0)
    simulator = ModelSimulator(model, seed=4)
    start = simulator.start(image)
    worlds = [start, *simulator.futures(start, 3)]
    after = simulator.step(worlds, [Action.of("left")] * 4)
    assert len({world.states[0].code for world in after}) > 1
    session = model.session(4)
    session.reset(image)
    assert after[0].states[0].code == session.step("left").state.code


def test_the_command_plans_from_an_image(
    model: WorldModel, image: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(model.save_pretrained(tmp_path / "model"))
    Image.fromarray(image).save(tmp_path / "start.png")
    start, goal = str(tmp_path / "start.png"), str(tmp_path / "start.png")
    words = ["plan", folder, "--start", start, "--horizon", "2", "--candidates", "3", "--iterations", "1"]
    assert main([*words, "--goal", goal, "--out", str(tmp_path / "plan.gif")]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert (len(printed), printed[0][:5]) == (4, "  1  ")
    assert (tmp_path / "plan.gif").stat().st_size
    assert main([*words, "--goal", goal, "--futures", "2", "--risk", "worst"]) == 0
    assert "at worst" in capsys.readouterr().out
    for wrong in (["--goal", goal, "--reward", "a:b"], ["--reward", "worldmodel:nothing"]):
        assert main([*words, *wrong]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.parametrize("actions", [WALKS, Box((-1, -1), (1, 1))])
def test_mppi_ignores_scores_of_minus_infinity(actions: Choices | Box) -> None:
    nearest = closeness((5, 5))

    def score(trajectory: Trajectory) -> float:
        column = np.nonzero(trajectory.rounds[-1][-1])[1].mean() / 4
        return -np.inf if column > 6 else nearest(trajectory)

    settings = PlanSettings("mppi", horizon=8, candidates=32, iterations=6)
    found = plan(Walk(), (2, 2), score, actions, settings)
    blind = plan(Walk(), (2, 2), score, actions, replace(settings, method="random"))
    assert np.isfinite(found.score) and found.score >= blind.score


@pytest.mark.parametrize("method", METHODS)
def test_nan_scores_are_rejected(method: Method) -> None:
    with pytest.raises(InputError, match="not a number"):
        plan(Walk(), (0, 0), lambda trajectory: float("nan"), WALKS, PlanSettings(method))


def test_objectives_never_see_an_empty_trajectory() -> None:
    found = plan(Walk(), (0, 0), lambda t: float(t.rounds[-1].mean()), WALKS, PlanSettings("random", 3, 4))
    assert np.isfinite(found.score)


def test_the_command_takes_actions_and_the_settings_of_the_recording(
    make_model: Callable[..., WorldModel],
    image: np.ndarray,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    talker = make_model(action=ActionConfig(text={"max_tokens": 64}))
    folder = str(talker.save_pretrained(tmp_path / "model"))
    Image.fromarray(image).save(tmp_path / "start.png")
    start = str(tmp_path / "start.png")
    words = ["plan", folder, "--start", start, "--goal", start, "--horizon", "2", "--candidates", "2"]
    assert main(words) == 2
    assert "--action" in capsys.readouterr().err
    assert main([*words, "--action", "the ball jumps"]) == 0
    assert [line.split()[1:] for line in capsys.readouterr().out.splitlines()[:2]] == [
        ["the", "ball", "jumps"]
    ] * 2
    assert main([*words, "--device", "nonsense"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
