"""Rewards and ends of episodes: read from recordings, learned from states, and predicted in every rollout."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clip_tables import open_table, write_table

from worldmodel.actions import Action
from worldmodel.config import ActionConfig, ActionSpec, DataConfig, SourceConfig, WorldModelConfig
from worldmodel.data.argument import read_source
from worldmodel.data.facts import read_facts
from worldmodel.data.loader import Batch
from worldmodel.data.sources import open_source
from worldmodel.env import WorldEnv, WorldVectorEnv
from worldmodel.episodes import Episode, Outcome
from worldmodel.errors import InputError
from worldmodel.models.outcome import OutcomeHead, symexp, symlog
from worldmodel.models.world_model import WorldModel
from worldmodel.recording.episode import RecordedEpisode, RecordingFormat
from worldmodel.recording.lerobot import LeRobotStore
from worldmodel.train.objectives.state import outcome_losses

KEYS = ("left", "right")
REWARDS = np.array([0, 0.5, 0, -2, 0, 3], np.float32)


@pytest.fixture(scope="module")
def scored(make_model: Callable[..., WorldModel]) -> WorldModel:
    """A model that predicts outcomes, with random weights, and no end of an episode."""
    made = make_model(outcomes=True)
    assert made.state is not None and made.state.outcome is not None
    made.state.outcome.out.bias[-1] = -9
    return made


def of(truth: list[Episode]) -> Batch:
    """A batch of episodes."""
    return Batch(0, "rounds", tuple(range(len(truth))), truth)


def recorded(folder: Path, rate: int) -> str:
    """Two episodes of six steps at 10 fps, of which the first ends and the second is cut short."""
    specs = tuple(ActionSpec(name, "key", rate=rate) for name in KEYS)
    store = LeRobotStore(folder, RecordingFormat(10, specs, {}))
    frames = np.random.default_rng(0).integers(0, 255, (7, 32, 32, 3), dtype=np.uint8)
    numbers = np.eye(2, dtype=np.float32)[[0, 0, 1, 1, 0, 0]]
    actions = tuple(Action.of_numbers(specs, row) for row in numbers)
    for ends in (True, False):
        made = RecordedEpisode(
            {"render": frames}, actions, numbers, REWARDS, terminated=ends, truncated=not ends, seed=0
        )
        store.write(made)
    store.finish()
    return str(folder)


def episodes(path: str, tiny: WorldModelConfig, fps: int, chunk: int) -> list[Episode]:
    data = DataConfig({"mine": SourceConfig("lerobot", path)})
    codec = replace(tiny.codec, temporal_factor=1)
    action = ActionConfig(text=False, keys=KEYS)
    model = replace(tiny, fps=fps, chunk_frames=chunk, codec=codec, action=action)
    source = open_source("mine", data, model)
    return [source.at(number).episode("rounds", 0, 0, 9) for number in range(2)]


def test_each_round_has_the_outcome_of_its_steps(model: WorldModel, tmp_path: Path) -> None:
    path = recorded(tmp_path / "set", 10)
    first, second = episodes(path, model.config, 10, 1)
    assert [outcome.reward for outcome in first.outcomes] == REWARDS.tolist()
    assert [outcome.ended for outcome in first.outcomes] == [False] * 5 + [True]
    assert not any(outcome.ended for outcome in second.outcomes)
    assert read_facts(path, tmp_path / "world.yaml").outcomes
    slower, _ = episodes(recorded(tmp_path / "slow", 5), model.config, 10, 2)  # an action in two steps
    assert slower.outcomes == (Outcome(0.5, False), Outcome(-2, False), Outcome(3, True))


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_table_has_the_outcomes_of_its_rows(
    model: WorldModel, counting: Path, tmp_path: Path, suffix: str
) -> None:
    """The clip has seven rounds; without a recording.json, a list of rewards has one for each."""
    rewards = [0.0, 0.5, 0.0, -2.0, 0.0, 3.0, 1.0]
    rows = [{"path": counting.name, "rewards": rewards, "terminated": ended} for ended in (True, False)]
    rows.append({"path": counting.name, "rewards": rewards[:3], "terminated": False})
    path = write_table(tmp_path, rows, f"clips.{suffix}")
    columns = {"video": "path", "rewards": "rewards", "terminated": "terminated"}
    assert read_source(str(path)).sources["clips"].columns == columns
    source = open_table(
        path, columns, replace(model.config, fps=8, chunk_frames=8), root=str(counting.parent)
    )
    for index in range(6):
        episode = source.at(index % 2).episode("rounds", 0, index, 3)
        first = (round((float(episode.observations[0].mean()) - 20) / 3)) // 8
        assert [each.reward for each in episode.outcomes] == rewards[first : first + 3]
        ends = [False] * 6 + [index % 2 == 0]
        assert [each.ended for each in episode.outcomes] == ends[first : first + 3]
    with pytest.raises(InputError, match="rewards has 3 entries"):
        source.at(2).episode("rounds", 0, 0, 3)


def test_a_reward_that_is_no_number_makes_an_episode_unusable_where_rewards_are_learned(
    model: WorldModel, tmp_path: Path
) -> None:
    from pyarrow import parquet

    path = recorded(tmp_path / "set", 10)
    (file,) = Path(path).glob("data/*/*.parquet")
    table = parquet.read_table(file)
    rewards = table["next.reward"].to_numpy().copy()
    rewards[2] = np.nan
    index = table.column_names.index("next.reward")
    field = table.schema.field(index)
    parquet.write_table(table.set_column(index, field, [rewards.astype(field.type.to_pandas_dtype())]), file)
    with pytest.raises(InputError, match="reward"):
        episodes(path, replace(model.config, outcomes=True), 10, 1)
    first, second = episodes(path, model.config, 10, 1)
    assert len(first.actions) == 6 and all(np.isfinite(each.reward) for each in second.outcomes)


def test_a_dataset_without_rewards_has_no_outcomes(model: WorldModel, tmp_path: Path) -> None:
    path = recorded(tmp_path / "set", 10)
    info = Path(path, "meta", "info.json")
    known = json.loads(info.read_text())
    del known["features"]["next.reward"]
    info.write_text(json.dumps(known))
    assert [each.outcomes for each in episodes(path, model.config, 10, 1)] == [(), ()]
    assert not read_facts(path, tmp_path / "world.yaml").outcomes


def test_symlog_is_inverted_and_symmetric() -> None:
    x = torch.tensor([-1e4, -1.0, 0.0, 1e-3, 2.5, 1e6], dtype=torch.float64)
    assert torch.allclose(symexp(symlog(x)), x)
    assert torch.equal(symlog(-x), -symlog(x))
    assert symlog(torch.tensor(np.e - 1)).item() == pytest.approx(1)


def test_bins_stand_for_any_reward() -> None:
    head, rewards = OutcomeHead(8), torch.tensor([-2.5, 0.0, 0.95, 1.0, 400.0])
    target = head.target(rewards)
    assert torch.allclose(target.sum(dim=1), torch.ones(5)) and ((target > 0).sum(dim=1) <= 2).all()
    assert torch.allclose(symexp(target @ head.bins), rewards, rtol=1e-4, atol=1e-6)
    assert head.target(torch.tensor([1e9]))[0, -1] == 1


def test_the_head_learns_an_event_that_shows_at_one_of_many_positions() -> None:
    """Reward 4 and the end, if any of 36 positions has a certain direction."""
    torch.manual_seed(0)
    head, sign = OutcomeHead(32), F.normalize(torch.randn(32), dim=0) * 8
    optimizer = torch.optim.AdamW(head.parameters(), 1e-2)

    def draw(count: int) -> tuple[torch.Tensor, list[Episode]]:
        states, shown = torch.randn(count, 36, 32), torch.rand(count) < 0.3
        for row in shown.nonzero().flatten().tolist():
            states[row, int(torch.randint(36, ()))] += sign
        return states, [Episode("", outcomes=(Outcome(4.0 * bool(each), bool(each)),)) for each in shown]

    for _ in range(250):
        states, truth = draw(64)
        losses = outcome_losses(head, states[:, None], of(truth))
        optimizer.zero_grad()
        sum(losses.values()).backward()  # type: ignore[union-attr]
        optimizer.step()
    states, truth = draw(400)
    wanted, found = [each.outcomes[0] for each in truth], head.read(states)
    assert np.mean([a.ended == b.ended for a, b in zip(wanted, found, strict=True)]) > 0.97
    assert np.abs([a.reward - b.reward for a, b in zip(wanted, found, strict=True)]).mean() < 0.4


def test_rounds_without_outcomes_do_not_count() -> None:
    head, states = OutcomeHead(16), torch.randn(3, 2, 5, 16)
    torch.nn.init.normal_(head.out.weight)
    known = Episode("", outcomes=(Outcome(1.0, False), Outcome(0.0, True)))
    alone = outcome_losses(head, states[:1], of([known]))
    mixed = outcome_losses(head, states, of([known, Episode(""), Episode("")]))
    for name, loss in alone.items():
        assert loss.item() == pytest.approx(mixed[name].item(), rel=1e-5)
    nothing = outcome_losses(head, states[1:], of([Episode(""), Episode("")]))
    assert [loss.item() for loss in nothing.values()] == [0, 0]
    assert all(
        loss.requires_grad for loss in nothing.values()
    )  # every process takes part in the backward pass


def test_sessions_and_environments_have_the_outcome_of_the_state(
    scored: WorldModel, model: WorldModel, image: np.ndarray, tmp_path: Path
) -> None:
    env = WorldEnv(scored, start={"observation": image}, actions="keys")
    many = WorldVectorEnv(scored, 2, start={"observation": image}, actions="keys")
    _, info = env.reset(seed=0)
    many.reset(seed=0)
    session = scored.session(info["world_seed"])
    session.reset(image)
    assert session.outcome is None
    for action in (["left"], ["right"]):
        pressed = np.array([key in action for key in scored.config.action.keys], np.int8)
        result = session.step({"keys": action})
        assert result.outcome is not None
        assert result.outcome == session.outcome
        _, reward, terminated, _, _ = env.step(pressed)
        assert reward == pytest.approx(result.outcome.reward, abs=1e-4)
        assert terminated == result.outcome.ended
        _, rewards, _, _, _ = many.step(np.stack([pressed, pressed * 0]))
        assert rewards[0] == pytest.approx(result.outcome.reward, abs=1e-3)
    fork = session.fork()
    assert fork.outcome == session.outcome
    session.observe(image)
    assert session.outcome is None
    own = WorldEnv(scored, start={"observation": image}, actions="keys", reward_fn=lambda frames, action: 7.0)
    own.reset(seed=0)
    assert own.step(np.zeros(len(scored.config.action.keys), np.int8))[1] == 7.0

    loaded = WorldModel.from_pretrained(scored.save_pretrained(tmp_path / "scored", dtype=torch.float32))
    again = loaded.session(info["world_seed"])
    again.restore(fork.snapshot())
    first, second = (each.step({"keys": ["left"]}).outcome for each in (again, fork))
    assert first and second
    assert first.reward == pytest.approx(second.reward, abs=1e-5)
    assert not (model.save_pretrained(tmp_path / "plain") / "outcome").exists()
    plain = model.session()
    plain.reset(image)
    assert plain.step({"keys": ["left"]}).outcome is None
    assert plain.outcome is None
