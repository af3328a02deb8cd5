"""`worldmodel new`: its configs load, fit the data and the time, and can be trained."""

import json
import tarfile
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from worldmodel import config as configs
from worldmodel import media
from worldmodel.actions import Action, action_kind
from worldmodel.cli import main, new
from worldmodel.config import (
    ActionConfig,
    ActionSpec,
    CodecConfig,
    DataConfig,
    TrainConfig,
    WorldModelConfig,
    build,
)
from worldmodel.data.columns import track_of
from worldmodel.data.examiner import open_examined
from worldmodel.data.facts import read_facts
from worldmodel.data.lerobot import with_action_spec
from worldmodel.data.sources import open_sources
from worldmodel.errors import ConfigError, InputError
from worldmodel.models.world_model import WorldModel
from worldmodel.recording.clip_table import ClipTableStore
from worldmodel.recording.episode import RecordedEpisode, RecordingFormat
from worldmodel.recording.lerobot import LeRobotStore
from worldmodel.train import finetune, recipe
from worldmodel.train.run.log import read_metrics
from worldmodel.train.run.settings import check_stages

KEYS = tuple(ActionSpec(name, "key", rate=10) for name in ("left", "right", "jump"))
VECTORS = (ActionSpec("gas", low=0, high=2, rate=5), ActionSpec("wheel", low=-1, high=1, rate=5))
MACHINE = recipe.Machine("two cores", tflops=0.2, memory=8 * 2**30)


timed = recipe.timed


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe.Machine, "measure", lambda: MACHINE)
    monkeypatch.setattr(recipe, "timed", lambda found, budget_s: found)  # minutes, with models of this size


def recorded(
    folder: Path, specs: tuple[ActionSpec, ...], fps: int, side: int = 48, episodes: int = 10
) -> str:
    """Random episodes of 12 steps."""
    store = LeRobotStore(folder, RecordingFormat(fps, specs, {}))
    for seed in range(episodes):
        rng = np.random.default_rng(seed)
        numbers = rng.integers(0, 2, (12, len(specs))).astype(np.float32)
        frames = rng.integers(0, 255, (13, side, side, 3), dtype=np.uint8)
        actions = tuple(Action.of_numbers(specs, row) for row in numbers)
        rewards = np.zeros(12, np.float32)
        store.write(RecordedEpisode({"render": frames}, actions, numbers, rewards, truncated=True, seed=seed))
    store.finish()
    return str(folder)


def table(folder: Path, rows: list[dict[str, object]]) -> str:
    """A table of clips of two seconds at 8 fps."""
    folder.mkdir()
    frames = np.random.default_rng(0).integers(0, 255, (17, 64, 96, 3), dtype=np.uint8)
    media.write_video(frames, folder / "clip.mp4", 8, scale=1)
    lines = [json.dumps({"video": "clip.mp4", **row}) for row in rows]
    (folder / "clips.jsonl").write_text("\n".join(lines))
    return str(folder)


def made(dataset: str, tmp_path: Path, *options: str) -> TrainConfig:
    """The config that the command writes, which can be opened."""
    path = tmp_path / "made.yaml"
    assert main(["new", dataset, *options, "--out", str(path), "--force"]) == 0
    config = configs.load(path)
    check_stages(config)
    for source in open_sources(config.data, config.model).values():
        assert source.size
        source.close()
    return config


def test_one_step_with_keys_is_one_round_of_a_frame(tmp_path: Path) -> None:
    model = made(recorded(tmp_path / "set", KEYS, 10), tmp_path).model
    assert (model.fps, model.chunk_frames, model.codec.temporal_factor) == (10, 1, 1)
    assert (model.action.keys, model.action.text) == (("left", "right", "jump"), False)
    assert model.codec.image_size == 48


