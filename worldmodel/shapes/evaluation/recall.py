"""Recall: questions that only the earlier rounds of a world can answer."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from worldmodel.eval.action_following import BATCH
from worldmodel.eval.examples import Album, Example
from worldmodel.eval.figures import Tally
from worldmodel.eval.runner import Subject
from worldmodel.shapes.controls import action_of
from worldmodel.shapes.physics import FRAMES_PER_CLIP
from worldmodel.shapes.recall import KINDS, sample_recall

RECALL_ROUNDS = (1, 3)


def recalled(
    subject: Subject,
    count: int,
    seed: int,
    album: Album | None = None,
    recall_rounds: Sequence[int] = RECALL_ROUNDS,
) -> dict[str, Any]:
    """Let a model observe or play rounds, and ask what is in none of the newest pixels.

    Films are observed, and other rounds are the model's own.

    Returns:
        By kind of question and number of rounds: the rates `right` (the answer is equal to the true one) and
        `alone`, the same of the model that is shown the newest observation alone.
    """
    figures: dict[str, Any] = {}
    for kind in KINDS:
        for rounds in recall_rounds:
            tally = Tally()
            for start in range(0, count, BATCH):
                indices = range(start, min(start + BATCH, count))
                asked = [sample_recall(seed, index, rounds, kind) for index in indices]
                seeds = [seed + index for index in indices]
                firsts = np.stack([each.samples[0].clip.first_frame for each in asked])
                films = np.stack(
                    [np.concatenate([sample.clip.frames for sample in each.samples]) for each in asked]
                )
                done = [[action_of(sample) for sample in each.samples] for each in asked]
                if kind == "a film":
                    shown = np.concatenate([firsts[:, None], films], axis=1)
                    worlds, newest = subject.open(shown, seeds, done), films[:, -FRAMES_PER_CLIP:]
                else:
                    worlds, newest = subject.open(firsts, seeds), firsts[:, None]
                    for actions in zip(*done, strict=True):
                        newest = worlds.step(actions)
                prompts = [each.prompt for each in asked]
                said, alone = worlds.ask(prompts), subject.read([(clip,) for clip in newest], prompts)
                for each, answer, without in zip(asked, said, alone, strict=True):
                    right = answer.strip() == each.answer
                    tally.count(right=right, alone=without.strip() == each.answer)
                    if album is not None:
                        frames = np.concatenate([sample.clip.frames[-1:] for sample in each.samples])
                        note = f"says: {answer}" if right else f"says: {answer} (true: {each.answer})"
                        album.add(Example("recall", each.prompt, right, frames, None, note))
            figures[f"{kind}, {rounds} rounds"] = tally.figures()
    return figures
