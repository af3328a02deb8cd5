"""Evaluation: the true simulator scores 1, and a model that copies the first frame scores 0."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard

from worldmodel import config as configs
from worldmodel import shapes
from worldmodel.actions import Action
from worldmodel.cli import main
from worldmodel.config import SMALL_DECODER, ActionConfig, CodecConfig, StateConfig, WorldModelConfig
from worldmodel.episodes import DESCRIBE, WHAT_HAPPENED
from worldmodel.errors import ConfigError, InputError, OutputError
from worldmodel.eval.card import model_card
from worldmodel.eval.figures import mean_figure, rate_figure
from worldmodel.eval.metrics.psnr import MAX_PSNR, psnr
from worldmodel.eval.metrics.ssim import ssim
from worldmodel.eval.published import run_of
from worldmodel.eval.report import write_report
from worldmodel.eval.runner import ModelSubject, Worlds
from worldmodel.eval.suite import EvalSettings, evaluate
from worldmodel.eval.table import Table
from worldmodel.models.loading.model_card import card_text
from worldmodel.models.world_model import WorldModel
from worldmodel.shapes import Act, Plan, Scene
from worldmodel.shapes.evaluation import cases, images, language, paraphrases
from worldmodel.shapes.evaluation.suite import ShapesSuite
from worldmodel.shapes.physics import Clip
from worldmodel.train.tokenizer import build_tokenizer
from worldmodel.worlds import suite_of

SUITE = ShapesSuite()
GRAMMAR_SPLITS = ("val", "held-out", "compositions")
SPLITS = (*GRAMMAR_SPLITS, paraphrases.SPLIT)
SEED = 1234
SAMPLES = 8


class TrueWorlds:
    """Scenes that the simulator itself moves on."""

    def __init__(self, scenes: list[Scene], subject: "TrueSubject") -> None:
        self.scenes, self.subject = scenes, subject

    def step(self, actions: Sequence[Action]) -> np.ndarray:
        clips = [self.play(*pair) for pair in zip(self.scenes, actions, strict=True)]
        self.scenes = [clip.after for clip in clips]
        return np.stack([clip.frames for clip in clips])

    def play(self, scene: Scene, action: Action) -> Clip:
        meant = self.subject.meant.get((shapes.render(scene).tobytes(), action.text))
        plan = meant or (shapes.STAY if action.text is None else shapes.parse(action.text))
        if action.keys:
            colour, deed = action.keys
            plan = Plan(((Act(deed, colour),),))
        try:
            return shapes.simulate(scene, plan)
        except ValueError:  # another clip's text names what is not there
            return shapes.simulate(scene, shapes.STAY)


class TrueSubject:
    """The simulator in place of a model, with the scene of every image that the evaluation can show."""

    def __init__(self) -> None:
        clips = [
            shapes.sample_clip(split, SEED, index).clip
            for split in (*GRAMMAR_SPLITS, "single")
            for index in range(20 * SAMPLES)
        ]
        self.known: dict[bytes, Scene] = {}
        self.plans: dict[bytes, Plan] = {}
        for clip in clips:
            self.known[clip.first_frame.tobytes()] = clip.before
            self.known[clip.frames[-1].tobytes()] = clip.after
            self.plans[clip.first_frame.tobytes() + clip.frames.tobytes()] = clip.plan
        self.meant: dict[tuple[bytes, str | None], Plan] = {}
        for case in paraphrases.paraphrase_cases(SEED, SAMPLES):
            scene, plan = case.before
            self.known[case.start.tobytes()] = scene
            self.meant[case.start.tobytes(), case.caption] = plan

    def open(
        self, images: np.ndarray, seeds: Sequence[int], actions: Sequence[Sequence[Action]] = ()
    ) -> Worlds:
        return TrueWorlds([self.known[image.tobytes()] for image in images], self)

    def imagine(self, texts: Sequence[str], seeds: Sequence[int]) -> np.ndarray:
        return np.stack([shapes.render(shapes.parse_caption(text))[None] for text in texts])

    def read(self, observations: Sequence[tuple[np.ndarray, ...]], prompts: Sequence[str]) -> list[str]:
        return [self.say(*pair) for pair in zip(observations, prompts, strict=True)]

    def say(self, observation: tuple[np.ndarray, ...], prompt: str) -> str:
        if prompt == WHAT_HAPPENED:
            return shapes.canonical_text(self.plans[observation[0].tobytes() + observation[1].tobytes()])
        scene = self.known[observation[0][-1].tobytes()]
        if prompt == DESCRIBE:
            return shapes.caption(scene)
        rng = np.random.default_rng(0)
        return next(
            answer for asked, answer in iter(lambda: shapes.question(scene, rng), None) if asked == prompt
        )

    def reconstruct(self, clips: np.ndarray) -> np.ndarray:
        return clips

    def with_steps(self, num_inference_steps: int) -> "TrueSubject":
        return self


class CopySubject(TrueSubject):
    """Repeats the first frame and always gives the same answer."""

    def open(
        self, images: np.ndarray, seeds: Sequence[int], actions: Sequence[Sequence[Action]] = ()
    ) -> Worlds:
        still = np.repeat(images[:, None], shapes.FRAMES_PER_CLIP, axis=1)

        class Still:
            def step(self, actions: Sequence[Action]) -> np.ndarray:
                return still

        return Still()

    def imagine(self, texts: Sequence[str], seeds: Sequence[int]) -> np.ndarray:
        return np.stack([shapes.backdrop("night")[None] for _ in texts])

    def say(self, observation: tuple[np.ndarray, ...], prompt: str) -> str:
        return "the red ball"


@pytest.fixture(scope="module")
def true_subject() -> TrueSubject:
    return TrueSubject()


@pytest.fixture(scope="module")
def truth(true_subject: TrueSubject) -> dict:
    return evaluate(true_subject, EvalSettings(None, SAMPLES, 3, SEED), SUITE)


@pytest.fixture(scope="module")
def model() -> WorldModel:
    """A random model of the shipped shape, thinner so that the test is quick."""
    config = configs.load("shapes_tiny")
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    architecture = {**SMALL_DECODER, **small, "num_key_value_heads": 1, "head_dim": 32}
    parts = {
        "backbone": replace(config.model.backbone, architecture=architecture),
        "codec": replace(config.model.codec, widths=(8, 16)),
        "generator": replace(config.model.generator, width=64, num_layers=2, num_heads=2),
        "state": StateConfig(width=64, num_layers=1),
        "vision": replace(config.model.vision, width=16),
    }
    tokenizer = build_tokenizer(config)
    torch.manual_seed(0)
    made = WorldModel.from_config(replace(config.model, **parts), tokenizer)
    with torch.no_grad():  # zero-initialised outputs would hide what the inputs change
        assert made.state is not None
        for layer in (made.generator.project, made.state.to_latents):
            torch.nn.init.normal_(layer.weight, std=0.1)
    return made.eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_interval_against_the_literature(successes: int, total: int, low: float, high: float) -> None:
    """Newcombe 1998, table I (81 of 263), and the textbook values for 0, 5 and 10 of 10."""
    rate = rate_figure(successes, total)
    assert (rate["low"], rate["high"]) == pytest.approx((low, high), abs=1e-4)
    assert rate["value"] == successes / total


def test_mean_figure() -> None:
    figure = mean_figure([1.0, 2.0, 3.0])
    assert figure["value"] == 2
    assert figure["high"] - 2 == pytest.approx(1.959964 / math.sqrt(3))


def test_psnr() -> None:
    black = np.zeros((4, 8, 8, 3), np.uint8)
    assert psnr(black, black) == MAX_PSNR
    assert psnr(black, black + np.uint8(255)) == pytest.approx(0)
    assert psnr(black + np.uint8(1), black) == pytest.approx(48.1308, abs=1e-4)
    assert psnr(black, black + np.uint8(255)) == psnr(black + np.uint8(255), black)


def test_ssim() -> None:
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (64, 64, 3)).astype(np.uint8)
    other = rng.integers(0, 256, (64, 64, 3)).astype(np.uint8)
    grey = np.full_like(image, 128)
    assert ssim(image, image) == pytest.approx(1)
    assert abs(ssim(image, other)) < 0.1
    assert ssim(image, other) == pytest.approx(ssim(other, image))
    # Between flat images only the means differ: (2 a b + c1) / (a^2 + b^2 + c1).
    expected = (2 * 128 * 100 + 6.5025) / (128**2 + 100**2 + 6.5025)
    assert ssim(grey, np.full_like(grey, 100)) == pytest.approx(expected)
    clip = np.stack([image, other])
    assert ssim(clip, np.stack([image, grey])) == pytest.approx((1 + ssim(other, grey)) / 2)


def test_the_true_simulator_gets_full_marks(truth: dict) -> None:
    figures = truth["figures"]
    for goal in SUITE.goals:
        row = goal.row(figures)
        assert row is None or row.met in (True, None), goal.title
    for split in SPLITS:
        for name in ("named", "others", "strict", "every_frame", "ssim"):
            assert figures["action_following"][split][name]["value"] == pytest.approx(1), (split, name)
        assert figures["action_following"][split]["psnr"]["value"] == MAX_PSNR
    following = figures["action_following"]["paraphrases"]
    assert all(
        rates[name]["value"] == 1 for rates in following["by_kind"].values() for name in ("named", "strict")
    )
    assert all(set(shown) == {asked} for asked, shown in following["confusion"].items())
    assert sum(count for shown in following["confusion"].values() for count in shown.values()) == SAMPLES
    assert figures["control"]["own_named"]["value"] == 1
    assert figures["describe"]["exact"]["value"] == figures["questions"]["all"]["value"] == 1
    assert all(figures["inverse"][split]["exact"]["value"] == 1 for split in language.INVERSE_SPLITS)
    assert all(rate["value"] == 1 for rate in figures["rollouts"]["strict"])
    assert figures["keys"]["named"]["value"] == figures["text_to_image"]["strict"]["value"] == 1


@pytest.mark.slow
def test_rates_of_the_forecast_stand_beside_those_of_the_model(true_subject: TrueSubject) -> None:
    class Sampled(TrueSubject):
        """Without a generator it repeats the first frame."""

        def with_steps(self, num_inference_steps: int) -> TrueSubject:
            return self if num_inference_steps else CopySubject()

    figures = evaluate(Sampled(), EvalSettings(None, SAMPLES, 2, SEED), SUITE)["figures"]
    for split in SPLITS:
        rates = figures["action_following"][split]
        assert rates["strict"]["value"] == 1 > 0.5 > rates["forecast_strict"]["value"]
        for name in ("named", "strict"):
            assert rates[f"forecast_{name}"] == rates[f"copy_{name}"]
    assert all(rate["value"] == 1 for rate in figures["rollouts"]["strict"])
    assert all(rate["value"] < 0.5 for rate in figures["rollouts"]["forecast_strict"])


def test_a_copying_model_gets_none(true_subject: TrueSubject) -> None:
    figures = evaluate(CopySubject(), EvalSettings(None, SAMPLES, 2, SEED), SUITE)["figures"]
    following = figures["action_following"]["paraphrases"]
    assert all(set(shown) == {"nothing"} for shown in following["confusion"].values())
    assert all(rates["strict"] == rates["copy_strict"] for rates in following["by_kind"].values())
    for split in GRAMMAR_SPLITS:
        rates = figures["action_following"][split]
        assert rates["strict"] == rates["copy_strict"]
        # A jump ends where it began and "nothing happens" is a copy: the floor is above zero and reported.
        assert rates["strict"]["value"] < 0.25
        assert rates["others"]["value"] > 0.7
    assert figures["control"]["own_named"]["value"] == figures["control"]["named"]["value"] == 0
    assert figures["null_action"]["none"]["value"] == 1
    assert figures["text_to_image"]["strict"]["value"] == figures["describe"]["scene"]["value"] == 0
    assert figures["inverse"]["val"]["acts"]["value"] == 0


def test_play_is_session_step(model: WorldModel) -> None:
    """A batch of worlds makes what sessions of its seeds make, also past a restart of the cache."""
    scenes = [shapes.random_scene(np.random.default_rng(index)) for index in range(2)]
    firsts = np.stack([shapes.render(scene) for scene in scenes])
    rounds = [
        [Action("the red ball moves left"), Action()],
        [Action(keys=("red", "left")), Action("nothing happens")],
        *[[Action("the blue box jumps"), Action("the red ball grows")]] * 3,
    ]
    worlds = ModelSubject(model).open(firsts, [3, 4])
    sessions = [model.session(seed) for seed in (3, 4)]
    for session, first in zip(sessions, firsts, strict=True):
        session.reset(first)
    for number, actions in enumerate(rounds):
        clips = worlds.step(actions).astype(int)
        for clip, session, action in zip(clips, sessions, actions, strict=True):
            assert np.abs(clip - session.step(action).frames).max() <= 1, number
    text = "night background, a small red ball at the left"
    imagined = ModelSubject(model).imagine([text, text], [3, 4]).astype(int)
    assert np.abs(imagined[1] - model.session(4).reset(text=text)).max() <= 1
    assert np.abs(imagined[0] - imagined[1]).max() > 1


def test_reading_a_batch_is_reading_one(model: WorldModel) -> None:
    clips = [shapes.sample_clip("val", 0, index).clip.first_frame[None] for index in range(3)]
    prompts = ["describe", "how many things are there", "is there a red thing"]
    together = ModelSubject(model).read([(clip,) for clip in clips], prompts)
    for clip, prompt, said in zip(clips, prompts, together, strict=True):
        session = model.session()
        session.reset(clip[0])
        assert session.describe(prompt) == said


def test_zero_steps_shows_the_forecast(model: WorldModel) -> None:
    image = shapes.render(shapes.random_scene(np.random.default_rng(0)))[None]
    forecast, again, denoised = (
        ModelSubject(model, steps).open(image, [seed]).step([Action("the red ball jumps")])
        for steps, seed in ((0, 1), (0, 2), (1, 1))
    )
    assert (forecast == again).all()
    assert (forecast != denoised).any()


def test_nearest_background() -> None:
    for index in range(40):
        scene = shapes.random_scene(np.random.default_rng(index), 4)
        assert images.nearest_background(shapes.render(scene)) == scene.background


def test_questions_have_kinds() -> None:
    scene = shapes.random_scene(np.random.default_rng(0), 4)
    rng = np.random.default_rng(0)
    kinds = {language.question_kind(shapes.question(scene, rng)[0]) for _ in range(200)}
    assert "other" not in kinds
    assert len(kinds) == 7


def test_control_texts_have_another_meaning() -> None:
    samples = cases.samples_of("val", SEED, 12)
    for index, sample in enumerate(samples):
        other = shapes.parse(cases.other_text(samples, index))
        assert shapes.canonical_text(other) != shapes.canonical_text(sample.clip.plan)


@pytest.mark.slow
def test_a_random_model_end_to_end(model: WorldModel, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model.save_pretrained(tmp_path / "random")
    argv = ["eval", str(tmp_path / "random"), "--num-samples", "2", "--rounds", "2"]
    report, file = tmp_path / "report", tmp_path / "figures.json"
    assert main([*argv, "--report", str(report), "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "Held-out combinations" in shown
    assert "report:" in shown
    results = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert results["figures"]["speed"]["fps"]["value"] > 0
    assert main([*argv, "--report", str(tmp_path / "second")]) == 0
    said = capsys.readouterr().err.splitlines()  # not a terminal
    assert said[0].startswith("evaluating random") and sum(": measured after" in line for line in said) >= 5
    assert set(results["settings"]) >= {"seed", "num_samples", "rounds", "num_inference_steps"}
    page = (report / "index.html").read_text()
    assert "$" not in page
    assert "http" not in page
    assert all((report / f"{name}.png").stat().st_size > 5000 for name in ("rounds", "steps", "verbs-val"))
    training = {"command": "make train-tiny", "stages": {"codec": {"steps": 3}}}
    runs = [run_of(results)]
    card = model_card(runs, "runs/mine/model", SUITE.card, training)
    for part in (
        "codec (3 steps)",
        "make train-tiny",
        "## Limits",
        "worldmodel eval runs/mine/model",
        "worldmodel verify runs/mine/model",
        "(missed)",
    ):
        assert part in card
    text = card.partition("\n---\n")[2]
    assert len(text.split()) <= 900  # a card of all 40 figures; those of one world have fewer
    assert text.count("| Figure |") == 1
    assert model_card(runs, "shapes-tiny", SUITE.card)


@pytest.mark.slow
def test_an_interrupted_evaluation_leaves_what_it_measured(
    model: WorldModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    model.save_pretrained(tmp_path / "random")
    monkeypatch.chdir(tmp_path)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("worldmodel.eval.suite.speed", interrupted)  # the last part
    argv = ["eval", "random", "--num-samples", "1", "--rounds", "1"]
    assert main(argv) == 130
    page = (tmp_path / "outputs" / "eval-random" / "index.html").read_text()
    assert "Held-out combinations" in page
    # A split has a report of its own.
    assert main([*argv, "--split", "held-out"]) == 0
    assert "eval-random-held-out" in capsys.readouterr().out
    assert (tmp_path / "outputs" / "eval-random" / "index.html").read_text() == page


def test_the_card_of_a_saved_model_has_the_measured_figures(
    model: WorldModel, true_subject: TrueSubject, tmp_path: Path
) -> None:
    results = evaluate(true_subject, EvalSettings("held-out", 4, seed=SEED), SUITE)
    card = model_card([run_of(results)], "mine", SUITE.card, config=model.config)
    folder = model.save_pretrained(tmp_path / "mine", card=card)
    data: Any = ModelCard.load(folder / "README.md").data
    assert (data.license, data.library_name, data.model_name) == ("apache-2.0", "worldmodel", "mine")
    assert set(data.tags) >= {"world-model", "any-to-any", "flow-matching"}
    figures = results["figures"]["action_following"]["held-out"]
    goals = [goal for goal in SUITE.goals if goal.path[:2] == ("action_following", "held-out")]
    shown = [goal for goal in goals if (goal.at_least, goal.at_most) != (None, None)]
    expected = {goal.title: figures[goal.path[2]]["value"] for goal in shown}
    assert {each.metric_name: each.metric_value for each in data.eval_results} == expected
    assert len(expected) == 3


def test_tags_of_a_card_say_what_the_model_can_do() -> None:
    config = WorldModelConfig(
        generator=None, num_inference_steps=0, action=ActionConfig(text=False, keys=["left"])
    )
    data: Any = ModelCard(card_text("keys", "", config)).data
    assert data.tags == ["world-model", "video-generation", "image-to-video"]


def test_settings_of_results_name_the_steps_taken(model: WorldModel) -> None:
    assert model.config.num_inference_steps
    for steps, expected in ((0, 0), (2, 2), (None, model.config.num_inference_steps)):
        results = evaluate(model, EvalSettings("held-out", 1, seed=SEED, num_inference_steps=steps), SUITE)
        assert results["settings"]["num_inference_steps"] == expected


def test_one_split_alone(true_subject: TrueSubject) -> None:
    results = evaluate(true_subject, EvalSettings("held-out", 4, seed=SEED), SUITE)
    assert list(results["figures"]) == ["action_following"]
    assert list(results["figures"]["action_following"]) == ["held-out"]
    again = evaluate(true_subject, EvalSettings("held-out", 4, seed=SEED), SUITE)
    machine = {"machine": None}  # whose load changes from moment to moment
    assert again | machine == results | machine


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--num-samples", "0"], "num_samples is 0"),
        (["--rounds", "-1"], "rounds is -1"),
        (["--num-inference-steps", "-1"], "num_inference_steps is -1"),
        (["--split", "test"], "test"),
        (["--num-samples", "many"], "invalid int value"),
        (["--report", __file__], "is a file"),
    ],
)
def test_bad_values_are_one_sentence(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    assert main(["eval", "shapes-tiny", "--report", str(tmp_path / "report"), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_unknown_model(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    assert main(["eval", "no-such-model", "--report", str(tmp_path / "report")]) == 2
    assert "no-such-model" in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


def test_report_replaces_reports_only(truth: dict, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    write_report(truth, folder)
    page = write_report(truth, folder)
    assert page == folder / "index.html"
    assert [path.name for path in tmp_path.iterdir()] == ["report"]
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("words")
    with pytest.raises(OutputError, match="mine"):
        write_report(truth, mine)
    assert (mine / "thesis.txt").is_file()


def test_a_failed_report_leaves_the_old_one(
    truth: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = write_report(truth, tmp_path / "report")
    before = page.read_text()

    def full(*_: object, **__: object) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("worldmodel.eval.charts.Chart.draw", full)
    with pytest.raises(OutputError, match="No space left"):
        write_report(truth, tmp_path / "report")
    assert page.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_texts_are_escaped(truth: dict, tmp_path: Path) -> None:
    hostile = {**truth, "model": "<script>x</script>"}
    hostile["examples"] = [{**truth["examples"][0], "caption": "<img src=x>", "note": "a & b\0"}]
    page = write_report(hostile, tmp_path / "report").read_text()
    assert "<script" not in page
    assert "<img src=x" not in page
    assert "a &amp; b" in page


def test_tables_of_a_split_are_in_every_report(truth: dict, tmp_path: Path) -> None:
    page = write_report(truth, tmp_path / "report").read_text()
    by_title = {table["title"]: Table.from_json(table) for table in truth["tables"]}
    following = truth["figures"]["action_following"]["paraphrases"]
    kinds = {row.title: row for row in by_title["Paraphrases, by kind"].rows}
    for kind, rates in following["by_kind"].items():
        row = kinds[f"{kind}: named object right"]
        assert row.figure == rates["named"]
        assert row.baselines == {"0 steps": rates["forecast_named"], "copy": rates["copy_named"]}
        assert f"<tr><td>{kind}: named object right<td class" in page
    confused = by_title["Paraphrases, confusions"].rows
    assert {row.title: row.figure["n"] for row in confused} == {
        asked: sum(shown.values()) for asked, shown in following["confusion"].items()
    }
    assert all(row.figure["value"] == 1 and not row.note for row in confused)


def test_unknown_split_is_an_input_error(true_subject: TrueSubject) -> None:
    with pytest.raises(InputError, match="heldout"):
        evaluate(true_subject, EvalSettings("heldout"), SUITE)


def test_a_model_without_a_world_has_no_suite(model: WorldModel) -> None:
    with pytest.raises(InputError, match="None"):
        suite_of(replace(model.config, world=None))
    with pytest.raises(ConfigError, match="cubes"):
        suite_of(replace(model.config, world="cubes"))


@pytest.mark.parametrize("part", [{"chunk_frames": 4}, {"codec": CodecConfig(image_size=32)}])
def test_frames_that_the_world_cannot_judge(model: WorldModel, part: dict) -> None:
    with pytest.raises(InputError, match="model"):
        suite_of(replace(model.config, **part))