def test_a_world_waits_for_actions_if_no_recorded_round_is_without_one(tmp_path: Path) -> None:
    assert read_facts(recorded(tmp_path / "some", KEYS, 10), tmp_path / "world.yaml").pace == "realtime"
    assert (
        read_facts(recorded(tmp_path / "vectors", VECTORS, 10), tmp_path / "world.yaml").pace == "on_action"
    )
    store = LeRobotStore(tmp_path / "every", RecordingFormat(10, KEYS, {}))
    numbers = np.eye(3, dtype=np.float32)[[0, 1, 2, 0]]
    actions = tuple(Action.of_numbers(KEYS, row) for row in numbers)
    frames = np.zeros((5, 48, 48, 3), np.uint8)
    rewards = np.zeros(4, np.float32)
    for seed in range(2):
        store.write(RecordedEpisode({"render": frames}, actions, numbers, rewards, truncated=True, seed=seed))
    store.finish()
    assert made(str(tmp_path / "every"), tmp_path).model.pace == "on_action"
    for pressed, pace in (([["a"], ["b"]], "on_action"), ([["a"], []], "realtime")):
        rows: list[dict[str, object]] = [{"text": "play", "keys": pressed}] * 2
        assert read_facts(table(tmp_path / pace, rows), tmp_path / f"{pace}.yaml").pace == pace


@pytest.mark.slow
def test_large_frames_have_as_many_queries_as_small_ones(tmp_path: Path) -> None:
    path = recorded(tmp_path / "set", KEYS, 10, side=260)
    for size, merge in (("64", 2), ("128", 4), ("256", 8)):
        model = made(path, tmp_path, "--size", size).model
        assert (model.codec.image_size, model.query_merge, model.num_queries) == (int(size), merge, 16)
        assert model.vision.merge == merge


