"""Action following: rounds played from true frames and judged against the true outcome."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from worldmodel.eval.examples import Album, Example
from worldmodel.eval.judge import Case, Judge, Recogniser, Verdict
from worldmodel.eval.metrics import Figure, Tally, psnr, ssim
from worldmodel.eval.runner import Subject
from worldmodel.types import Action

BATCH = 32
STEPS = (0, 1, 2, 4, 8)
"""Numbers of denoising steps to compare; 0 decodes the forecast."""

Figures = dict[str, Figure]


def play_cases(
    subject: Subject, cases: Sequence[Case], judge: Judge, seed: int
) -> Iterator[tuple[Case, np.ndarray, Verdict]]:
    """Play every case and yield it with the model's frames and the verdict on the last one.

    Texts of similar length share a batch.

    Case `i` uses the noise of seed `seed + i`.
    """
    order = sorted(range(len(cases)), key=lambda index: len(cases[index].action.text or ""))
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH]
        worlds = subject.open(np.stack([cases[row].start for row in rows]), [seed + row for row in rows])
        clips = worlds.step([cases[row].action for row in rows])
        for row, frames in zip(rows, clips, strict=True):
            yield cases[row], frames, judge(frames[-1], cases[row].truths[-1])


def action_following(
    subject: Subject,
    cases: Sequence[Case],
    judge: Judge,
    seed: int = 1234,
    name: str = "",
    album: Album | None = None,
    recognise: Recogniser | None = None,
) -> dict[str, Any]:
    """Judge the outcome of actions.

    `named`, `others` and `strict` are the verdict on the last frame; `every_frame` is `strict` in all frames.
    `copy_named` and `copy_strict` are the scores of a model that repeats the first frame. `by_verb` and
    `by_kind` count a case under each of its verbs and kinds; `by_kind` is left out where no case has one.
    `confusion` holds numbers of cases by what was asked for and then by what the frames show.

    Args:
        subject: The model.
        cases: Rounds to play.
        judge: Judge of the world.
        seed: Seed of the noise.
        name: Name of the examples that are kept.
        album: Where examples are kept.
        recognise: Names what frames show, for `confusion`.
    """
    tally, by_verb, by_kind = Tally(), {}, {}
    confusion: dict[str, Counter[str]] = {}
    for case, frames, verdict in play_cases(subject, cases, judge, seed):
        copied = judge(case.start, case.truths[-1])
        rates = {"named": verdict.named, "strict": verdict.strict}
        copies = {"copy_named": copied.named, "copy_strict": copied.strict}
        every_frame = verdict.strict and right_throughout(frames, case, judge)
        tally.count(**rates, others=verdict.others, every_frame=every_frame, **copies)
        tally.measure(psnr=psnr(frames, case.frames), ssim=ssim(frames, case.frames))
        for verb in case.verbs:
            by_verb.setdefault(verb, Tally()).count(**rates)
        for kind in case.kinds:
            by_kind.setdefault(kind, Tally()).count(**rates, **copies)
        if recognise is not None:
            asked, shown = recognise(case, frames)
            confusion.setdefault(asked, Counter())[shown] += 1
        if album is not None:
            album.add(Example(name, case.caption, verdict.strict, case.frames, frames, verdict.note))
    results: dict[str, Any] = {**tally.figures(), "by_verb": _by_name(by_verb)}
    if by_kind:
        results["by_kind"] = _by_name(by_kind)
    if recognise is not None:
        results["confusion"] = {asked: dict(sorted(confusion[asked].items())) for asked in sorted(confusion)}
    return results


def _by_name(tallies: Mapping[str, Tally]) -> dict[str, Figures]:
    return {name: tallies[name].figures() for name in sorted(tallies)}


def right_throughout(frames: np.ndarray, case: Case, judge: Judge) -> bool:
    """Return whether every frame is strictly right; frames whose truth the judge cannot read are skipped."""
    triples = zip(frames, case.frames, case.truths, strict=True)
    return all(judge(made, truth).strict or not judge(true, truth).strict for made, true, truth in triples)


def control(
    subject: Subject, cases: Sequence[Case], others: Sequence[Action], judge: Judge, seed: int = 1234
) -> Figures:
    """Play each case with its own action and with another one; a model that ignores actions scores the same.

    Choose cases that are not right in their first frame, so that a model that does nothing scores 0.
    """
    tally = Tally()
    for _, _, verdict in play_cases(subject, cases, judge, seed):
        tally.count(own_named=verdict.named, own_strict=verdict.strict)
    swapped = [replace(case, action=action) for case, action in zip(cases, others, strict=True)]
    return tally.figures() | verdict_rates(subject, swapped, judge, seed)


def null_action(
    subject: Subject,
    cases: Mapping[str, Sequence[Case]],
    judge: Judge,
    seed: int = 1234,
    album: Album | None = None,
) -> Figures:
    """Play rounds in which nothing may change, for each way of doing nothing; the rates are `strict`."""
    tally = Tally()
    for name, group in cases.items():
        for case, frames, verdict in play_cases(subject, group, judge, seed):
            tally.count(**{name: verdict.strict})
            if album is not None:
                note = verdict.note
                album.add(Example("null action", case.caption, verdict.strict, case.frames, frames, note))
    return tally.figures()


def verdict_rates(
    subject: Subject,
    cases: Sequence[Case],
    judge: Judge,
    seed: int = 1234,
    name: str = "",
    album: Album | None = None,
) -> Figures:
    """Return the rates `named` and `strict` of last frames; an example is right where `named` is."""
    tally = Tally()
    for case, frames, verdict in play_cases(subject, cases, judge, seed):
        tally.count(named=verdict.named, strict=verdict.strict)
        if album is not None:
            album.add(Example(name, case.caption, verdict.named, case.frames, frames, verdict.note))
    return tally.figures()


def steps_vs_quality(
    subject: Subject, cases: Sequence[Case], judge: Judge, seed: int = 1234, steps: Sequence[int] = STEPS
) -> list[dict[str, int | Figure]]:
    """Follow the same actions with different numbers of denoising steps."""
    rows: list[dict[str, int | Figure]] = []
    for count in steps:
        tally = Tally()
        for case, frames, verdict in play_cases(subject.with_steps(count), cases, judge, seed):
            tally.count(named=verdict.named, strict=verdict.strict)
            tally.measure(psnr=psnr(frames, case.frames))
        rows.append({"steps": count, **tally.figures()})
    return rows
