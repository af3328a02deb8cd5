"""Evaluation on recorded episodes: a square in a corridor that keys move, and clips of the shapes world."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from worldmodel import media, shapes
from worldmodel.actions import Action
from worldmodel.cli import main
from worldmodel.config import (
    ActionConfig,
    ActionSpec,
    CodecConfig,
    DataConfig,
    SourceConfig,
    VisionConfig,
    WorldModelConfig,
)
from worldmodel.data import sources
from worldmodel.data.argument import read_held_out, read_source
from worldmodel.data.sources import register_source
from worldmodel.episodes import Episode
from worldmodel.errors import ConfigError, InputError
from worldmodel.eval.card import model_card
from worldmodel.eval.data.counterfactuals import difference
from worldmodel.eval.data.episodes import EpisodeReader
from worldmodel.eval.data.returns import parse_inverse
from worldmodel.eval.data.suite import DataSettings, DataSuite
from worldmodel.eval.drift import rollouts
from worldmodel.eval.examples import Album
from worldmodel.eval.figures import bootstrap_figure
from worldmodel.eval.judge import Verdict, load_judge
from worldmodel.eval.metrics.psnr import MAX_PSNR
from worldmodel.eval.published import run_of
from worldmodel.eval.report import write_report
from worldmodel.eval.runner import ModelSubject
from worldmodel.eval.suite import evaluate
from worldmodel.models.world_model import WorldModel
from worldmodel.shapes.evaluation import cases
from worldmodel.shapes.source import KEYS

SIDE, SQUARE, FRAMES = 32, 8, 2
MOVES = {"left": -SQUARE, "right": SQUARE, "stay": 0}
CONFIG = WorldModelConfig(
    codec=CodecConfig(image_size=SIDE),
    chunk_frames=FRAMES,
    action=ActionConfig(text=False, keys=tuple(MOVES)),
)


def picture(place: int) -> np.ndarray:
    frame = np.full((SIDE, SIDE, 3), 40, np.uint8)
    frame[12:20, place : place + SQUARE] = (230, 60, 60)
    return frame


def moved(frame: np.ndarray, action: Action) -> np.ndarray:
    """Move the square of a frame; walls stop it."""
    place = int(np.argmax(frame[12, :, 0] > 150))
    step = MOVES.get(action.keys[0], 0) if action.keys else 0
    return picture(min(max(place + step, 0), SIDE - SQUARE))


@dataclass(frozen=True)
class Corridor:
    """Episodes of a random walk; a source and its own recipe."""

    name: str = "corridor"
    size: int | None = None
    side: int = SIDE
    keys: tuple[str, ...] = tuple(MOVES)
    tasks = ("rounds",)
    texts = ()
    streams = 0

    def at(self, index: int) -> "Corridor":
        return self

    def cost(self, index: int, rounds: int) -> float:
        return rounds

    def close(self) -> None:
        pass

    def episode(self, task: str, seed: int, index: int, rounds: int) -> Episode:
        rng = np.random.default_rng((seed, index))
        frames, actions = [picture(SQUARE * int(rng.integers(SIDE // SQUARE)))], []
        for _ in range(rounds if index % 2 else 1 + rounds // 2):  # every other episode ends early
            actions.append(Action(keys=(self.keys[int(rng.integers(len(self.keys)))],)))
            frames.append(moved(frames[-1], actions[-1]))
        clips = [np.repeat(frame[None, : self.side], FRAMES, axis=0) for frame in frames]
        return Episode(f"corridor {index}", (clips[0][:1], *clips[1:]), tuple(actions))


def open_corridor(name: str, config: DataConfig, model: WorldModelConfig) -> Corridor:
    return {
        "train": Corridor(),
        "other frames": Corridor(side=16),
        "other keys": Corridor(keys=("left", "up")),
        "always left": Corridor(keys=("left",)),
    }[config.sources[name].split]


@pytest.fixture(scope="module", autouse=True)
def corridor() -> Iterator[None]:
    register_source("corridor", open_corridor)
    yield
    del sources._generators["corridor"]


class Walk:
    """Worlds of a subject that moves the square, or leaves it where it is."""

    def __init__(self, frames: np.ndarray, obeys: bool) -> None:
        self.frames, self.obeys = frames, obeys

    def step(self, actions: Sequence[Action]) -> np.ndarray:
        if self.obeys:
            self.frames = np.stack([moved(*pair) for pair in zip(self.frames, actions, strict=True)])
        return np.repeat(self.frames[:, None], FRAMES, axis=1)


class Walker:
    """The true simulator of the corridor, or a model that ignores actions; its forecast does not move."""

    def __init__(self, obeys: bool = True) -> None:
        self.obeys = obeys

    def open(
        self, images: np.ndarray, seeds: Sequence[int], actions: Sequence[Sequence[Action]] = ()
    ) -> Walk:
        return Walk(images, self.obeys)

    def imagine(self, texts: Sequence[str], seeds: Sequence[int]) -> np.ndarray:
        raise NotImplementedError

    def read(self, observations: Sequence[Any], prompts: Sequence[str]) -> list[str]:
        raise NotImplementedError

    def reconstruct(self, clips: np.ndarray) -> np.ndarray:
        return clips

    def with_steps(self, num_inference_steps: int) -> "Walker":
        return Walker(obeys=self.obeys and num_inference_steps > 0)


class SameSquare:
    """A judge: the square is where it is in the recorded frame."""

    def __call__(self, frame: np.ndarray, truth: np.ndarray, /) -> Verdict:
        right = bool((np.abs(frame.astype(int) - truth) < 60).all())
        return Verdict(right, right, right)


def source(split: str = "train") -> DataConfig:
    return DataConfig({"corridor": SourceConfig("corridor", split=split)})


def measured(subject: Walker, training: DataConfig | None = None) -> tuple[dict[str, Any], DataSuite]:
    settings = DataSettings(
        None, 24, 6, data="corridor", inverse=("left=right",), inverse_dynamics_steps=120, judge="SameSquare"
    )
    suite = DataSuite(source(), training, CONFIG, settings, SameSquare())
    return evaluate(subject, settings, suite), suite


@pytest.fixture(scope="module")
def obeyed(corridor: None) -> tuple[dict[str, Any], DataSuite]:
    return measured(Walker())


def test_the_true_simulator_gets_full_marks(obeyed: tuple[dict[str, Any], DataSuite]) -> None:
    figures = obeyed[0]["figures"]
    horizon = figures["horizon"]
    assert [figure["n"] for figure in horizon["psnr"]["model"]] == [24, 24, 24, 24, 12, 12]
    for row in ("model", "codec"):
        assert all(figure["value"] == MAX_PSNR for figure in horizon["psnr"][row])
        assert all(figure["value"] == pytest.approx(1) for figure in horizon["ssim"][row])
        assert all(figure["value"] == 1 for figure in horizon["right"][row])
        assert all(figure["value"] == pytest.approx(1) for figure in horizon["sharpness"][row])
    assert horizon["trend"]["psnr"]["model"]["value"] == pytest.approx(0)
    swapped = figures["counterfactuals"]
    for name in ("differ", "own_nearer"):
        assert swapped[name]["model"]["value"] == 1, name
        assert swapped[name]["model"]["n"] > 2, name
    returned = figures["returns"]
    assert 0 < returned["moved"]["model"]["value"] < 1  # walls
    assert returned["returned"]["model"]["value"] == 1
    assert returned["psnr"]["codec"]["value"] == MAX_PSNR
    # A copy is always at the start, since it never leaves it.
    assert returned["moved"]["copy"]["value"] == 0
    assert returned["returned"]["copy"]["value"] == 1
    assert returned["psnr"]["copy"]["value"] == MAX_PSNR


@pytest.mark.slow
def test_actions_are_recognised_in_true_and_in_predicted_frames() -> None:
    figures = measured(Walker(), source())[0]["figures"]
    assert figures["inverse_dynamics"] == {"distinct_actions": 3, "candidates": 3}
    recognised = figures["horizon"]["action"]
    # Where a wall stops the square nobody can tell the key from the frames.
    assert recognised["truth"][0]["value"] > 0.75
    assert recognised["model"] == recognised["truth"]
    assert recognised["copy"][0]["value"] < 0.6
    assert figures["counterfactuals"]["recognised"]["model"]["value"] > 0.8
    assert figures["counterfactuals"]["recognised"]["copy"]["value"] < 0.4


def test_a_model_that_ignores_actions_is_a_copy() -> None:
    figures = measured(Walker(obeys=False))[0]["figures"]
    horizon = figures["horizon"]
    for measure in ("psnr", "ssim", "sharpness", "right"):
        assert horizon[measure]["model"] == horizon[measure]["copy"] == horizon[measure]["zero_steps"]
    assert horizon["right"]["model"][5]["value"] < 0.6
    for name in ("differ", "own_nearer"):
        assert figures["counterfactuals"][name]["model"]["value"] == 0, name
    assert figures["returns"]["moved"]["model"]["value"] == 0
    assert set(figures["returns"]["returned"]) == {"copy"}
    assert "action" not in horizon  # without data for training there is no inverse-dynamics model
    assert "inverse_dynamics" not in figures


def test_the_report_has_tables_charts_and_examples(
    obeyed: tuple[dict[str, Any], DataSuite], tmp_path: Path
) -> None:
    results, suite = obeyed
    page = write_report(results, tmp_path / "report").read_text()
    for text in ("PSNR, by round", "Change per round", "Counterfactuals", "Action and inverse"):
        assert text in page
    for column in ("0 steps", "codec alone", "copy"):
        assert f"<th class=number>{column}" in page
    assert "goals met" not in page
    assert {path.stem for path in (tmp_path / "report").glob("*.png")} == {
        "horizon-psnr",
        "horizon-right",
    }
    images = list((tmp_path / "report" / "examples").iterdir())
    assert len(images) == 4  # all right: the judge finds no wrong one
    strip = media.read_image(images[0], (2 * SIDE + 4, SIDE))
    assert strip.dtype == np.uint8
    json.loads((tmp_path / "report" / "results.json").read_text(), parse_constant=pytest.fail)
    results["settings"]["num_inference_steps"] = 1
    card = model_card([run_of(results)], "mine", suite.card)
    assert "| PSNR, round 6 | 100.0 dB | 100.0 to 100.0 | " in card
    assert (
        "worldmodel eval mine --data corridor --inverse left=right --judge SameSquare "
        "--inverse-dynamics-steps 120 --num-samples 24" in card
    )
    assert "| Action and inverse: back at the start | 100 % |" in card
    assert "of more than 6 rounds from a random step" in card


def test_a_card_states_what_the_actions_mean(obeyed: tuple[dict[str, Any], DataSuite]) -> None:
    results, suite = obeyed
    results["settings"]["num_inference_steps"] = 1
    runs = [run_of(results)]
    assert "## Actions" not in model_card(runs, "mine", suite.card, config=CONFIG)
    spec = tuple(ActionSpec(key, "key", unit="cells", low=0, high=1, rate=10) for key in MOVES)
    stated = replace(CONFIG, action=replace(CONFIG.action, spec=spec))
    card = model_card(runs, "mine", suite.card, config=stated)
    assert "\n## Actions\n\n| Action | Kind |" in card
    assert "| right | key | 0 to 1 | cells | 1 | 10 | – |\n" in card


def test_bootstrap_interval_of_a_coin() -> None:
    """Resampled means of 50 heads of 100 are binomial, with the quantiles 40 and 60."""
    found = bootstrap_figure([0.0] * 50 + [1.0] * 50)
    assert (found["value"], found["n"]) == (0.5, 100)
    assert (found["low"], found["high"]) == pytest.approx((0.40, 0.60), abs=0.011)


def test_a_small_thing_makes_a_difference() -> None:
    empty = np.full((64, 64, 3), 40, np.uint8)
    with_key = empty.copy()
    with_key[24:30, 40:44] = (230, 200, 60)
    expected = (np.abs(with_key.astype(float) - empty).mean(axis=2)).sum() / 64  # in one patch of 8 x 8
    assert difference(empty, with_key) == pytest.approx(expected, rel=1e-5)
    assert difference(empty, with_key) > 16 > difference(empty, empty + 3)


def test_inverse_pairs() -> None:
    assert parse_inverse("left=right", CONFIG.action) == (Action(keys=("left",)), Action(keys=("right",)))
    words = ActionConfig()
    assert parse_inverse("go up=go down", words) == (Action("go up"), Action("go down"))
    for wrong in ("left", "=right", "left="):
        with pytest.raises(InputError, match="left=right"):
            parse_inverse(wrong, CONFIG.action)
    with pytest.raises(InputError, match="no text"):
        parse_inverse("left=back", CONFIG.action)


@pytest.mark.parametrize(
    ("split", "said"),
    [
        ("other frames", "2 frames of 32 x 16 pixels.*2 frames of 32 x 32"),
        ("other keys", "no key 'up'"),
    ],
)
def test_episodes_that_do_not_fit_the_model(split: str, said: str) -> None:
    reader = EpisodeReader(source(split), CONFIG, 6, 0)
    with pytest.raises(InputError, match=said):
        list(reader.read(8))


def test_one_action_cannot_be_recognised() -> None:
    with pytest.raises(InputError, match="same action"):
        measured(Walker(), DataConfig({"walk": SourceConfig("corridor", split="always left")}))


def test_clips_are_read_once_each_and_short_ones_skipped(recorded: Path) -> None:
    config = WorldModelConfig(action=ActionConfig(keys=KEYS))
    reader = EpisodeReader(read_source(str(recorded)), config, 2, 0)
    episodes = list(reader.read(100))
    assert (len(episodes), reader.skipped) == (6, [])
    assert all(len(each.actions) == len(each.clips) for each in episodes)
    five = replace(config.action, per_round=5)  # the rate of the recording
    rounds = replace(config, chunk_frames=40, action=five, vision=VisionConfig(max_frames=32))
    long = EpisodeReader(read_source(str(recorded)), rounds, 2, 0)
    with pytest.raises(InputError, match=r"None of the 6 episodes.*a round needs 1 \+ 40"):
        list(long.read(100))


def test_sources_as_arguments(recorded: Path, tmp_path: Path) -> None:
    table = recorded / "clips.jsonl"
    by_folder, by_table = read_source(str(recorded)), read_source(str(table))
    columns = {"video": "path", **{name: name for name in ("text", "keys", "rewards", "terminated")}}
    assert by_folder == by_table == DataConfig({"clips": SourceConfig("clips", str(table), columns=columns)})
    shards = DataConfig({"webdataset": SourceConfig("webdataset", "data/*.tar")})
    assert read_source("webdataset:data/*.tar") == shards
    config = tmp_path / "mine.yaml"
    config.write_text(
        "data: {sources: {mine: {kind: clips, path: a.csv}, held: {kind: clips, path: b.csv, weight: 0}}}\n"
        "stages: {joint: {objective: joint, tasks: {rounds: 1.0}}}\n"
    )
    held = DataConfig({"held": SourceConfig("clips", "b.csv", weight=0.0)})
    mine = DataConfig({"mine": SourceConfig("clips", "a.csv")})
    assert read_held_out(f"{config}:held") == (held, None)
    assert read_held_out(str(table), f"{config}:mine") == (by_table, mine)
    with pytest.raises(InputError, match=r"validation\.source"):
        read_held_out(str(config))
    with pytest.raises(InputError, match="joint on 'mine'"):
        read_held_out(f"{config}:mine")
    with pytest.raises(InputError, match="also the held-out part"):
        read_held_out(str(table), str(recorded))
    with pytest.raises(InputError, match="gone"):
        read_source(f"{config}:gone")
    with pytest.raises(ConfigError, match="no videos and no numbered images"):
        read_source(str(tmp_path))
    with pytest.raises(InputError, match="nowhere"):
        read_source("nowhere")
    config.write_text(config.read_text() + "validation: {source: held}\n")
    assert read_held_out(str(config)) == (held, mine)


def test_judges_are_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(load_judge(f"{__name__}:SameSquare"), SameSquare)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", os.getcwd())])
    monkeypatch.chdir(tmp_path)  # where a command does not look for modules by itself
    (tmp_path / "judge_of_the_folder.py").write_text("def judge(*frames): ...\n")
    assert callable(load_judge("judge_of_the_folder:judge"))
    for name in ("gone.module:Judge", f"{__name__}:Gone", f"{__name__}", f"{__name__}:SIDE"):
        with pytest.raises(InputError, match=r"MODULE:NAME|__call__"):
            load_judge(name)


@pytest.fixture(scope="module")
def shapes_tiny() -> WorldModel:
    return WorldModel.from_pretrained("shapes-tiny")


@pytest.mark.slow
def test_the_same_rollouts_have_the_psnr_of_the_shapes_suite(shapes_tiny: WorldModel) -> None:
    """The same episodes, seeds and rounds through both suites, where they are the same to the model."""
    count, rounds, seed = 4, 2, 11
    settings = DataSettings(None, count, rounds, seed)
    data = DataConfig({"shapes": SourceConfig("shapes", split="single")})
    suite = DataSuite(data, None, shapes_tiny.config, settings)
    (part,) = (part for part in suite.parts(settings, None, Album()) if part.name == "horizon")
    figures = part.measure(ModelSubject(shapes_tiny))
    episodes = list(suite.reader.read(count))

    def sample(index: int) -> list[Any]:
        return [
            replace(cases.case_of(each), action=action)
            for each, action in zip(
                shapes.sample_rollout("single", seed, index, rounds), episodes[index].actions, strict=True
            )
        ]

    theirs = rollouts(ModelSubject(shapes_tiny), sample, cases.judge_frame, count, rounds, seed)
    for ours, other in zip(figures["psnr"]["model"], theirs["psnr"], strict=True):
        assert ours["value"] == pytest.approx(other["value"], abs=1e-6)
        assert ours["n"] == other["n"] == count


@pytest.mark.slow
def test_the_command_line_end_to_end(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["eval", "shapes-tiny", "--data", str(recorded), "--num-samples", "4", "--rounds", "2"]
    assert main([*argv, "--report", str(tmp_path / "report"), "--json", str(tmp_path / "a.json")]) == 0
    said = capsys.readouterr().out
    assert "PSNR, round 2" in said
    assert "copy" in said
    results = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    assert results["settings"]["data"] == str(recorded)
    assert results["figures"]["horizon"]["psnr"]["model"][0]["value"] > 25
    assert (tmp_path / "report" / "horizon-psnr.png").stat().st_size > 5000


@pytest.mark.slow
def test_a_run_is_published_with_figures_on_recorded_episodes(recorded: Path, tmp_path: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "published"
    WorldModel.from_pretrained("shapes-tiny").save_pretrained(run / "model")
    origin = {"command": "worldmodel train mine.yaml", "commit": "abc", "num_processes": 1}
    stages = {"joint": {"objective": "joint", "steps": 2}}
    (run / "config.json").write_text(json.dumps({"stages": stages, "origin": origin}))
    (run / "metrics.jsonl").write_text('{"stage": "joint", "step": 2, "time": 0}\n')
    argv = ["publish", str(run), str(folder), "--data", str(recorded), "--num-samples", "2", "--rounds", "1"]
    assert main(argv) == 0
    card = (folder / "README.md").read_text()
    assert "| PSNR, round 1 |" in card
    stored = json.loads((folder / "figures.json").read_text())
    assert stored["runs"][0]["settings"]["data"] == str(recorded)
    assert f"--data {recorded} --inverse-dynamics-steps 500 --num-samples 2 --rounds 1" in card
    assert (run / "report" / "index.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "RECORDED", "--perceptual", "gone.safetensors"], "gone.safetensors"),
        (["--data", "nowhere"], "nowhere"),
        (["--inverse", "red+left=red+right"], "--data"),
        (["--data", "RECORDED", "--split", "held-out"], "--split"),
        (["--data", "RECORDED", "--inverse", "left"], "left=right"),
        (["--data", "RECORDED", "--judge", "gone:Judge"], "gone:Judge"),
        (["--data", "RECORDED", "--train-data", "RECORDED"], "also the held-out part"),
        (["--data", "shapes_tiny"], "validation.source"),
        (["--data", "RECORDED", "--inverse-dynamics-steps", "-1"], "inverse_dynamics_steps is -1"),
    ],
)
def test_bad_options_are_one_sentence(
    arguments: list[str], said: str, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(recorded) if each == "RECORDED" else each for each in arguments]
    assert main(["eval", "shapes-tiny", "--report", str(tmp_path / "report"), *given]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_a_table_with_a_column_that_the_model_does_not_take(recorded: Path) -> None:
    config = WorldModelConfig(action=ActionConfig(text=True))
    with pytest.raises(ConfigError, match="takes no keys"):
        list(EpisodeReader(read_source(str(recorded)), config, 2, 0).read(1))
