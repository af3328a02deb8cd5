"""Twin futures: how they are recorded, and whether a model obeys by them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from pyarrow import parquet

from worldmodel import config as configs
from worldmodel import recording
from worldmodel.actions import Action
from worldmodel.cli import main, new
from worldmodel.config import (
    ActionConfig,
    CodecConfig,
    DataConfig,
    SourceConfig,
    StageConfig,
    TrainConfig,
    TrainedConfig,
    ValidationConfig,
    WorldModelConfig,
)
from worldmodel.data.argument import read_held_out, read_source
from worldmodel.data.sources import open_sources
from worldmodel.data.twins import HISTORY, twins_of
from worldmodel.errors import ConfigError, InputError
from worldmodel.eval.data.suite import DataSettings, DataSuite
from worldmodel.eval.data.twins import Twins, read_twins, twin_figures, twin_reader
from worldmodel.eval.metrics import Played, get_metric
from worldmodel.eval.metrics.twins import MIN_DIFFERENCE, MIN_PIXELS, where_differ
from worldmodel.eval.suite import evaluate
from worldmodel.models.world_model import WorldModel
from worldmodel.recording import record_twins
from worldmodel.recording.environment import EnvironmentEpisodes
from worldmodel.recording.origin import origin_of
from worldmodel.recording.settings import EnvironmentSettings
from worldmodel.recording.twins import TwinEpisodes
from worldmodel.train import finetune, recipe, validation
from worldmodel.train.checkpoint import checkpointer
from worldmodel.train.run.log import read_metrics

SIDE, SQUARE = 32, 8
KEYS = ("left", "stay", "right")
CONFIG = WorldModelConfig(
    codec=CodecConfig(image_size=SIDE, temporal_factor=1),
    chunk_frames=1,
    fps=10,
    action=ActionConfig(text=False, keys=KEYS),
    outcomes=True,
)
rng_of_the_process = np.random.default_rng(0)


def picture(place: int) -> np.ndarray:
    frame = np.full((SIDE, SIDE, 3), 40, np.uint8)
    frame[12:20, place : place + SQUARE] = (230, 60, 60)
    return frame


def moved(frame: np.ndarray, key: str) -> np.ndarray:
    """Move the square of a frame; walls stop it."""
    place = int(np.argmax(frame[14, :, 0] > 150))
    return picture(int(np.clip(place + 4 * (KEYS.index(key) - 1), 0, SIDE - SQUARE)))


class Slide(gymnasium.Env):
    """A square that the keys move; options make it unusable for twins."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    observation_space = spaces.Box(0, 1, (2,))

    def __init__(
        self, render_mode: str | None = None, length: int = 30, kind: str = "", num_actions: int = 3
    ) -> None:
        self.render_mode, self.length, self.kind = render_mode, length, kind
        self.phase = 0
        self.action_space = spaces.Discrete(num_actions)

    def get_action_meanings(self) -> list[str]:
        return list(KEYS)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        chance = rng_of_the_process if self.kind == "ignores its seed" else self.np_random
        self.frame, self.steps = picture(int(chance.integers(0, SIDE - SQUARE))), 0
        self.waiting = ["stay", "stay"]
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.phase += 1
        key = KEYS[int(action)]
        if self.kind == "shakes":
            key = KEYS[int(rng_of_the_process.integers(3))]
        if self.kind == "shows late":  # a key moves the square two steps later
            self.waiting.append(key)
            key = self.waiting.pop(0)
        if self.kind == "is pushed by chance" and self.np_random.random() < 0.3:
            key = KEYS[int(self.np_random.integers(3))]
        if self.kind == "keys do nothing":
            key = KEYS[self.steps % 3]
        self.frame = moved(self.frame, key)
        fallen = self.kind == "falls" and key == "right"
        fallen |= self.kind == "keeps a phase" and self.phase % 9 == 0
        return np.zeros(2, np.float32), 0.0, fallen or self.steps >= self.length, False, {}

    def render(self) -> np.ndarray:
        if self.kind == "keeps a phase":  # an animation that goes on over resets
            frame = self.frame.copy()
            frame[:4] = 25 * (self.phase % 7)
            return frame
        return self.frame


if "Slide-v0" not in gymnasium.registry:
    gymnasium.register("Slide-v0", Slide)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def settings(policy: str = "random", **arguments: Any) -> EnvironmentSettings:
    return EnvironmentSettings("Slide-v0", policy, env_args=arguments)


