"""Samples of the shapes world as cases, and the judge of their frames."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from worldmodel import shapes
from worldmodel.actions import Action
from worldmodel.eval.judge import Case, Verdict
from worldmodel.eval.uncertainty import Outcome, UncertainCase
from worldmodel.media import Frame
from worldmodel.shapes import Plan, Sample, Scene
from worldmodel.shapes.chance import sample_chance
from worldmodel.shapes.source import KEYS

STAY_TEXT = "nothing happens"


class Truth(NamedTuple):
    """The truth of a frame: its scene, and the plan that led to it."""

    scene: Scene
    plan: Plan


def judge_frame(frame: Frame, truth: Truth, /) -> Verdict:
    """Judge a frame; see `worldmodel.eval.judge.Judge`."""
    verdict = shapes.judge(frame, truth.scene)
    named, others = verdict.named_right(truth.plan), verdict.others_right(truth.plan)
    return Verdict(named, others, verdict.strict, _errors(verdict))


def case_of(sample: Sample) -> Case:
    """Return a sample as a case."""
    clip = sample.clip
    return Case(
        sample.text,
        Action(sample.text or None),
        clip.first_frame,
        Truth(clip.before, clip.plan),
        clip.frames,
        [Truth(scene, clip.plan) for scene in clip.scenes],
        tuple({act.verb for act in clip.plan.acts}),
    )


def cases_of(split: str, seed: int, count: int) -> list[Case]:
    """Return the first samples of a split as cases."""
    return [case_of(sample) for sample in samples_of(split, seed, count)]


def chance_cases(seed: int, first: int, count: int) -> list[UncertainCase]:
    """Return chance acts from an index on, with all their outcomes."""
    cases: list[UncertainCase] = []
    for index in range(first, first + count):
        scene, chance = sample_chance(seed, index)
        outcomes: list[Outcome] = []
        for plan, probability in zip(chance.plans, chance.probabilities, strict=True):
            clip = shapes.simulate(scene, plan)
            outcomes.append(Outcome(probability, clip.frames, [Truth(each, plan) for each in clip.scenes]))
        cases.append(
            UncertainCase(chance.text, Action(chance.text), shapes.render(scene), outcomes, chance.kind)
        )
    return cases


def samples_of(split: str, seed: int, count: int) -> list[Sample]:
    """Return the first samples of a split."""
    return [shapes.sample_clip(split, seed, index) for index in range(count)]


def single(sample: Sample) -> bool:
    """Return whether the sample is one act that changes the scene."""
    acts = sample.clip.plan.acts
    return len(acts) == 1 and acts[0].verb != "stay"


def select(split: str, seed: int, count: int, accept: Callable[[Sample], bool] = single) -> list[Sample]:
    """Return the first samples of a split that `accept` accepts; fewer where they are rare."""
    found: list[Sample] = []
    for index in range(20 * count):
        sample = shapes.sample_clip(split, seed, index)
        if accept(sample):
            found.append(sample)
        if len(found) == count:
            break
    return found


def visible(sample: Sample) -> bool:
    """Return whether the first frame would be wrong as the last one."""
    return not shapes.judge(sample.clip.first_frame, sample.clip.after).named_right(sample.clip.plan)


def on_keys(sample: Sample) -> bool:
    """Return whether keys can express the sample's plan."""
    return single(sample) and sample.clip.plan.acts[0].deed in KEYS


def key_case(sample: Sample) -> Case:
    """Return a sample as a case whose action is given by keys."""
    act = sample.clip.plan.acts[0]
    assert act.target_colour is not None
    keys = (act.target_colour, act.deed)
    return replace(case_of(sample), caption=" + ".join(keys), action=Action(keys=keys))


def still_case(sample: Sample, action: Action) -> Case:
    """Return a case that starts like the sample and in which nothing happens."""
    clip = sample.clip
    frames = np.repeat(clip.first_frame[None], len(clip.frames), axis=0)
    before = Truth(clip.before, shapes.STAY)
    return Case(str(action), action, clip.first_frame, before, frames, [before] * len(frames))


def other_text(samples: list[Sample], index: int) -> str:
    """Return the text of the next sample that has another meaning."""
    own = shapes.canonical_text(samples[index].clip.plan)
    ring = (samples[(index + step) % len(samples)] for step in range(1, len(samples)))
    texts = (other.text for other in ring if shapes.canonical_text(other.clip.plan) != own)
    return next(texts, STAY_TEXT)


def _errors(verdict: shapes.Verdict) -> str:
    """Describe the errors of a frame."""
    errors: list[str] = []
    for obj in verdict.objects:
        if obj.right:
            continue
        faults = ["missing"]
        if obj.present:
            checks = {"place": obj.place, "size": obj.size, "shape": obj.shape}
            faults = [name for name, right in checks.items() if not right]
        errors.append(f"{obj.colour}: {', '.join(faults)}")
    errors += [f"{colour}: should not be there" for colour in verdict.extra]
    return "; ".join(errors)
