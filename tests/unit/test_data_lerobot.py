"""LeRobot datasets as a source: actions belong to their frames, files are opened once, damage is named."""

import dataclasses
import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import huggingface_hub
import numpy as np
import pyarrow as pa
import pytest
from fsspec.config import conf as fsspec_config
from gymnasium import spaces
from hub import DATASET, serve_hub
from pyarrow import parquet

from worldmodel import recording
from worldmodel.actions import Action
from worldmodel.config import (
    ActionConfig,
    ActionSpec,
    CodecConfig,
    DataConfig,
    SourceConfig,
    TrainConfig,
    WorldModelConfig,
    build,
    to_dict,
)
from worldmodel.data.argument import read_held_out, read_source
from worldmodel.data.examiner import examine, open_examined
from worldmodel.data.facts import read_facts
from worldmodel.data.lerobot import LeRobotDataset, LeRobotSource, _numbers, with_action_spec
from worldmodel.data.recording import check_specs
from worldmodel.data.sources import open_source
from worldmodel.episodes import Episode
from worldmodel.errors import ConfigError, InputError
from worldmodel.media import shared_video
from worldmodel.media.shared_video import SharedVideo
from worldmodel.models.loading.model_card import action_section
from worldmodel.recording import lerobot
from worldmodel.recording.episode import RecordedEpisode, RecordingFormat
from worldmodel.recording.settings import EnvironmentSettings
from worldmodel.worlds import get_world

KEYS = ("action_0", "action_1", "action_2")
STEP = 10
"""Grey values by which action `i` brightens the picture, times i + 1."""