def rows_of(folder: Path) -> list[list[dict[str, Any]]]:
    """The rows of every episode."""
    rows = [row for path in folder.glob("data/*/*.parquet") for row in parquet.read_table(path).to_pylist()]
    count = max(row["episode_index"] for row in rows) + 1
    return [[row for row in rows if row["episode_index"] == index] for index in range(count)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with 25 pairs of twins."""
    folder = tmp_path_factory.mktemp("recorded") / "set"
    return recording.record_environment(settings(), folder, 20, num_twins=25)


def test_twins_are_a_dataset_beside_the_held_out_episodes(recorded: Path) -> None:
    info = json.loads((recorded / "twins" / "meta" / "info.json").read_text())
    assert info["total_episodes"] == 50 and info["codebase_version"] == "v3.0"
    assert info["worldmodel"]["recording"]["twins"] == {"steps": 12, "history": HISTORY["twins"]}
    held = json.loads((recorded / "meta" / "split.json").read_text())["held-out"]
    assert len(held) == 2
    seeds = [EnvironmentEpisodes(settings()).seed(index) for index in held]
    stored = parquet.read_table(recorded / "twins/meta/episodes/chunk-000/file-000.parquet")[
        "seed"
    ].to_pylist()
    assert stored == [seed for pair in range(25) for seed in [seeds[pair % 2]] * 2]
    originals = dict(zip(held, (rows_of(recorded)[index] for index in held), strict=True))
    twins = rows_of(recorded / "twins")
    for number, pair in enumerate(zip(twins[::2], twins[1::2], strict=True)):
        taken = [[row["action"] for row in each[:-1]] for each in pair]
        shared = next(step for step in range(len(taken[0])) if taken[0][step] != taken[1][step])
        assert shared <= HISTORY["twins"] and [len(each) - shared for each in taken] == [12, 12]
        # The history is a part of the recorded episode.
        told = [row["action"] for row in originals[held[number % 2]]]
        assert any(told[at : at + shared] == taken[0][:shared] for at in range(len(told)))


def test_nothing_trains_on_twins(recorded: Path) -> None:
    held, training = read_held_out(str(recorded))
    assert training is not None
    sources = [open_sources(data, CONFIG)["lerobot"] for data in (held, training)]
    assert [source.size for source in sources] == [2, 18]
    found = twins_of(held.sources["lerobot"])
    assert found is not None and found.weight == 0 and Path(found.path) == recorded / "twins"
    assert twins_of(replace(held.sources["lerobot"], path="somebody/dataset")) is None


def test_more_twins_are_added_and_the_same_ones_kept(tmp_path: Path, recorded: Path) -> None:
    folder = tmp_path / "set"
    for count in (5, 25):
        recording.record_environment(settings(), folder, 20, num_twins=count)
    assert rows_of(folder / "twins") == rows_of(recorded / "twins")


def test_a_table_of_clips_has_twins_too(tmp_path: Path) -> None:
    recording.record_environment(settings(), tmp_path / "set", 10, "clips", num_twins=3)
    (source,) = read_source(str(tmp_path / "set")).sources.values()
    columns = {field: column for field, column in source.columns.items() if field != "text"}
    reader = twin_reader(DataConfig({"mine": replace(source, columns=columns)}), CONFIG)
    assert reader is not None
    assert len(list(read_twins(reader, 9))) == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "ignores its seed"}, "Slide-v0 is not reproducible"),
        ({"kind": "shakes"}, "Slide-v0 is not reproducible"),
        ({"kind": "keys do nothing"}, "actions of Slide-v0 make no difference.*20 pairs"),
        ({"num_actions": 1}, "Slide-v0 has one action"),
    ],
)
def test_environments_without_twins_are_named_in_one_sentence(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said) as caught:
        recording.record_environment(settings(**changes), tmp_path / "set", 10, num_twins=30)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "set").exists()  # it is known before hours are spent


def test_what_an_environment_keeps_over_resets_does_not_part_its_twins(tmp_path: Path) -> None:
    folder = recording.record_environment(settings(kind="keeps a phase"), tmp_path / "set", 10, num_twins=5)
    assert len(rows_of(folder / "twins")) == 10


def test_branches_go_on_from_the_training_episodes(tmp_path: Path) -> None:
    folder = recording.record_environment(settings(), tmp_path / "set", 20)
    assert record_twins(folder, 12, budget_s=0.0, inside="branches") == recording.MIN_TWINS
    held = set(json.loads((folder / "meta" / "split.json").read_text())["held-out"])
    episodes = EnvironmentEpisodes(settings())
    seeds = [episodes.seed(index) for index in range(20) if index not in held]
    stored = parquet.read_table(folder / "branches/meta/episodes/chunk-000/file-000.parquet")["seed"]
    assert stored.to_pylist() == [seed for seed in seeds[:10] for _ in range(2)]
    longest = max(len(rows) - 1 for rows in rows_of(folder / "branches"))
    assert longest == HISTORY["branches"] + 12
    (source,) = read_source(str(folder)).sources.values()
    assert twins_of(source) is None and twins_of(source, "branches") is not None


def test_the_past_of_twins_is_as_long_as_what_the_model_remembers(recorded: Path) -> None:
    for history in (0, 3):
        reader = twin_reader(read_held_out(str(recorded))[0], replace(CONFIG, history_rounds=history))
        assert reader is not None
        pairs = list(read_twins(reader, 100))
        assert max(len(pair.done) for pair in pairs) == history
        for pair in pairs:
            assert len(pair.past) == 1 + len(pair.done)
            for before, action, after in zip(pair.past, pair.done, pair.past[1:], strict=False):
                assert np.abs(moved(before, action.keys[0]).astype(int) - after).mean() < 8


def test_wrong_numbers_of_twins_are_named(tmp_path: Path) -> None:
    for number, changes, said in (
        (10, {"num_twins": -1}, "num_twins is -1"),
        (10, {"num_twins": 1, "twin_steps": 0}, "0 steps"),
        (1, {"num_twins": 1}, "record 2 or more"),
    ):
        with pytest.raises(InputError, match=said):
            recording.record_environment(settings(), tmp_path / "set", number, **changes)


def test_futures_that_end_early_are_tried_again() -> None:
    """Half of all random futures of a step fall; those of ten steps nearly all do, so the longest is kept."""
    episodes = EnvironmentEpisodes(settings(kind="falls"))
    lengths = []
    for number in range(6):
        pair = [TwinEpisodes(episodes, [0, 1], 4, 16).episode(2 * number + which) for which in (0, 1)]
        taken = [[action.keys for action in each.actions] for each in pair]
        shared = next(step for step, (a, b) in enumerate(zip(*taken, strict=False)) if a != b)
        lengths.append(min(map(len, taken)) - shared)
    assert min(lengths) >= 1 and max(lengths) > 1


class Walk:
    """Worlds of a subject, played by a rule."""

    def __init__(self, frames: np.ndarray, kind: str) -> None:
        self.frames, self.kind = frames, kind

    def step(self, actions: Sequence[Action]) -> np.ndarray:
        rounds = zip(*(action.chunk or (action,) for action in actions), strict=True)
        return np.concatenate([self._one(each) for each in rounds], axis=1)

    def _one(self, actions: Sequence[Action]) -> np.ndarray:
        keys = [action.keys[0] for action in actions]
        if self.kind == "ignores":
            keys = ["right"] * len(keys)
        if self.kind == "reversed":
            keys = [KEYS[2 - KEYS.index(key)] for key in keys]
        true = np.stack([moved(*pair) for pair in zip(self.frames, keys, strict=True)])
        self.frames = true
        shown = true.astype(np.float64) * (1 - self.fade) + 40 * self.fade
        return shown.astype(np.uint8)[:, None]

    @property
    def fade(self) -> float:
        return 0.5 if self.kind == "fades" else 0.0


class Subject:
    """The simulator, or one of the wrong models."""

    def __init__(self, kind: str = "true") -> None:
        self.kind = kind

    def open(
        self, starts: np.ndarray, seeds: Sequence[int], actions: Sequence[Sequence[Action]] = ()
    ) -> Walk:
        return Walk(starts[:, -1] if starts.ndim == 5 else starts, self.kind)

    def reconstruct(self, clips: np.ndarray) -> np.ndarray:
        return clips

    def with_steps(self, num_inference_steps: int) -> "Subject":
        return self


def pairs_of(recorded: Path, config: WorldModelConfig = CONFIG) -> list[Twins]:
    reader = twin_reader(read_held_out(str(recorded))[0], config)
    assert reader is not None
    return list(read_twins(reader, 100))


@pytest.mark.parametrize(
    ("kind", "obeyed", "contrast", "error"),
    [
        ("true", (0.95, 1.0), (0.9, 1.1), (0.0, 0.15)),
        ("ignores", (0.0, 0.0), (0.0, 0.0), (0.5, 1.6)),
        ("reversed", (0.0, 0.35), (0.3, 1.6), (0.9, 2.0)),
        ("fades", (0.95, 1.0), (0.4, 0.6), (0.3, 0.8)),
    ],
)
def test_figures_tell_models_that_obey_from_others(
    recorded: Path,
    kind: str,
    obeyed: tuple[float, float],
    contrast: tuple[float, float],
    error: tuple[float, float],
) -> None:
    figures = twin_figures(Subject(kind), pairs_of(recorded))  # type: ignore[arg-type]
    assert [*figures] == ["obeyed", "contrast", "error_there"]
    for name, (low, high) in (("obeyed", obeyed), ("contrast", contrast), ("error_there", error)):
        assert [*figures[name]] == ["1", "5", "10"]
        for rows in figures[name].values():
            assert low <= rows["model"]["value"] <= high, name
            assert rows["model"]["n"] > 10
    for rows in figures["obeyed"].values():
        assert rows["copy"]["value"] == 0 and rows["codec"]["value"] == 1
    assert (
        figures["contrast"]["5"]["copy"]["value"] == 0 and figures["error_there"]["5"]["copy"]["value"] == 1
    )
    assert figures["error_there"]["5"]["codec"]["value"] == 0


@pytest.mark.parametrize("per_round", [2, 3])
def test_steps_are_actions_also_where_a_round_has_several(recorded: Path, per_round: int) -> None:
    takes = replace(CONFIG.action, per_round=per_round)
    pairs = pairs_of(recorded, replace(CONFIG, chunk_frames=per_round, action=takes))
    steps = (1, 5, 9)
    whole, single = (
        twin_figures(Subject("fades"), each, steps=steps)  # type: ignore[arg-type]
        for each in (pairs, [each.first(9) for each in pairs])
    )
    assert whole == single
    for name, (low, high) in {"obeyed": (0.95, 1.0), "contrast": (0.4, 0.6)}.items():
        assert [*whole[name]] == [str(step) for step in steps]
        for rows in whole[name].values():
            assert low <= rows["model"]["value"] <= high
    assert {len(clips) for pair in pairs for clips in pair.first(5).clips} == {-(-5 // per_round)}


def test_noise_obeys_by_chance() -> None:
    """Films of noise are as near to the own truth as to the other: about half of 400 pairs."""
    rng = np.random.default_rng(0)
    start, one, other = picture(8), moved(picture(8), "left"), moved(picture(8), "right")
    made, twin_made = (rng.integers(0, 255, (400, 1, SIDE, SIDE, 3), dtype=np.uint8) for _ in range(2))
    starts, actions = np.stack([start] * 400), [Action()] * 400
    truth, twin_truth = (np.stack([frame[None]] * 400) for frame in (one, other))
    twin = Played(starts, twin_made, twin_truth, actions)
    found = get_metric("obeyed")(Played(starts, made, truth, actions, twin=twin))
    figure = get_metric("obeyed").figure(found)
    assert figure["low"] < 0.5 < figure["high"] and figure["n"] == 400
    with pytest.raises(InputError, match="no twin futures"):
        get_metric("contrast")(Played(starts, made, truth, actions))


def test_what_compression_changes_is_no_difference() -> None:
    frame = np.full((2, SIDE, SIDE, 3), 100, np.uint8)
    other = frame.copy()
    other[0, :, :, 1] += MIN_DIFFERENCE - 1
    other[1, 0, : MIN_PIXELS - 1] += MIN_DIFFERENCE
    assert not where_differ(frame, other).any()
    other[1, 0, MIN_PIXELS - 1] += MIN_DIFFERENCE
    assert where_differ(frame, other).sum() == MIN_PIXELS and where_differ(frame, other)[1].any()


def test_whether_it_obeys_comes_first(recorded: Path) -> None:
    held, _ = read_held_out(str(recorded))
    made = DataSettings(None, 20, 10, data=str(recorded))
    suite = DataSuite(held, None, CONFIG, made)
    results = evaluate(Subject(), made, suite)  # type: ignore[arg-type]
    first, *others = results["tables"][0]["rows"]
    assert (first["title"], first["figure"]["value"]) == ("Obeyed, 1 step", 1)
    titles = [row["title"] for row in others]
    assert titles[:3] == ["Obeyed, 5 steps", "Obeyed, 10 steps", "Contrast of two futures, 1 step"]
    assert titles.index("Small things kept") < titles.index("PSNR, round 1")
    assert titles.index("PSNR, round 1") < titles.index("Own action nearer to the truth than another")
    assert results["tables"][1]["title"] == "Does it obey?"
    assert results["examples"][0]["figure"].startswith("twin futures") and results["examples"][0]["right"]
    # Without twins, the weaker tests come first.
    (table,) = DataSuite(read_source(str(recorded / "twins")), None, CONFIG, made).goals[:1]
    assert table.title == "Weaker than obeyed: own action nearer to the truth than another"


def test_only_what_was_recorded_on_this_machine_is_played_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings of a dataset name code."""
    folder = recording.record_environment(settings(), tmp_path / "set", 10)
    origin = origin_of(folder)
    assert origin is not None
    assert (origin.format, origin.num_episodes, origin.settings) == ("lerobot", 10, settings())
    assert record_twins(folder, 100, budget_s=0.0) == recording.MIN_TWINS
    assert len(rows_of(folder / "twins")) == 2 * recording.MIN_TWINS
    info = folder / "meta" / "info.json"
    before = info.read_text()
    info.write_text(before.replace('"random"', '"os:system"'))
    with pytest.raises(InputError, match="not recorded from an environment on this machine"):
        record_twins(folder, 100, budget_s=0.0)
    info.write_text(before)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert origin_of(folder) is None


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rounds", "per_round"), [("", "at once", 1), ("shows late", "after 3", 2)])
def test_new_records_twins_and_gives_slow_worlds_several_actions_in_a_round(
    kind: str,
    rounds: str,
    per_round: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(recipe.Machine, "measure", lambda: recipe.Machine("two cores", 0.2, 8 * 2**30))
    folder = recording.record_environment(settings(kind=kind), tmp_path / "set", 10)
    path = tmp_path / "made.yaml"
    assert main(["new", str(folder), "--out", str(path), "--twins", "12"]) == 0
    said = capsys.readouterr().out
    assert "twins      12 pairs of futures" in said and rounds in said
    assert "chance     the same actions led to the same frames at 40 of 40 moments" in said
    config = configs.load(path)
    assert twins_of(config.data.sources["held"]) is not None
    model = config.model
    assert model.state is not None and not model.state.has_code
    assert (model.action.per_round, model.chunk_frames, model.query_actions) == (per_round, per_round, True)
    assert model.codec.temporal_factor == 1


@pytest.mark.parametrize(("kind", "fewest", "most"), [("", 0, 0), ("is pushed by chance", 6, 10)])
def test_chance_is_found_by_playing_the_same_actions_again(
    kind: str, fewest: int, most: int, tmp_path: Path
) -> None:
    folder = recording.record_environment(settings(kind=kind), tmp_path / "set", 10)
    found, looked_at = recording.uncertain_moments(folder, 10, budget_s=60)
    assert fewest <= found <= most and looked_at == 10
    assert recording.uncertain_moments(folder, 10, budget_s=0)[1] == 1


def test_a_random_generator_that_cannot_be_replaced_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = recording.record_environment(settings(), tmp_path / "set", 10)
    monkeypatch.setattr(Slide, "np_random", property(lambda self: np.random.default_rng(0)))
    with pytest.raises(InputError, match=r"np_random\) of \S+ raised AttributeError"):
        recording.uncertain_moments(folder, 10, budget_s=60)


def test_new_gives_states_of_uncertain_worlds_a_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recipe.Machine, "measure", lambda: recipe.Machine("two cores", 0.2, 8 * 2**30))
    monkeypatch.setattr(recipe, "timed", lambda found, budget_s: found)
    folder = recording.record_environment(settings(kind="is pushed by chance"), tmp_path / "set", 10)
    path = tmp_path / "made.yaml"
    assert main(["new", str(folder), "--out", str(path), "--twins", "1", "--branches", "1"]) == 0
    assert "chance     the same actions led to other frames at " in capsys.readouterr().out
    uncertain = configs.load(path)
    assert uncertain.model.state and uncertain.model.state.has_code
    assert uncertain.stages["state"].objective_args == {"free_nats": recipe.FREE_NATS["state"]}
    assert uncertain.stages["rollout"].objective_args["free_nats"] == recipe.FREE_NATS["rollout"]


def test_new_says_what_twins_there_are_and_why_there_are_none(tmp_path: Path) -> None:
    folder = recording.record_environment(settings(), tmp_path / "set", 10)
    (source,) = read_source(str(folder)).sources.values()
    assert new._futures(source, "twins", 0, 60.0).startswith("none")
    assert new._futures(source, "twins", 12, 60.0).startswith("12 pairs")
    assert new._futures(source, "twins", 12, 60.0) == f"in {folder}/twins"
    other = recording.record_environment(settings(kind="ignores its seed"), tmp_path / "other", 10)
    (source,) = read_source(str(other)).sources.values()
    assert "none: Slide-v0 is not reproducible" in new._futures(source, "twins", 12, 60.0)
    assert new._futures(replace(source, kind="flow"), "twins", 12, 60.0).startswith("none")


def run_on(
    folder: Path, tmp_path: Path, make_model: Callable[..., WorldModel], tokenizer_folder: str
) -> TrainConfig:
    """A run of a codec stage and six steps of state alignment, validated every second step."""
    codec = replace(make_model().config.codec, temporal_factor=1)
    config = make_model(codec=codec, chunk_frames=1, fps=10, action=CONFIG.action, outcomes=True).config
    sources = {
        "mine": SourceConfig("lerobot", str(folder)),
        "held": SourceConfig("lerobot", str(folder), split="held-out", weight=0.0),
    }
    single = {"rounds": 1.0}
    stages = {
        "codec": StageConfig(
            "codec", steps=2, batch_size=2, rounds=1, tasks=single, train={"codec": TrainedConfig()}
        ),
        "state": StageConfig(
            "state", steps=6, batch_size=3, rounds=2, tasks=single, ema_decay=0.9,
            train={"backbone": TrainedConfig(), "adapters": TrainedConfig()},
        ),
    }  # fmt: skip
    return TrainConfig(
        model=config,
        stages=stages,
        data=DataConfig(sources),
        validation=ValidationConfig("held", every=2, batches=1, twins=4, codec_frames=16),
        tokenizer=tokenizer_folder,
        run_dir=str(tmp_path / "run"),
        precision="fp32",
        log_every=1,
        sample_every=0,
    )


@pytest.mark.slow
def test_the_checkpoint_that_obeys_best_is_kept(
    recorded: Path, tmp_path: Path, make_model: Callable[..., WorldModel], tokenizer_folder: str
) -> None:
    config = run_on(recorded, tmp_path, make_model, tokenizer_folder)
    run = finetune.train(config).parent
    metrics = read_metrics(run)
    assert not any("validation/obeyed" in line for line in metrics["codec"].values())
    (kept,) = [line["codec/contrast"] for line in metrics["codec"].values() if "codec/contrast" in line]
    assert 0 < kept < 1  # two steps of training leave little of it
    found = {step: line for step, line in metrics["state"].items() if "validation/loss" in line}
    assert found.keys() == {2, 4, 6}
    for line in found.values():
        assert 0 <= line["validation/obeyed"] <= 1 and line["validation/error_there"] > 0
        assert line["validation/contrast"] >= 0
    best = checkpointer.load(run / "checkpoints" / "best", {})
    scores = {step: validation.criterion(line) for step, line in found.items()}
    assert (best["step"], best["validation_loss"]) == min(scores.items(), key=lambda item: item[1])
    # Playing changes nothing of the training: without twins, the same losses.
    without = replace(config, validation=replace(config.validation, twins=0), run_dir=str(tmp_path / "other"))
    others = read_metrics(finetune.train(without).parent)["state"]
    assert not any("validation/obeyed" in line for line in others.values())
    for step, line in metrics["state"].items():
        assert others[step]["rounds/loss"] == line["rounds/loss"]


def test_what_the_best_checkpoint_has_least_of() -> None:
    """A share that is not obeyed counts, and a fading actor among worlds that obey alike."""
    loss = {"validation/loss": 0.2}
    assert validation.criterion(loss) == 0.2
    obeys, fades, ignores = (
        loss | {"validation/obeyed": obeyed, "validation/error_there": error}
        for obeyed, error in ((1.0, 0.1), (1.0, 0.6), (0.5, 0.8))
    )
    scores = [validation.criterion(each) for each in (obeys, fades, ignores)]
    assert scores == sorted(scores) and scores[0] == pytest.approx(0.1)
    with pytest.raises(ConfigError, match="twins of validation is -1"):
        ValidationConfig(twins=-1)
