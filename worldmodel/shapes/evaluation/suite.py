"""The evaluation suite of the shapes world: judge, goals and measurements."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from worldmodel import shapes
from worldmodel.actions import Action
from worldmodel.config import WorldModelConfig, height_width
from worldmodel.errors import InputError
from worldmodel.eval.action_following import (
    METRICS,
    STEPS,
    action_following,
    control,
    following_charts,
    following_tables,
    null_action,
    steps_charts,
    steps_tables,
    steps_vs_quality,
    verdict_rates,
)
from worldmodel.eval.codec import METRICS as CODEC_METRICS
from worldmodel.eval.codec import codec
from worldmodel.eval.drift import METRICS as ROLLOUT_METRICS
from worldmodel.eval.drift import rollout_charts, rollout_tables, rollouts
from worldmodel.eval.examples import Album
from worldmodel.eval.goals import Goal
from worldmodel.eval.judge import Case, Judge
from worldmodel.eval.metrics import Metrics, get_metrics
from worldmodel.eval.runner import Subject
from worldmodel.eval.suite import CardText, EvalSettings, Part
from worldmodel.eval.uncertainty import SEEDS, uncertain_futures
from worldmodel.eval.uncertainty import STEPS as UNCERTAIN_STEPS
from worldmodel.media import Frame
from worldmodel.shapes.captions import SPLIT as CAPTIONS
from worldmodel.shapes.controls import AWAY, KINDS
from worldmodel.shapes.controls import SPLIT as CONTROLS
from worldmodel.shapes.evaluation import cases, paraphrases
from worldmodel.shapes.evaluation.captions import text_to_video
from worldmodel.shapes.evaluation.card import CARD
from worldmodel.shapes.evaluation.controls import AWAY_ROUNDS, camera_away, controlled, recognised
from worldmodel.shapes.evaluation.films import FILM_ROUNDS, film_continuations
from worldmodel.shapes.evaluation.goals import GOALS
from worldmodel.shapes.evaluation.images import text_to_image
from worldmodel.shapes.evaluation.language import (
    INVERSE_SPLITS,
    describe,
    inverse_dynamics,
    questions,
)
from worldmodel.shapes.evaluation.memory import HIDDEN_ROUNDS, hidden_objects
from worldmodel.shapes.evaluation.recall import RECALL_ROUNDS, recalled
from worldmodel.shapes.evaluation.recognition import recognise
from worldmodel.shapes.films import SPLIT as FILMS
from worldmodel.shapes.memory import SPLIT as MEMORY
from worldmodel.shapes.recall import KINDS as QUESTIONS
from worldmodel.shapes.recall import SPLIT as RECALL
from worldmodel.shapes.source import KEYS

OF_THEIR_OWN = ("chance", MEMORY, CONTROLS, AWAY, RECALL, FILMS, CAPTIONS)
"""Splits that are not measured by how single actions are followed."""


class ShapesSuite:
    """The evaluation suite of the shapes world (`worldmodel.eval.suite.EvalSuite`)."""

    judge: Judge = staticmethod(cases.judge_frame)
    goals: Sequence[Goal] = GOALS
    splits: Mapping[str, str] = {
        "val": "Seen combinations",
        "held-out": "Held-out combinations",
        "compositions": "Two acts in one sentence",
        paraphrases.SPLIT: "Paraphrases",
        "chance": "Acts with several outcomes",
        MEMORY: "Objects that are hidden and shown again",
        CONTROLS: "Mouse, vector and camera",
        AWAY: "Objects that the camera left and came back to",
        RECALL: "Questions about earlier rounds",
        FILMS: "Objects that go on as a film shows",
        CAPTIONS: "Text to video",
    }
    card: CardText = CARD

    def check(self, config: WorldModelConfig) -> None:
        height, width = height_width(config.codec.image_size)
        if (height, width) != (shapes.FRAME_SIZE, shapes.FRAME_SIZE):
            raise InputError(
                f"The shapes world judges frames of {shapes.FRAME_SIZE} x {shapes.FRAME_SIZE} pixels, and "
                f"this model's have {width} x {height} (model.codec.image_size)."
            )
        if config.chunk_frames != shapes.FRAMES_PER_CLIP:
            raise InputError(
                f"The shapes world judges rounds of {shapes.FRAMES_PER_CLIP} frames, and this model's have "
                f"{config.chunk_frames} (model.chunk_frames)."
            )

    def parts(self, settings: EvalSettings, config: WorldModelConfig | None, album: Album) -> list[Part]:
        steps, uncertain_steps = (_steps_of(config, sweep) for sweep in (STEPS, UNCERTAIN_STEPS))
        forecasts = 0 in steps and len(steps) > 1  # a model without a generator shows nothing else
        shown = 1 + forecasts
        count, rounds, seed = settings.num_samples, settings.rounds, settings.seed
        metrics = get_metrics((*METRICS, *settings.metrics))
        by_round = get_metrics((*ROLLOUT_METRICS, *settings.metrics))
        following = [
            Part(
                f"action_following/{split}",
                shown * count,
                partial(self._following, split, count, seed, album, forecasts, metrics),
                partial(following_tables, title=title, metrics=metrics),
                partial(following_charts, name=split, title=title),
            )
            for split, title in self.splits.items()
            if settings.split in (None, split) and split not in OF_THEIR_OWN
        ]
        covered = -(-count // 10)
        sampled = len(uncertain_steps) * (count + covered * SEEDS)
        chance = Part(
            "chance", sampled, lambda s: self._chance(s, count, covered, seed, album, uncertain_steps)
        )
        played = count * (sum(HIDDEN_ROUNDS) + 2 * len(HIDDEN_ROUNDS))
        memory = Part("memory", played, lambda s: hidden_objects(s, self.judge, count, seed, album))
        films = Part(
            "films",
            2 * count * len(FILM_ROUNDS),
            lambda s: film_continuations(s, self.judge, count, seed, album),
        )
        controls = [
            Part("controls", count * len(KINDS), lambda s: controlled(s, count, seed, album)),
            Part("inverse_controls", count * len(KINDS), lambda s: recognised(s, count, seed, album)),
        ]
        back = count * (sum(AWAY_ROUNDS) + 2 * len(AWAY_ROUNDS))
        away = Part("away", back, lambda s: camera_away(s, count, seed, album))
        videos = Part("text_to_video", count, lambda s: text_to_video(s, self.judge, count, seed, album))
        if settings.split is not None:
            alone = {"chance": [chance], MEMORY: [memory], FILMS: [films], CAPTIONS: [videos]}
            asked = count * len(QUESTIONS) * (sum(RECALL_ROUNDS) + 2 * len(RECALL_ROUNDS))
            recall = Part("recall", asked, lambda s: recalled(s, count, seed, album))
            alone |= {CONTROLS: controls, AWAY: [away], RECALL: [recall]}
            return alone.get(settings.split, following)
        pressed = [Part("keys", count, lambda s: self._keys(s, count, seed, album))]
        takes_keys = config is None or set(KEYS) <= set(config.action.keys)
        quarter = -(-count // 4)
        return [
            Part("codec", 2 * count, lambda s: self._codec(s, count, seed, album, settings.metrics)),
            *following,
            Part("control", 2 * count, lambda s: self._control(s, count, seed)),
            Part("null_action", 2 * count, lambda s: self._null_action(s, count, seed, album)),
            *(pressed if takes_keys else []),
            Part(
                "rollouts",
                shown * count * rounds,
                lambda s: self._rollouts(s, count, rounds, seed, album, forecasts, by_round),
                partial(rollout_tables, metrics=by_round),
                partial(rollout_charts, goals=self.goals),
            ),
            Part("text_to_image", count, lambda s: text_to_image(s, count, seed, album)),
            Part("describe", 2 * count, lambda s: describe(s, count, seed, album)),
            Part("questions", count, lambda s: questions(s, count, seed, album)),
            Part("inverse", len(INVERSE_SPLITS) * count, lambda s: inverse_dynamics(s, count, seed, album)),
            Part(
                "steps",
                len(steps) * quarter,
                lambda s: self._steps(s, quarter, seed, steps),
                steps_tables,
                steps_charts,
            ),
        ]

    def session_inputs(self, rng: np.random.Generator, count: int) -> tuple[Frame, list[Action]]:
        scenes = [shapes.random_scene(rng) for _ in range(count)]
        plans = [shapes.sample_plan(rng, scene, "held-out") for scene in scenes]
        texts = [shapes.canonical_text(plan) for plan in plans]
        return shapes.render(shapes.random_scene(rng, 3)), [Action(text) for text in texts]

    def _codec(self, subject: Subject, count: int, seed: int, album: Album, added: Sequence[str]) -> Any:
        metrics = get_metrics((*CODEC_METRICS, *added))
        return codec(subject, cases.cases_of("val", seed, count), self.judge, album, metrics)

    def _following(
        self,
        split: str,
        count: int,
        seed: int,
        album: Album,
        forecasts: bool,
        metrics: Metrics,
        subject: Subject,
    ) -> Any:
        reworded = split == paraphrases.SPLIT
        given = paraphrases.paraphrase_cases(seed, count) if reworded else cases.cases_of(split, seed, count)
        figures = action_following(
            subject,
            given,
            self.judge,
            seed,
            self.splits[split],
            album,
            recognise if reworded else None,
            metrics,
            subject.with_steps(0) if forecasts else None,
        )
        if reworded:
            by_kind = figures["by_kind"]
            figures["by_kind"] = {kind: by_kind[kind] for kind in paraphrases.kinds() if kind in by_kind}
        return figures

    def _control(self, subject: Subject, count: int, seed: int) -> Any:
        samples = cases.select("val", seed, count, cases.visible)
        others = [Action(cases.other_text(samples, index)) for index in range(len(samples))]
        return control(subject, [cases.case_of(sample) for sample in samples], others, self.judge, seed)

    def _null_action(self, subject: Subject, count: int, seed: int, album: Album) -> Any:
        samples = cases.samples_of("val", seed, count)
        actions = {"none": Action(), "text": Action(cases.STAY_TEXT)}
        still = {
            name: [cases.still_case(sample, action) for sample in samples] for name, action in actions.items()
        }
        return null_action(subject, still, self.judge, seed, album)

    def _keys(self, subject: Subject, count: int, seed: int, album: Album) -> Any:
        pressed = [cases.key_case(sample) for sample in cases.select("val", seed, count, cases.on_keys)]
        return verdict_rates(subject, pressed, self.judge, seed, "keys", album)

    def _rollouts(
        self,
        subject: Subject,
        count: int,
        rounds: int,
        seed: int,
        album: Album,
        forecasts: bool,
        metrics: Metrics,
    ) -> Any:
        def sample(index: int) -> list[Case]:
            return [cases.case_of(each) for each in shapes.sample_rollout("single", seed, index, rounds)]

        forecast = subject.with_steps(0) if forecasts else None
        return rollouts(subject, sample, self.judge, count, rounds, seed, album, metrics, forecast)

    def _chance(
        self, subject: Subject, count: int, covered: int, seed: int, album: Album, steps: Sequence[int]
    ) -> Any:
        once, often = cases.chance_cases(seed, 0, count), cases.chance_cases(seed, count, covered)
        return uncertain_futures(subject, once, often, self.judge, seed, album, steps)

    def _steps(self, subject: Subject, count: int, seed: int, steps: Sequence[int]) -> Any:
        return steps_vs_quality(subject, cases.cases_of("held-out", seed, count), self.judge, seed, steps)


def _steps_of(config: WorldModelConfig | None, sweep: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of denoising steps that a model takes; without a generator, 0."""
    if config is None:
        return tuple(sweep)
    return tuple(n for n in sweep if not config.steps_error(n)) if config.generator else (0,)