class Brighten(gymnasium.Env):
    """The picture tells which actions were taken: action i adds (i + 1) * STEP to its grey value."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    action_space = spaces.Discrete(3)
    observation_space = spaces.Box(0, 1, (1,))

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.grey = int(self.np_random.integers(8, 20))
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.grey += (int(action) + 1) * STEP
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def render(self) -> np.ndarray:
        return np.full((64, 64, 3), self.grey, np.uint8)


if "Brighten-v0" not in gymnasium.registry:
    gymnasium.register("Brighten-v0", Brighten)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six episodes of seven steps in three files; tests must not change it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lerobot, "EPISODES_PER_FILE", 2)
        made = EnvironmentSettings("Brighten-v0", max_steps=7)
        return recording.record_environment(made, tmp_path_factory.mktemp("lerobot") / "set", 6)


def model(**changes: Any) -> WorldModelConfig:
    settings = {"fps": 20, "chunk_frames": 2, "action": ActionConfig(keys=KEYS), **changes}
    return WorldModelConfig(**{"codec": CodecConfig(image_size=32), **settings})


def opened(path: Path, **changes: Any) -> LeRobotSource:
    data = DataConfig({"mine": SourceConfig("lerobot", str(path))})
    source = open_source("mine", data, model(**changes))
    assert isinstance(source, LeRobotSource)
    return source


def greys(episode: Episode) -> list[float]:
    return [float(clip[-1].mean()) for clip in episode.observations]


def test_every_action_leads_from_its_frame_to_the_next(dataset: Path) -> None:
    source = opened(dataset)
    assert (source.size, source.tasks) == (6, ("rounds", "inverse"))
    seen = set()
    for index in [*range(6), 3, 0, 5, *range(6, 30)]:
        episode = source.at(index).episode("rounds", 1, index, 3)
        assert [len(clip) for clip in episode.observations] == [1, 2, 2, 2]
        shown = greys(episode)
        for before, action, after in zip(shown, episode.actions, shown[1:], strict=False):
            assert after - before == pytest.approx(STEP * (KEYS.index(action.keys[0]) + 1), abs=2)
        seen.add((index % 6, round(shown[0])))
    assert len(seen) > 12  # episodes begin at random steps
    whole = source.at(0).episode("rounds", 0, 0, 99)
    assert len(whole.actions) == 7
    assert source.cost(0, 99) == 7 and source.cost(0, 2) == 2


def test_a_video_file_is_opened_once(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = shared_video.__globals__
    shared["_shared"].cache_clear()
    calls, real = [], shared["SharedVideo"]
    monkeypatch.setitem(shared, "SharedVideo", lambda path: calls.append(path) or real(path))
    source = opened(dataset)
    for index in range(24):
        source.at(index).episode("rounds", 1, index, 2)
    assert len(calls) == len(set(calls)) == 3


def test_a_dataset_on_the_hub_is_read_piece_by_piece(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = shared_video.__globals__
    shared["_shared"].cache_clear()
    calls, real = [], shared["SharedVideo"]
    paths = [path for path in dataset.rglob("*") if path.is_file()]
    files = {str(path.relative_to(dataset)): path.read_bytes() for path in paths}
    videos = sorted(name for name in files if name.endswith(".mp4"))
    with serve_hub(files) as hub:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # CI forbids the real one
        monkeypatch.setitem(fsspec_config, "hf", {"endpoint": hub.endpoint, "token": False})
        monkeypatch.setitem(shared, "SharedVideo", lambda path: calls.append(path) or real(path))
        there, here = opened(Path(f"{DATASET}@v3.0")), opened(dataset)
        assert (there.size, there.tasks) == (here.size, here.tasks)
        assert all(name.startswith("meta/") for name, _ in hub.reads), "only the index"
        for index in range(12):
            far, near = (source.at(index).episode("rounds", 0, index, 3) for source in (there, here))
            assert far.actions == near.actions
            assert len(far.observations) == len(near.observations)
            assert all(map(np.array_equal, far.observations, near.observations))
        remote = sorted(path for path in calls if path.startswith("hf://"))
        assert remote == [f"hf://datasets/{DATASET}@v3.0/{name}" for name in videos]
        assert sorted(name for name, _ in hub.reads if name in videos) == videos, "each is read once"
        assert hub.revisions == {"v3.0"}
        with pytest.raises(ConfigError, match="FileNotFoundError"):
            opened(Path("owner/other"))
    shared["_shared"].cache_clear()


@pytest.mark.parametrize(("memory", "reads"), [(2**28, 3), (2 * 16 * 36, 12), (0, 12)])
def test_actions_of_data_files_are_kept_as_far_as_they_fit(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, memory: int, reads: int
) -> None:
    """A row has three keys, a reward and an end in 4 bytes each, and two numbers in 8."""
    monkeypatch.setattr("worldmodel.data.lerobot.MAX_BYTES", memory)
    source = opened(dataset)
    for index in (0, 2, 4) * 4:
        source.at(index)
    assert source.dataset.actions.cache_info().misses == reads


def test_a_video_file_is_closed_with_its_last_reference(dataset: Path) -> None:
    shared = SharedVideo(str(next(dataset.rglob("*.mp4"))))
    assert len(shared.read(32, [0.0, 0.2])) == 2
    file = shared.file
    gc.disable()
    try:
        del shared
        assert file.closed
    finally:
        gc.enable()


def test_a_recording_of_words_has_them_as_tasks(tmp_path: Path) -> None:
    get_world("shapes").record(tmp_path / "set", 2, rounds=2, format="lerobot")
    get_world("shapes").record(tmp_path / "clips", 2, rounds=2)
    shapes = dataclasses.replace(model(), fps=8, chunk_frames=8)
    sources = {
        "set": SourceConfig("lerobot", str(tmp_path / "set")),
        "clips": SourceConfig(
            "clips", str(tmp_path / "clips" / "clips.jsonl"), columns={"video": "path", "text": "text"}
        ),
    }
    takes = dataclasses.replace(shapes, action=ActionConfig())
    ours, theirs = (open_source(name, DataConfig(sources), takes) for name in sources)
    for index in range(2):
        one, other = (each.at(index).episode("rounds", 0, index, 2) for each in (ours, theirs))
        assert one.actions == other.actions
        assert np.abs(one.observations[1].astype(int) - other.observations[1]).mean() < 1


def changed(dataset: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Copy a dataset and change its `meta/info.json`."""
    shutil.copytree(dataset, folder)
    info = json.loads((folder / "meta" / "info.json").read_text())
    change(info)
    (folder / "meta" / "info.json").write_text(json.dumps(info))
    return folder


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["x", "y", "grip"], ["x", "y", "grip"]),
        ({"motors": ["x", "y"], "hand": ["grip"]}, ["x", "y", "grip"]),
        ({"y": 1, "grip": 2, "x": 0}, ["x", "y", "grip"]),
        (None, ["action_0", "action_1", "action_2"]),
    ],
)
def test_actions_are_named_in_several_layouts(
    dataset: Path, tmp_path: Path, names: Any, found: list[str]
) -> None:
    def foreign(info: dict[str, Any]) -> None:
        del info["worldmodel"]
        info["features"]["action"]["names"] = names

    specs = LeRobotDataset(str(changed(dataset, tmp_path / "set", foreign))).specs
    assert [(spec.name, spec.kind, spec.rate) for spec in specs] == [(name, "vector", 10) for name in found]


