"""The evaluation suite of the shapes world: judge, goals and measurements."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from worldmodel.config import WorldModelConfig, height_width
from worldmodel.errors import InputError
from worldmodel.eval.action_following import (
    STEPS,
    action_following,
    control,
    null_action,
    steps_vs_quality,
    verdict_rates,
)
from worldmodel.eval.codec import codec
from worldmodel.eval.drift import rollouts
from worldmodel.eval.examples import Album
from worldmodel.eval.goals import Goal
from worldmodel.eval.judge import Case, Judge
from worldmodel.eval.runner import Subject
from worldmodel.eval.suite import CardText, EvalSettings, Part
from worldmodel.eval.uncertainty import SEEDS, uncertain_futures
from worldmodel.eval.uncertainty import STEPS as UNCERTAIN_STEPS
from worldmodel.media import Frame
from worldmodel.types import Action
from worldmodel.worlds import shapes
from worldmodel.worlds.shapes.captions import SPLIT as CAPTIONS
from worldmodel.worlds.shapes.evaluation import cases, paraphrases
from worldmodel.worlds.shapes.evaluation.captions import text_to_video
from worldmodel.worlds.shapes.evaluation.card import CARD
from worldmodel.worlds.shapes.evaluation.films import FILM_ROUNDS, film_continuations
from worldmodel.worlds.shapes.evaluation.goals import GOALS
from worldmodel.worlds.shapes.evaluation.images import text_to_image
from worldmodel.worlds.shapes.evaluation.language import (
    INVERSE_SPLITS,
    describe,
    inverse_dynamics,
    questions,
)
from worldmodel.worlds.shapes.evaluation.memory import HIDDEN_ROUNDS, hidden_objects
from worldmodel.worlds.shapes.evaluation.recognition import recognise
from worldmodel.worlds.shapes.films import SPLIT as FILMS
from worldmodel.worlds.shapes.memory import SPLIT as MEMORY
from worldmodel.worlds.shapes.source import KEYS


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
        FILMS: "Objects that go on as a film shows",
        CAPTIONS: "Text to video",
    }
    card: CardText = CARD

    def check(self, config: WorldModelConfig) -> None:
        height, width = height_width(config.codec.image_size)
        if (height, width) != (shapes.FRAME_SIZE, shapes.FRAME_SIZE):
            raise InputError(
                f"The shapes world judges frames of {shapes.FRAME_SIZE} x {shapes.FRAME_SIZE} pixels, and "
                f"this model's have {height} x {width} (model.codec.image_size)."
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
        following = [
            Part(
                f"action_following/{split}",
                shown * count,
                partial(self._following, split, count, seed, album, forecasts),
            )
            for split in self.splits
            if settings.split in (None, split) and split not in ("chance", MEMORY, FILMS, CAPTIONS)
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
        videos = Part("text_to_video", count, lambda s: text_to_video(s, self.judge, count, seed, album))
        if settings.split is not None:
            alone = {"chance": [chance], MEMORY: [memory], FILMS: [films], CAPTIONS: [videos]}
            return alone.get(settings.split, following)
        pressed = [Part("keys", count, lambda s: self._keys(s, count, seed, album))]
        takes_keys = config is None or set(KEYS) <= set(config.action.keys)
        quarter = -(-count // 4)
        return [
            Part("codec", 2 * count, lambda s: self._codec(s, count, seed, album)),
            *following,
            Part("control", 2 * count, lambda s: self._control(s, count, seed)),
            Part("null_action", 2 * count, lambda s: self._null_action(s, count, seed, album)),
            *(pressed if takes_keys else []),
            Part(
                "rollouts",
                shown * count * rounds,
                lambda s: self._rollouts(s, count, rounds, seed, album, forecasts),
            ),
            Part("text_to_image", count, lambda s: text_to_image(s, count, seed, album)),
            Part("describe", 2 * count, lambda s: describe(s, count, seed, album)),
            Part("questions", count, lambda s: questions(s, count, seed, album)),
            Part("inverse", len(INVERSE_SPLITS) * count, lambda s: inverse_dynamics(s, count, seed, album)),
            Part("steps", len(steps) * quarter, lambda s: self._steps(s, quarter, seed, steps)),
        ]

    def session_inputs(self, rng: np.random.Generator, count: int) -> tuple[Frame, list[Action]]:
        scenes = [shapes.random_scene(rng) for _ in range(count)]
        plans = [shapes.sample_plan(rng, scene, "held-out") for scene in scenes]
        texts = [shapes.canonical_text(plan) for plan in plans]
        return shapes.render(shapes.random_scene(rng, 3)), [Action(text) for text in texts]

    def _codec(self, subject: Subject, count: int, seed: int, album: Album) -> Any:
        return codec(subject, cases.cases_of("val", seed, count), self.judge, album)

    def _following(
        self, split: str, count: int, seed: int, album: Album, forecasts: bool, subject: Subject
    ) -> Any:
        reworded = split == paraphrases.SPLIT
        given = paraphrases.paraphrase_cases(seed, count) if reworded else cases.cases_of(split, seed, count)
        follow = partial(action_following, cases=given, judge=self.judge, seed=seed)
        figures = follow(subject, name=split, album=album, recognise=recognise if reworded else None)
        if forecasts:
            forecast = follow(subject.with_steps(0))
            figures |= _of_forecast(forecast)
            for kind, rates in figures.get("by_kind", {}).items():
                rates |= _of_forecast(forecast["by_kind"][kind])
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
        self, subject: Subject, count: int, rounds: int, seed: int, album: Album, forecasts: bool
    ) -> Any:
        def sample(index: int) -> list[Case]:
            return [cases.case_of(each) for each in shapes.sample_rollout("single", seed, index, rounds)]

        figures = rollouts(subject, sample, self.judge, count, rounds, seed, album)
        if forecasts:
            figures |= _of_forecast(rollouts(subject.with_steps(0), sample, self.judge, count, rounds, seed))
        return figures

    def _chance(
        self, subject: Subject, count: int, covered: int, seed: int, album: Album, steps: Sequence[int]
    ) -> Any:
        once, often = cases.chance_cases(seed, 0, count), cases.chance_cases(seed, count, covered)
        return uncertain_futures(subject, once, often, self.judge, seed, album, steps)

    def _steps(self, subject: Subject, count: int, seed: int, steps: Sequence[int]) -> Any:
        return steps_vs_quality(subject, cases.cases_of("held-out", seed, count), self.judge, seed, steps)


def _of_forecast(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rates of the forecast without the generator, by the names they have beside the model's."""
    return {f"forecast_{name}": figures[name] for name in ("named", "strict")}


def _steps_of(config: WorldModelConfig | None, sweep: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of denoising steps that a model takes; without a generator, 0."""
    if config is None:
        return tuple(sweep)
    return tuple(n for n in sweep if not config.steps_error(n)) if config.generator else (0,)
