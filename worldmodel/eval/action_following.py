"""Does the world do what it is told: action following, its controls, and what the number of steps buys."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from worldmodel.eval.examples import Album, Example
from worldmodel.eval.metrics import Figure, Tally, psnr, ssim
from worldmodel.eval.runner import Subject
from worldmodel.types import Action
from worldmodel.worlds import shapes
from worldmodel.worlds.shapes import Clip, Sample, Verdict, judge
from worldmodel.worlds.shapes.source import KEYS

BATCH = 32
STEPS = (0, 1, 2, 4, 8)
"""Denoising steps compared; 0 is the regressed forecast alone."""
STAY_TEXT = "nothing happens"

Figures = dict[str, Figure]
Round = tuple[Sample, np.ndarray]
"""A true sample and the frames that were made of it."""


def samples_of(split: str, seed: int, count: int) -> list[Sample]:
    """Return the first samples of a split."""
    return [shapes.sample_clip(split, seed, index) for index in range(count)]


def single(sample: Sample) -> bool:
    """Whether the sample is one act that changes the scene."""
    acts = sample.clip.plan.acts
    return len(acts) == 1 and acts[0].verb != "stay"


def chosen(split: str, seed: int, count: int, wanted: Callable[[Sample], bool] = single) -> list[Sample]:
    """Return the first samples of a split that `wanted` accepts; fewer where they are rare."""
    found: list[Sample] = []
    for index in range(20 * count):
        sample = shapes.sample_clip(split, seed, index)
        if wanted(sample):
            found.append(sample)
        if len(found) == count:
            break
    return found


def played(
    subject: Subject, samples: Sequence[Sample], actions: Sequence[Action], seed: int
) -> Iterator[Round]:
    """Play every sample's action on its first picture, in batches of texts of like length."""
    order = sorted(range(len(samples)), key=lambda index: len(actions[index].text or ""))
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH]
        pictures = np.stack([samples[row].clip.first_frame for row in rows])
        worlds = subject.open(pictures, [seed + row for row in rows])
        clips = worlds.step([actions[row] for row in rows])
        yield from zip([samples[row] for row in rows], clips, strict=True)


def right_throughout(frames: np.ndarray, clip: Clip) -> bool:
    """Whether every frame is strictly right.

    Where the judge cannot read the true frame itself (a burst or a half-turned colour over another object,
    about one clip in fifty) nothing is asked of that frame.
    """
    trios = zip(frames, clip.frames, clip.scenes, strict=True)
    return all(judge(made, scene).strict or not judge(true, scene).strict for made, true, scene in trios)


def told(samples: Sequence[Sample]) -> list[Action]:
    """Return the samples' own sentences as actions."""
    return [Action(sample.text) for sample in samples]


def action_following(
    subject: Subject, split: str, num_samples: int, seed: int = 1234, album: Album | None = None
) -> dict[str, Figure | dict[str, Figures]]:
    """Judge what sentences do, on the last frame, by what they name, and in every frame.

    `named`: the objects spoken of are right; `others`: all others are, and nothing new is there; `strict`:
    both, all objects within 3 pixels. `every_frame` is strict in all 8 frames, which alone sees a jump in
    full: it ends where it began. `copy_named` and `copy_strict` are what a repeated first frame would get.
    `by_verb` counts a clip under each verb of its plan.
    """
    tally, by_verb = Tally(), {}
    samples = samples_of(split, seed, num_samples)
    for sample, frames in played(subject, samples, told(samples), seed):
        clip, plan = sample.clip, sample.clip.plan
        verdict, copied = judge(frames[-1], clip.after), judge(clip.first_frame, clip.after)
        named = verdict.named_right(plan)
        tally.count(
            named=named,
            others=verdict.others_right(plan),
            strict=verdict.strict,
            every_frame=verdict.strict and right_throughout(frames, clip),
            copy_named=copied.named_right(plan),
            copy_strict=copied.strict,
        )
        tally.measure(psnr=psnr(frames, clip.frames), ssim=ssim(frames, clip.frames))
        for verb in {act.verb for act in plan.acts}:
            by_verb.setdefault(verb, Tally()).count(named=named, strict=verdict.strict)
        if album is not None and album.wants(split, verdict.strict):
            album.add(Example(split, sample.text, verdict.strict, clip.frames, frames, _amiss(verdict)))
    ordered = [verb for verb in shapes.VERBS if verb in by_verb]
    return {**tally.figures(), "by_verb": {verb: by_verb[verb].figures() for verb in ordered}}


