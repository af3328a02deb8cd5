"""Films: an object that moved before the last frame keeps moving in its direction."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from worldmodel.actions import Action
from worldmodel.eval.action_following import BATCH
from worldmodel.eval.examples import Album, Example
from worldmodel.eval.figures import Tally
from worldmodel.eval.judge import Judge
from worldmodel.eval.runner import Subject
from worldmodel.shapes.evaluation.cases import case_of
from worldmodel.shapes.films import MAX_FILM_ROUNDS, sample_film_pair

FILM_ROUNDS = tuple(range(1, MAX_FILM_ROUNDS + 1))


def film_continuations(
    subject: Subject,
    judge: Judge,
    count: int,
    seed: int,
    album: Album | None = None,
    film_rounds: Sequence[int] = FILM_ROUNDS,
) -> dict[str, Any]:
    """Start worlds from pairs of films with the same last frame, and judge the last frame of one more round.

    Returns:
        By rounds of the film: the rates `named` (the object has kept moving), `strict` (so the whole
        frame is right), `pairs` (both films of a pair, whose directions differ, are right) and
        `image_named`, which is `named` when the world starts from the last frame alone.
    """
    figures: dict[str, Any] = {}
    for observed in film_rounds:
        tally = Tally()
        for start in range(0, -(-count // 2), BATCH // 2):
            indices = range(start, min(start + BATCH // 2, -(-count // 2)))
            pairs = [sample_film_pair(seed, index, observed) for index in indices]
            samples = [film for pair in pairs for film in pair]
            films = np.stack([_frames(film) for film in samples])
            seeds = [seed + index for index in indices for _ in range(2)]
            actions = [Action()] * len(films)
            made = subject.open(films, seeds).step(actions)
            alone = subject.open(films[:, -1], seeds).step(actions)
            named: list[bool] = []
            for film, clip, without in zip(samples, made, alone, strict=True):
                case = case_of(film[-1])
                truth = case.truths[-1]
                verdict = judge(clip[-1], truth)
                named.append(verdict.named)
                tally.count(
                    named=verdict.named, strict=verdict.strict, image_named=judge(without[-1], truth).named
                )
                if album is not None:
                    caption = f"after a film of {observed} rounds"
                    album.add(Example("films", caption, verdict.strict, case.frames, clip, verdict.note))
            for first, second in zip(named[::2], named[1::2], strict=True):
                tally.count(pairs=first and second)
        figures[f"rounds of film: {observed}"] = tally.figures()
    return figures


def _frames(film: Sequence[Any]) -> np.ndarray:
    """Return the frames of a film, without the frames of its last sample."""
    return np.concatenate([film[0].clip.first_frame[None], *(sample.clip.frames for sample in film[:-1])])