@pytest.mark.slow
def test_frames_whose_cells_can_be_merged_keep_their_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tile of such a game can be a latent cell, which it is not in frames of another size."""
    path = recorded(tmp_path / "set", KEYS, 10, side=72)
    model = made(path, tmp_path, "--size", "72").model
    assert (model.codec.image_size, model.query_merge, model.vision.merge) == (72, 3, 3)
    assert "scaled" not in capsys.readouterr().out
    assert made(path, tmp_path).model.codec.image_size == 64
    assert "64 x 64 pixels, scaled" in capsys.readouterr().out
    eleven = made(recorded(tmp_path / "eleven", KEYS, 10, side=88), tmp_path, "--size", "88").model
    assert (eleven.codec.image_size, eleven.query_merge, eleven.vision.merge) == (80, 2, 2)


def test_vectors_have_their_bounds_and_rate(tmp_path: Path) -> None:
    model = made(recorded(tmp_path / "set", VECTORS, 10, side=70), tmp_path).model
    assert (model.fps, model.chunk_frames, model.codec.temporal_factor) == (10, 2, 2)
    assert (model.action.vector.names, model.action.keys) == (("gas", "wheel"), ())
    assert (model.action.vector.low, model.action.vector.high) == ((0, -1), (2, 1))
    assert model.codec.image_size == 64


def recorded_table(folder: Path) -> str:
    """A clip table of two episodes of six actions, each of two frames, with the meaning of the actions."""
    meant = tuple(replace(each, unit="N", scale=2.0, frame="body") for each in VECTORS)
    store = ClipTableStore(folder, RecordingFormat(10, meant, {}, frames_per_action=2))
    frames = np.random.default_rng(0).integers(0, 255, (13, 48, 48, 3), dtype=np.uint8)
    numbers = np.random.default_rng(1).random((6, 2), np.float32)
    actions = tuple(Action.of_numbers(meant, row) for row in numbers)
    rewards = np.arange(6, dtype=np.float32)
    for ended in (True, False):
        store.write(RecordedEpisode({"render": frames}, actions, numbers, rewards, ended, not ended))
    return str(folder)


def test_a_recorded_table_keeps_rewards_and_the_meaning_of_actions(tmp_path: Path) -> None:
    path = recorded_table(tmp_path / "set")
    config = made(path, tmp_path)
    model = config.model
    assert (model.outcomes, model.fps, model.chunk_frames) == (True, 10, 2)
    assert [(each.name, each.unit, each.scale, each.frame, each.rate) for each in model.action.spec] == [
        ("gas", "N", 2.0, "body", 5),
        ("wheel", "N", 2.0, "body", 5),
    ]
    sources = open_sources(config.data, model)
    for index in range(8):  # from any frame, a round has the rewards of whole actions
        for source in sources.values():
            episode = source.at(0).episode("rounds", 0, index, 2)
            first = episode.outcomes[0].reward
            assert [outcome.reward for outcome in episode.outcomes] == [first, first + 1]
    (ends,) = ([each.ended for each in sources["held"].at(0).episode("rounds", 0, 0, 9).outcomes],)
    assert ends[:-1] == [False] * 5
    # Without a spec, the model takes that of the recording; with another, or another rate, it is refused.
    plain = replace(config, model=replace(model, action=replace(model.action, spec=())))
    assert with_action_spec(plain).model.action.spec == model.action.spec
    other = replace(model.action, spec=(replace(model.action.spec[0], unit="m"), model.action.spec[1]))
    for wrong, named in ((replace(model, action=other), "unit"), (replace(model, fps=20), "per second")):
        with pytest.raises(ConfigError, match=named):
            open_sources(config.data, wrong)


@pytest.mark.slow
def test_clips_with_words_and_with_keys_per_round(tmp_path: Path) -> None:
    words = made(table(tmp_path / "words", [{"text": f"act {i}"} for i in range(4)]), tmp_path).model
    assert words.action.text is not False
    assert (words.action.keys, words.chunk_frames, words.fps) == ((), 8, 8)
    assert words.codec.image_size == (48, 64)
    rows = [{"text": "play", "keys": [["a"], ["b", "a"], [], ["a"]]}] * 4
    keys = made(table(tmp_path / "keys", rows), tmp_path).model  # type: ignore[arg-type]
    assert (keys.action.text, keys.action.keys, keys.chunk_frames, keys.fps) == (False, ("a", "b"), 4, 8)


def test_clips_without_a_table_are_taken(tmp_path: Path) -> None:
    """Folders of numbered images and videos, tar files, and tables that a preset reads."""
    frames = np.random.default_rng(0).integers(0, 255, (24, 48, 64, 3), dtype=np.uint8)
    for name in ("one", "two"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number, frame in enumerate(frames):
            media.write_image(Image.fromarray(frame), tmp_path / "images" / name / f"{number:04}.png")
    config = made(str(tmp_path / "images"), tmp_path)
    assert (config.model.fps, config.model.chunk_frames) == (8, 8)
    assert config.model.codec.image_size == (48, 64)
    for source in open_sources(config.data, config.model).values():
        episode = source.at(0).episode("rounds", 0, 0, 2)
        assert source.size == 1 and [len(each) for each in episode.observations] == [1, 8, 8]

    media.write_video(frames, tmp_path / "clip.mp4", 8, scale=1)
    with tarfile.open(tmp_path / "clips.tar", "w") as tar:
        for number in range(3):
            tar.add(tmp_path / "clip.mp4", f"{number}.mp4")
            (tmp_path / "a.json").write_text(json.dumps({"keys": [["a"], ["b"]][: 2 - number % 2] * 2}))
            tar.add(tmp_path / "a.json", f"{number}.json")
    facts = read_facts(str(tmp_path / "clips.tar"), tmp_path / "tar.yaml")
    assert (facts.train.kind, facts.held, facts.num_episodes) == ("webdataset", None, 3)
    assert (facts.action["keys"], facts.chunk_frames) == (["a", "b"], 6)

    row = {"video": "clip.mp4", "caption": "it flickers", "aesthetic score": 1, "motion score": 1}
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "clips.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    (tmp_path / "open" / "clip.mp4").write_bytes((tmp_path / "clip.mp4").read_bytes())
    facts = read_facts(str(tmp_path / "open"), tmp_path / "open.yaml")
    assert facts.held and facts.train.preset == facts.held.preset == "openvid"
    model = WorldModelConfig(action=build(ActionConfig, dict(facts.action)), fps=8, chunk_frames=8)
    (source,) = open_sources(DataConfig({"mine": facts.train}), model).values()
    assert source.at(0).texts == ("it flickers",)


@pytest.mark.parametrize(
    ("fps", "rate", "expected"),
    [
        (30, 10, (30, 3)),
        (10, 3.33333, (10, 3)),
        (30, 10 / 3, (10, 3)),
        (25, 2.5, (5, 2)),  # 5 frames a round would need 12.5 frames a second
        (24, 2, (12, 6)),
    ],
)
def test_rounds_have_the_rate_of_the_actions(
    fps: int, rate: float, expected: tuple[int, int], tmp_path: Path
) -> None:
    specs = tuple(ActionSpec(name, "key", rate=rate) for name in ("left", "right"))
    facts = read_facts(recorded(tmp_path / "set", specs, fps, episodes=2), tmp_path / "world.yaml")
    assert (facts.fps, facts.chunk_frames) == expected
    model = WorldModelConfig(
        codec=CodecConfig(image_size=48, temporal_factor=1),
        action=ActionConfig(text=False, keys=("left", "right")),
        fps=facts.fps,
        chunk_frames=facts.chunk_frames,
    )
    with closing(open_sources(DataConfig({"mine": facts.train}), model)["mine"]) as source:
        assert source.size == 1


@pytest.mark.parametrize("rates", [(5, 5), (12, 6), (24, 24), (12 / 11, 12 / 11)])
def test_actions_without_a_whole_number_of_frames_are_refused(
    rates: tuple[float, float], tmp_path: Path
) -> None:
    specs = tuple(ActionSpec(name, "key", rate=rate) for name, rate in zip(("a", "b"), rates, strict=True))
    path = recorded(tmp_path / "set", specs, 12, episodes=2)
    with pytest.raises(ConfigError, match=rf"{rates[1]:g} actions per second in 12 frames"):
        read_facts(path, tmp_path / "world.yaml")
    folder = Path(table(tmp_path / "clips", [{"text": "play", "keys": [["a"], ["b"]]}] * 2))
    stated = {"action_spec": [spec.as_dict() for spec in specs], "fps": 12}
    (folder / "recording.json").write_text(json.dumps(stated))
    with pytest.raises(ConfigError, match=rf"{rates[1]:g} actions per second in 12 frames"):
        read_facts(str(folder), tmp_path / "world.yaml")


@pytest.mark.slow
def test_held_out_episodes_are_those_of_the_split_or_a_tenth(tmp_path: Path) -> None:
    path = recorded(tmp_path / "set", KEYS, 10)
    config = made(path, tmp_path)
    sources = open_sources(config.data, config.model)
    assert (config.validation.source, sources["mine"].size, sources["held"].size) == ("held", 9, 1)
    (tmp_path / "set" / "meta" / "split.json").write_text(json.dumps({"held-out": [1, 2, 3]}))
    config = made(path, tmp_path)
    assert open_sources(config.data, config.model)["held"].size == 3

    config = made(table(tmp_path / "words", [{"text": f"act {i}"} for i in range(6)]), tmp_path)
    sources = open_sources(config.data, config.model)
    texts = [{sources[name].at(i).text.values[0] for i in range(sources[name].size)} for name in sources]  # type: ignore[attr-defined, arg-type]
    assert [len(each) for each in texts] == [5, 1] and not texts[0] & texts[1]


def test_files_of_the_user_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = table(tmp_path / "words", [{"text": f"act {i}"} for i in range(6)])
    (tmp_path / "mine-held.jsonl").write_text("precious")
    assert main(["new", path, "--out", "mine.yaml"]) == 2
    assert not (tmp_path / "mine.yaml").exists() and not (tmp_path / "mine-train.jsonl").exists()
    assert (tmp_path / "mine-held.jsonl").read_text() == "precious"
    assert main(["new", path, "--out", "other.yaml"]) == 0
    assert sum(1 for _ in (tmp_path / "other-train.jsonl").open()) == 5


def test_a_long_list_of_keys_is_written_whole(tmp_path: Path) -> None:
    names = [f"a-key-of-number-{i}" for i in range(1500)]
    rows: list[dict[str, object]] = [{"text": "play", "keys": [names, []]}] * 2
    assert made(table(tmp_path / "many", rows), tmp_path).model.action.keys == tuple(sorted(names))


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"action_spec": [], "fps": 0}'])
def test_a_damaged_recording_is_one_clear_error(tmp_path: Path, text: str) -> None:
    path = table(tmp_path / "words", [{"text": "act"}])
    (tmp_path / "words" / "recording.json").write_text(text)
    with pytest.raises(ConfigError, match=r"recording\.json"):
        read_facts(path, tmp_path / "world.yaml")
    with pytest.raises(ConfigError, match=r"recording\.json"):
        open_examined(f"{path}/clips.jsonl")


@pytest.mark.parametrize("end", ["NaN", "Infinity", "-1"])
def test_intervals_that_do_not_end_are_refused(end: str) -> None:
    with pytest.raises(InputError, match="ends before it starts"):
        track_of(f'[{{"start": 0, "end": {end}, "text": "she waves"}}]', action_kind("text"))


@pytest.mark.slow
def test_more_time_and_a_faster_machine_give_more_steps_and_larger_models(tmp_path: Path) -> None:
    facts = read_facts(recorded(tmp_path / "set", KEYS, 10), tmp_path / "world.yaml")

    def planned(budget_s: float, tflops: float) -> recipe.Recipe:
        found = recipe.plan(facts, budget_s, replace(MACHINE, tflops=tflops), "run")
        assert sum(found.seconds.values()) <= budget_s
        return found

    short, long, fast = planned(1800, 0.2), planned(3600, 0.2), planned(3600, 200)
    assert short.config.model == long.config.model
    for name, stage in short.config.stages.items():
        assert long.config.stages[name].steps == pytest.approx(2 * stage.steps, abs=2)
    assert fast.parameters > 4 * long.parameters
    little = recipe.plan(facts, 1800, replace(MACHINE, memory=2.0**28), "run")
    assert 0 < little.config.stages["state"].microbatch_size < little.config.stages["state"].batch_size


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_steps_are_set_by_the_durations_of_real_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], share: float
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # The steps are real, their durations are not: those of a busy machine would be any.
    durations = {"codec": 2.0, "state": 4.0, "rollout": 5.0, "rollout rollout": 15.0}
    if share == 1:
        del durations["rollout"]  # no step is on true frames alone

    def records(run: Path) -> dict[str, dict[int, dict[str, float]]]:
        found = read_metrics(run)
        assert {name: len(steps) for name, steps in found.items()} == dict.fromkeys(durations, 4)
        assert all("step_s" in values for steps in found.values() for values in steps.values())
        return {name: {1: {"step_s": 9.0 * time}, 2: {"step_s": time}} for name, time in durations.items()}

    monkeypatch.setattr(recipe, "read_metrics", records)
    facts = read_facts(recorded(tmp_path / "set", KEYS, 10, side=32), tmp_path / "world.yaml")
    planned = recipe.plan(facts, 3600, MACHINE, "run")
    stages = {name: replace(stage, batch_size=2) for name, stage in planned.config.stages.items()}
    stages["rollout"] = replace(stages["rollout"], self_rollout=(share, share))
    model = planned.config.model
    tiny = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    backbone = replace(model.backbone, architecture={**(model.backbone.architecture or {}), **tiny})
    config = replace(planned.config, stages=stages, model=replace(model, backbone=backbone))
    found = timed(replace(planned, config=config), 3600)
    assert capsys.readouterr().out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["set"]  # the trial leaves nothing
    costs = {"codec": 2.0, "state": 4.0, "rollout": (1 - share) * 5.0 + share * 15.0}
    for name, stage in found.config.stages.items():
        assert stage.steps == int(recipe.FROM_CODEC[name][0] * recipe.OVERHEAD * 3600 / costs[name])
        assert found.seconds[name] == pytest.approx(stage.steps * costs[name])
        assert replace(stage, steps=1) == replace(stages[name], steps=1)


@pytest.mark.parametrize(
    ("actor", "recorded_side", "side"),
    [
        (None, 256, 0),
        (new.Actor(30, rounds=1), 256, 0),
        (new.Actor(12, rounds=1), 256, 96),
        (new.Actor(12, rounds=4), 256, 96),
        (new.Actor(1, rounds=1), 256, 128),
        (new.Actor(12, rounds=1), 64, 0),
        (new.Actor(12, rounds=1), 80, 80),
    ],
)
def test_frames_are_larger_where_actions_change_few_pixels(
    tmp_path: Path, actor: new.Actor | None, recorded_side: int, side: int
) -> None:
    facts = read_facts(recorded(tmp_path / "set", KEYS, 10, side=64), tmp_path / "world.yaml")
    planned = recipe.plan(facts, 3600, MACHINE, "run")
    assert planned.config.model.codec.image_size == 64
    assert new._side(planned, replace(facts, height=recorded_side, width=recorded_side), actor) == side


@pytest.mark.parametrize("words", [["nowhere"], ["set", "--budget", "soon"], ["set", "--budget", "1s"]])
def test_what_cannot_be_planned_is_said_in_one_sentence(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recorded(tmp_path / "set", KEYS, 10)
    assert main(["new", *words]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not (tmp_path / "world.yaml").exists()


@pytest.mark.parametrize("budget_s", [1.0, 30.0])
def test_the_time_that_is_asked_for_suffices(budget_s: float, tmp_path: Path) -> None:
    facts = read_facts(recorded(tmp_path / "set", KEYS, 10), tmp_path / "world.yaml")
    with pytest.raises(InputError, match=r"at least \d+ s") as refused:
        recipe.plan(facts, budget_s, MACHINE, "run")
    needed = float(str(refused.value).rsplit("at least ", 1)[1].split()[0])
    assert recipe.plan(facts, needed, MACHINE, "run").config.stages["state"].steps >= recipe.MIN_STEPS
    with pytest.raises(InputError):
        recipe.plan(facts, needed - 2, MACHINE, "run")


def test_an_unreadable_dataset_and_an_existing_config_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(table(tmp_path / "broken", [{"text": "a"}, {"text": "b"}]))
    (path / "clip.mp4").write_bytes(b"no video")
    assert main(["new", str(path), "--out", str(tmp_path / "a.yaml")]) == 2
    assert "clips.jsonl" in capsys.readouterr().err
    (tmp_path / "a.yaml").write_text("seed: 1")
    assert main(["new", str(path), "--out", str(tmp_path / "a.yaml")]) == 2
    assert (tmp_path / "a.yaml").read_text() == "seed: 1"


def test_times_are_read() -> None:
    assert [new.seconds(text) for text in ("90s", "30m", "1.5h")] == [90, 1800, 5400]
    with pytest.raises(InputError):
        new.seconds("0h")


@pytest.mark.slow
@pytest.mark.parametrize("side", [32, 128, 256])
def test_the_config_trains_a_model_that_plays(side: int, tmp_path: Path) -> None:
    path = recorded(tmp_path / "set", KEYS, 10, side=side, episodes=4)
    config = made(path, tmp_path, "--size", str(side))
    if side == 256:  # the codec of the recipe, which begins as a shipped one, takes a minute longer
        codec = replace(config.model.codec, widths=(16, 32), num_blocks=1)
        config = replace(config, model=replace(config.model, codec=codec), init_from=None)
    stages = {name: replace(stage, steps=2, batch_size=2) for name, stage in config.stages.items()}
    validation = replace(config.validation, every=2, batches=1)
    run = replace(config, stages=stages, run_dir=str(tmp_path / "run"), log_every=1, validation=validation)
    model = WorldModel.from_pretrained(finetune.train(run))
    assert (model.config.query_merge, model.config.codec.temporal_factor) == (max(1, side // 32), 1)
    session = model.session(seed=0)
    session.reset(np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8))
    for key in ("left", "jump"):
        frames = session.step({"keys": [key]}).frames
        assert (frames.shape, frames.dtype) == ((1, side, side, 3), np.uint8)
    metrics = read_metrics(tmp_path / "run")
    assert list(metrics) == ["codec", "state", "rollout"]