def control(subject: Subject, num_samples: int, seed: int = 1234) -> Figures:
    """Play another clip's sentence and judge by the clip's own: a model that listens must fail.

    Only clips whose first frame is not yet right take part, so that doing nothing scores 0.
    """
    samples = chosen("val", seed, num_samples, _visible)
    texts = [sample.text for sample in samples]
    others = [other_text(samples, index) for index in range(len(samples))]
    tally = Tally()
    for name, actions in (("own", texts), ("other", others)):
        for sample, frames in played(subject, samples, [Action(text) for text in actions], seed):
            verdict = judge(frames[-1], sample.clip.after)
            named, strict = verdict.named_right(sample.clip.plan), verdict.strict
            if name == "own":
                tally.count(own_named=named, own_strict=strict)
            else:
                tally.count(named=named, strict=strict)
    return tally.figures()


def null_action(subject: Subject, num_samples: int, seed: int = 1234, album: Album | None = None) -> Figures:
    """Let time pass, without an action and in words: every object must stay as it was."""
    samples, tally = samples_of("val", seed, num_samples), Tally()
    for name, action in (("none", Action()), ("text", Action(STAY_TEXT))):
        for sample, frames in played(subject, samples, [action] * len(samples), seed):
            verdict = judge(frames[-1], sample.clip.before)
            tally.count(**{name: verdict.strict})
            still = np.repeat(sample.clip.first_frame[None], len(frames), axis=0)
            if album is not None and album.wants("null action", verdict.strict):
                note = _amiss(verdict)
                album.add(Example("null action", str(action), verdict.strict, still, frames, note))
    return tally.figures()


def keys(subject: Subject, num_samples: int, seed: int = 1234, album: Album | None = None) -> Figures:
    """Hold a colour's key and press a verb's, for the single acts that keys can say."""
    samples, tally = chosen("val", seed, num_samples, _on_keys), Tally()
    pressed = [Action(keys=_combination(sample)) for sample in samples]
    for sample, frames in played(subject, samples, pressed, seed):
        verdict = judge(frames[-1], sample.clip.after)
        named = verdict.named_right(sample.clip.plan)
        tally.count(named=named, strict=verdict.strict)
        if album is not None and album.wants("keys", named):
            caption = " + ".join(_combination(sample))
            album.add(Example("keys", caption, named, sample.clip.frames, frames, _amiss(verdict)))
    return tally.figures()


def steps_against_quality(
    subject: Subject, num_samples: int, seed: int = 1234, steps: Sequence[int] = STEPS
) -> list[dict[str, int | Figure]]:
    """Follow held-out actions with more and more denoising steps; 0 is the forecast alone."""
    samples = samples_of("held-out", seed, num_samples)
    rows: list[dict[str, int | Figure]] = []
    for count in steps:
        tally = Tally()
        for sample, frames in played(subject.with_steps(count), samples, told(samples), seed):
            verdict = judge(frames[-1], sample.clip.after)
            tally.count(named=verdict.named_right(sample.clip.plan), strict=verdict.strict)
            tally.measure(psnr=psnr(frames, sample.clip.frames))
        rows.append({"steps": count, **tally.figures()})
    return rows


def _visible(sample: Sample) -> bool:
    """Whether the last frame's truth differs from the first frame."""
    return not judge(sample.clip.first_frame, sample.clip.after).named_right(sample.clip.plan)


def other_text(samples: Sequence[Sample], index: int) -> str:
    """Return the text of the next sample that means something else."""
    own = shapes.canonical_text(samples[index].clip.plan)
    ring = (samples[(index + step) % len(samples)] for step in range(1, len(samples)))
    texts = (other.text for other in ring if shapes.canonical_text(other.clip.plan) != own)
    return next(texts, STAY_TEXT)


def _on_keys(sample: Sample) -> bool:
    return single(sample) and sample.clip.plan.acts[0].deed in KEYS


def _combination(sample: Sample) -> tuple[str, str]:
    act = sample.clip.plan.acts[0]
    assert act.target_colour is not None
    return act.target_colour, act.deed


def _amiss(verdict: Verdict) -> str:
    """Say what is wrong with a frame."""
    wrong: list[str] = []
    for thing in verdict.things:
        if thing.right:
            continue
        faults = (("missing", not thing.present), ("place", not thing.place))
        if thing.present:
            faults = (*faults[1:], ("size", not thing.size), ("shape", not thing.shape))
        else:
            faults = faults[:1]
        wrong.append(f"{thing.colour}: {', '.join(name for name, is_so in faults if is_so)}")
    wrong += [f"{colour}: should not be there" for colour in verdict.extra]
    return "; ".join(wrong)