@pytest.mark.parametrize(("fps", "chunk_frames"), [(10, 2), (20, 4)])
def test_a_round_without_numbers_has_the_rewards_of_its_time(
    dataset: Path, tmp_path: Path, fps: int, chunk_frames: int
) -> None:
    def counted(row: dict[str, Any]) -> None:
        row["next.reward"] = float(row["frame_index"])

    folder = edited(dataset, tmp_path / "set", "data/*/*.parquet", counted)
    words = opened(folder, fps=fps, chunk_frames=chunk_frames, action=ActionConfig())
    whole = words.at(0).episode("rounds", 0, 0, 9)
    assert [outcome.reward for outcome in whole.outcomes] == [0 + 1, 2 + 3, 4 + 5]
    parts = [words.at(0).episode("rounds", 0, index, 1).outcomes[0].reward for index in range(20)]
    starts = [(reward - 1) / 2 for reward in parts]  # the first of two steps in a row
    assert set(starts) <= ({0, 1, 2, 3, 4, 5} if fps == 10 else {0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5})


def test_an_action_spec_without_a_rate_has_one_action_a_row(dataset: Path, tmp_path: Path) -> None:
    def unrated(info: dict[str, Any]) -> None:
        for spec in info["worldmodel"]["action_spec"]:
            spec["rate"] = 0.0

    folder = changed(dataset, tmp_path / "set", unrated)
    assert len(opened(folder).at(0).episode("rounds", 0, 0, 9).actions) == 7
    slower = opened(folder, fps=10, chunk_frames=2).at(0).episode("rounds", 0, 0, 9)
    assert len(slower.actions) == 3  # each the first of two


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([[1, 2], [3, 4]], [[1, 2], [3, 4]]),
        ([[True, False], [False, True]], [[1, 0], [0, 1]]),
        ([[[1.5], [2.5]], [[3.5], [4.5]]], [[1.5, 2.5], [3.5, 4.5]]),
        ([3, 4], [[3], [4]]),
        ([True, False], [[1], [0]]),
        ([0.5, None], [[0.5], [np.nan]]),
    ],
)
def test_columns_of_any_numbers_are_read(values: list[Any], wanted: list[list[float]]) -> None:
    whole = pa.array(values)
    column = pa.chunked_array([whole[:1], whole[1:]])
    if pa.types.is_list(column.type):
        wide = pa.list_(column.type.value_type, 2)
        assert np.array_equal(_numbers(column.cast(wide)), wanted)
    found = _numbers(column)
    assert found.dtype == np.float32 and np.array_equal(found, wanted, equal_nan=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action": ActionConfig(keys=("action_0",))}, "the keys action_1, action_2"),
    ],
)
def test_models_that_do_not_fit(dataset: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(dataset, **changes)


def test_the_remedy_for_another_rate_of_actions_has_numbers() -> None:
    specs = [ActionSpec("left", "key", low=0, high=1, rate=8.0)]
    takes = WorldModelConfig(fps=8, chunk_frames=8, action=ActionConfig(keys=("left",)))
    with pytest.raises(ConfigError, match=r"action\.per_round to 8 or model\.fps to 64"):
        check_specs("data.sources.mine", specs, takes)
    check_specs("data.sources.mine", specs, dataclasses.replace(takes, fps=64))


def counted(folder: Path, fps: float, steps: int = 80) -> Path:
    """An episode whose frames have the grey value 3 times their number, and whose rewards are that number."""
    frames = np.arange(steps + 1, dtype=np.uint8)[:, None, None, None] * 3 * np.ones((64, 64, 3), np.uint8)
    numbers = np.eye(3, dtype=np.float32)[np.arange(steps) % 3]
    specs = tuple(ActionSpec(name, "key", rate=fps) for name in KEYS)
    actions = tuple(Action.of_numbers(specs, row) for row in numbers)
    made = RecordedEpisode({"render": frames}, actions, numbers, np.arange(steps, dtype=np.float32), True)
    store = lerobot.LeRobotStore(folder, RecordingFormat(fps, specs, {}))  # type: ignore[arg-type]
    store.write(made)
    store.finish()
    return folder


@pytest.mark.parametrize("fps", [9.96, 10.04])
def test_a_rate_near_a_whole_number_counts_as_it(tmp_path: Path, fps: float) -> None:
    """Half a percent is a frame of ten seconds at 20 frames per second, yet each frame has its own action."""
    path = counted(tmp_path / "set", fps)
    source = opened(path, fps=10, chunk_frames=1, codec=CodecConfig(image_size=32, temporal_factor=1))
    assert source.dataset.fps == 10 and [spec.rate for spec in source.dataset.specs] == pytest.approx(
        [10] * 3
    )
    episode = source.at(0).episode("rounds", 0, 0, 999)
    assert np.abs(np.array(greys(episode)) - 3 * np.arange(81)).max() < 2
    assert [outcome.reward for outcome in episode.outcomes] == list(range(80))
    facts = read_facts(str(path), tmp_path / "world.yaml")
    assert (facts.fps, facts.chunk_frames) == (10, 1)
    found = examine(open_examined(str(path))).report()
    assert (found.fps, found.lengths, found.broken) == (10, [80], [])


@pytest.mark.parametrize("fps", [0.0, -5.0, float("nan")])
def test_rates_that_are_none_are_refused(dataset: Path, tmp_path: Path, fps: float) -> None:
    path = changed(dataset, tmp_path / "set", lambda info: info.update(fps=fps))
    for opener in (opened, lambda path: open_examined(str(path)), lambda path: read_facts(str(path), path)):
        with pytest.raises(ConfigError, match="frames per second"):
            opener(path)


def edited(dataset: Path, folder: Path, pattern: str, edit: Callable[[dict[str, Any]], Any]) -> Path:
    """Copy a dataset and change the rows of one of its tables."""
    shutil.copytree(dataset, folder)
    path = next(iter(sorted(folder.glob(pattern))))
    table = parquet.read_table(path)
    kept = [row for row in map(lambda row: edit(row) or row, table.to_pylist()) if row]
    parquet.write_table(pa.Table.from_pylist(kept, table.schema), path)
    return folder


def test_episodes_that_cannot_be_used(dataset: Path, tmp_path: Path) -> None:
    def shorter(row: dict[str, Any]) -> None:
        row["length"] -= row["episode_index"] == 0

    def one_frame(row: dict[str, Any]) -> None:
        if row["episode_index"] == 1:
            key = "videos/observation.images.render"
            row[f"{key}/to_timestamp"] = row[f"{key}/from_timestamp"] + 0.1
            row["length"] = 1
            row["dataset_to_index"] = row["dataset_from_index"] + 1

    def not_finite(row: dict[str, Any]) -> None:
        if row["index"] == 2:
            row["action"][0] = float("nan")

    for name, pattern, edit, index, message in (
        ("a", "meta/episodes/*/*.parquet", shorter, 0, "7 rows of 8|7 actions and 8 frames"),
        ("b", "meta/episodes/*/*.parquet", one_frame, 1, "it has one frame"),
        ("c", "data/*/*.parquet", not_finite, 0, "not a finite number"),
    ):
        source = opened(edited(dataset, tmp_path / name, pattern, edit))
        with pytest.raises(InputError, match=rf"{name} episode {index}: .*{message}"):
            source.at(index).episode("rounds", 0, index, 1)
        assert source.at(3).episode("rounds", 0, 3, 1).actions
    gone = tmp_path / "d"
    shutil.copytree(dataset, gone)
    next(gone.rglob("*.mp4")).unlink()
    with pytest.raises(InputError, match=r"file-000\.mp4"):
        opened(gone).at(0).episode("rounds", 0, 0, 1)


def test_folders_that_are_no_datasets(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read as a LeRobot dataset"):
        opened(tmp_path)
    with pytest.raises(ConfigError, match="there is no"):  # and the Hub is not asked
        opened(tmp_path / "none")
    old = tmp_path / "old"
    shutil.copytree(dataset, old)
    info = json.loads((old / "meta/info.json").read_text())
    (old / "meta/info.json").write_text(json.dumps(info | {"codebase_version": "v1.6"}))
    with pytest.raises(ConfigError, match=r"version v1\.6"):
        opened(old)
    (old / "meta/info.json").write_text(json.dumps(info | {"video_path": "../../{video_key}.mp4"}))
    with pytest.raises(ConfigError, match="leaves the folder"):
        opened(old)
    data = DataConfig({"mine": SourceConfig("lerobot", str(dataset), columns={"video": "left"})})
    with pytest.raises(
        ConfigError, match=r"columns\.video is 'left'; use one of observation\.images\.render"
    ):
        open_source("mine", data, model())
    info["features"]["observation.images.render"]["dtype"] = "float32"
    (old / "meta/info.json").write_text(json.dumps(info))
    with pytest.raises(ConfigError, match="no camera"):
        opened(old)


def test_a_model_states_what_the_actions_of_its_data_mean(dataset: Path) -> None:
    sources = {"mine": SourceConfig("lerobot", str(dataset))}
    config = with_action_spec(TrainConfig(model=model(), data=DataConfig(sources)))
    spec = config.model.action.spec
    assert [(each.name, each.kind, each.rate) for each in spec] == [(key, "key", 10) for key in KEYS]
    again = build(WorldModelConfig, to_dict(config.model))
    assert list(again.action.spec) == list(spec)
    assert with_action_spec(config) is config
    assert "| action_1 | key | 0 to 1 |" in "\n".join(action_section(spec))
    other = dataclasses.replace(spec[0], unit="rad")
    with pytest.raises(ConfigError, match="action_0 with unit '', and the model with 'rad'"):
        opened(dataset, action=ActionConfig(keys=KEYS, spec=(other, *spec[1:])))


def test_a_recording_in_place_of_another_is_read_anew(tmp_path: Path) -> None:
    starts = []
    for seed in range(3):
        shutil.rmtree(tmp_path / "set", ignore_errors=True)
        made = EnvironmentSettings("Brighten-v0", max_steps=7, seed=seed)
        episode = (
            opened(recording.record_environment(made, tmp_path / "set", 1)).at(0).episode("rounds", 0, 0, 99)
        )
        shown = greys(episode)
        for before, action, after in zip(shown, episode.actions, shown[1:], strict=False):
            assert after - before == pytest.approx(STEP * (KEYS.index(action.keys[0]) + 1), abs=2)
        starts.append(round(shown[0]))
    assert len(set(starts)) > 1


@pytest.mark.parametrize(
    "text", ["[", "{}", "[]", '{"held-out": 3}', '{"held-out": ["x"]}', '{"held-out": [6]}']
)
def test_a_damaged_split_is_one_clear_error(dataset: Path, tmp_path: Path, text: str) -> None:
    copied = shutil.copytree(dataset, tmp_path / "set")
    (copied / "meta" / "split.json").write_text(text)
    with pytest.raises(ConfigError, match="worldmodel data split"):
        opened(copied)


@pytest.mark.parametrize("damage", ["list", "null", "short"])
def test_a_damaged_info_is_one_clear_error(dataset: Path, tmp_path: Path, damage: str) -> None:
    copied = shutil.copytree(dataset, tmp_path / "set")
    info = json.loads((copied / "meta" / "info.json").read_text())
    if damage == "short":
        info["worldmodel"]["action_spec"].pop()
    changed = {"list": [], "null": info | {"features": None}, "short": info}[damage]
    (copied / "meta" / "info.json").write_text(json.dumps(changed))
    with pytest.raises(ConfigError, match="cannot be read as a LeRobot dataset"):
        opened(copied)


def test_a_lerobot_dataset_is_evaluated_on_what_it_holds_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "info.json").write_text("{}")
    whole = DataConfig({"lerobot": SourceConfig("lerobot", str(tmp_path))})
    assert read_source(str(tmp_path)) == read_source(f"lerobot:{tmp_path}") == whole
    assert read_held_out(str(tmp_path)) == (whole, None)
    (tmp_path / "meta" / "split.json").write_text('{"held-out": [0]}')
    held = DataConfig({"lerobot": SourceConfig("lerobot", str(tmp_path), split="held-out")})
    assert read_held_out(str(tmp_path)) == (held, whole)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_held_out("lerobot:~") == (held, whole)  # shells expand no ~ after a colon
