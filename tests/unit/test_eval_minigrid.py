"""The judge of MiniGrid's boards, against the state of the environment itself."""

import numpy as np
import pytest
from PIL import Image

from worldmodel.errors import InputError
from worldmodel.eval.judge import load_judge
from worldmodel.games.minigrid_judge import DIRECTIONS, MiniGridJudge
from worldmodel.media import crop_and_resize

gymnasium = pytest.importorskip("gymnasium")
minigrid = pytest.importorskip("minigrid")


@pytest.fixture(scope="module")
def judge() -> MiniGridJudge:
    found = load_judge("worldmodel.games.minigrid_judge:MiniGridJudge")
    assert isinstance(found, MiniGridJudge)
    return found


def cells_of(env: "gymnasium.Env") -> np.ndarray:
    """Names of all cells, from the state."""
    board = env.unwrapped  # type: ignore[attr-defined]
    names = np.empty((board.height, board.width), dtype=object)
    for row, column in np.ndindex(names.shape):
        thing = board.grid.get(column, row)
        name = "floor" if thing is None else thing.type
        if name in ("key", "ball", "box"):
            name = f"{thing.color} {name}"
        elif name == "door":
            state = "open" if thing.is_open else "locked" if thing.is_locked else "closed"
            name = f"{state} {thing.color} door"
        if (column, row) == tuple(board.agent_pos):
            entered = {"goal": " on the goal", "floor": ""}
            where = entered[name] if name in entered else f" in the {thing.color} door"  # noqa: SIM401 -- there may be no thing
            name = f"agent facing {DIRECTIONS[board.agent_dir]}{where}"
        names[row, column] = name
    return names


def frame_of(env: "gymnasium.Env", cell: int = 8) -> np.ndarray:
    picture = env.render()
    board = env.unwrapped  # type: ignore[attr-defined]
    return crop_and_resize(Image.fromarray(picture), (board.height * cell, board.width * cell))


@pytest.mark.parametrize("name", ["DoorKey-6x6", "Fetch-8x8-N3", "LavaCrossingS9N1", "GoToDoor-6x6"])
def test_cells_are_those_of_the_state(judge: MiniGridJudge, name: str) -> None:
    env = gymnasium.make(f"MiniGrid-{name}-v0", render_mode="rgb_array")
    for seed in range(3):
        env.reset(seed=seed)
        env.action_space.seed(seed)
        for _ in range(8):
            read = np.vectorize(lambda cell: cell.removesuffix(" in view"))(judge.read(frame_of(env)))
            assert (read == cells_of(env)).all()
            env.step(env.action_space.sample())
    env.close()


def test_the_door_of_a_solved_board_opens(judge: MiniGridJudge) -> None:
    env = gymnasium.make("MiniGrid-DoorKey-6x6-v0", render_mode="rgb_array", highlight=False)
    env.reset(seed=1)
    board = env.unwrapped
    door = next(each for each in board.grid.grid if each is not None and each.type == "door")
    locked = frame_of(env)
    door.is_locked, door.is_open = False, True
    opened = frame_of(env)
    verdict = judge(locked, opened)
    assert (verdict.named, verdict.others, verdict.strict) == (True, False, False)
    assert "locked yellow door instead of open yellow door" in verdict.note
    assert judge(opened, opened).strict
    board.agent_dir = (board.agent_dir + 1) % 4
    turned = judge(frame_of(env), opened)
    assert (turned.named, turned.others, turned.strict) == (False, True, False)


def test_a_frame_of_other_cells_is_refused(judge: MiniGridJudge) -> None:
    with pytest.raises(InputError, match="8 pixels"):
        judge.read(np.zeros((50, 48, 3), np.uint8))
