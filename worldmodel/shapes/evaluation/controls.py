"""Controls: what a mouse, a vector and a camera do, and objects that the camera left and came back to."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from worldmodel import shapes
from worldmodel.actions import Action
from worldmodel.actions.words import say, understand
from worldmodel.config import ActionConfig
from worldmodel.episodes import WHAT_HAPPENED
from worldmodel.eval.action_following import BATCH
from worldmodel.eval.examples import Album, Example
from worldmodel.eval.figures import Tally
from worldmodel.eval.runner import Subject
from worldmodel.media import Frame
from worldmodel.shapes import Clip
from worldmodel.shapes.controls import (
    KINDS,
    MAX_PUSH,
    action_of,
    sample_away_rollout,
    sample_controls_rollout,
    seen_action,
)
from worldmodel.shapes.judge import PLACE_TOLERANCE, ObjectVerdict
from worldmodel.shapes.scene import COLOURS

AWAY_ROUNDS = (1, 4, 8)
TAKES = ActionConfig(keys=list(COLOURS), vector={"low": [-MAX_PUSH] * 2, "high": [MAX_PUSH] * 2}, camera=True)
"""What answers about controls can name; a drag of an object looks like a push of it."""
PIXEL = 1.0
"""Distance up to which an object is where the camera shows it, in pixels."""


def controlled(
    subject: Subject, count: int, seed: int, album: Album | None = None, kinds: Sequence[str] = KINDS
) -> dict[str, Any]:
    """Play one round of every kind of control, and judge its last frame.

    Returns:
        By kind: the rates `moved` (everything that changed its place is right: colour, shape, size, and place
        within 3 pixels), `pixel` (every object is right, within one pixel), `strict` (the whole frame is
        right, within 3 pixels), and the same of a copy of the first frame, `copy_moved` and so on.
    """
    figures: dict[str, Any] = {}
    for kind in kinds:
        tally = Tally()
        for start in range(0, count, BATCH):
            indices = range(start, min(start + BATCH, count))
            samples = [sample_controls_rollout(seed, index, 1, kind)[0] for index in indices]
            clips = [sample.clip for sample in samples]
            worlds = subject.open(
                np.stack([clip.first_frame for clip in clips]), [seed + index for index in indices]
            )
            made = worlds.step([action_of(sample) for sample in samples])
            for sample, clip, frames in zip(samples, clips, made, strict=True):
                found, copied = rates(frames[-1], clip), rates(clip.first_frame, clip)
                tally.count(**found, **{f"copy_{name}": right for name, right in copied.items()})
                if album is not None:
                    caption = str(action_of(sample))
                    album.add(Example(f"controls, {kind}", caption, found["strict"], clip.frames, frames))
        figures[kind] = tally.figures()
    return figures


def recognised(
    subject: Subject, count: int, seed: int, album: Album | None = None, kinds: Sequence[str] = KINDS
) -> dict[str, Any]:
    """Ask which controls led from a picture to the clip after it.

    Returns:
        By kind: the rates `right` (the same action, ways within 3 pixels), and `copy_right`, of the answer
        that nothing happens.
    """
    figures: dict[str, Any] = {}
    for kind in kinds:
        tally = Tally()
        for start in range(0, count, BATCH):
            indices = range(start, min(start + BATCH, count))
            clips = [sample_controls_rollout(seed, index, 1, kind)[0].clip for index in indices]
            shown = [(clip.first_frame[None], clip.frames) for clip in clips]
            answers = subject.read(shown, [WHAT_HAPPENED] * len(shown))
            for clip, said in zip(clips, answers, strict=True):
                truth = seen_action(clip)
                right = same_action(understand(said, TAKES), truth)
                tally.count(right=right, copy_right=same_action(Action(), truth))
                if album is not None:
                    note = f"says: {said}" if right else f"says: {said} (true: {say(truth)})"
                    seen = np.concatenate([clip.first_frame[None], clip.frames])
                    album.add(
                        Example("inverse dynamics, controls", "what happened?", right, seen, None, note)
                    )
        figures[kind] = tally.figures()
    return figures


def same_action(found: Action, truth: Action) -> bool:
    """Return whether two actions have the same words and keys, and ways within 3 pixels."""
    return (found.text, found.keys) == (truth.text, truth.keys) and all(
        abs(a - b) <= PLACE_TOLERANCE for a, b in zip(_ways(found), _ways(truth), strict=True)
    )


def _ways(action: Action) -> tuple[float, ...]:
    """Return the numbers of an action in pixels, and of its magnification in parts of a 64th."""
    moved = (0.0, 0.0, 0.0) if action.camera is None else action.camera.pose.translation
    return *(action.vector or (0.0, 0.0)), *(shapes.FRAME_SIZE * each for each in moved)


def rates(frame: Frame, clip: Clip) -> dict[str, bool]:
    """Return whether what moved, every object within a pixel, and the whole frame are right."""
    verdict = shapes.judge(frame, clip.after)
    before = shapes.as_seen(clip.before)
    after = shapes.as_seen(clip.after)
    moved = {obj.colour for obj in after.objects if before.find(obj.colour) != obj}
    near = all(_is_right(obj, PIXEL) for obj in verdict.objects)
    return {
        "moved": all(_is_right(obj, PLACE_TOLERANCE) for obj in verdict.objects if obj.colour in moved),
        "pixel": near and not verdict.extra,
        "strict": verdict.strict,
    }


def _is_right(obj: ObjectVerdict, pixels: float) -> bool:
    return obj.exempt or (obj.present and obj.size and obj.shape and obj.distance <= pixels)


def camera_away(
    subject: Subject,
    count: int,
    seed: int,
    album: Album | None = None,
    away_rounds: Sequence[int] = AWAY_ROUNDS,
) -> dict[str, Any]:
    """Let the camera leave objects, play rounds with other acts, come back, and judge the last frame.

    Returns:
        By number of rounds: the rates `named` (all objects that were out of view are as they were), `strict`
        (the whole frame is right) and `forgotten_named`, which is `named` for the same model when it starts
        from its own last frame before the way back, so that it remembers nothing. Rollouts after which
        nothing comes back do not count.
    """
    figures: dict[str, Any] = {}
    for away in away_rounds:
        tally = Tally()
        for start in range(0, count, BATCH):
            indices = range(start, min(start + BATCH, count))
            rollouts = [sample_away_rollout(seed, index, away + 1, away) for index in indices]
            seeds = [seed + index for index in indices]
            images = np.stack([rollout[0].clip.first_frame for rollout in rollouts])
            worlds = subject.open(images, seeds)
            for number in range(away):
                images = worlds.step([action_of(rollout[number]) for rollout in rollouts])[:, -1]
            back = [action_of(rollout[-1]) for rollout in rollouts]
            forgotten = subject.open(images, seeds).step(back)
            for rollout, made, without in zip(rollouts, worlds.step(back), forgotten, strict=True):
                clip = rollout[-1].clip
                gone = _out_of_view(clip)
                if not gone:
                    continue
                right = _right(made[-1], clip, gone)
                strict = shapes.judge(made[-1], clip.after).strict
                tally.count(named=right, strict=strict, forgotten_named=_right(without[-1], clip, gone))
                if album is not None:
                    caption = f"the camera comes back (rounds away: {away})"
                    album.add(Example("camera away", caption, strict, clip.frames, made))
        figures[f"rounds away: {away}"] = tally.figures()
    return figures


def _out_of_view(clip: Clip) -> set[str]:
    """Return the colours of the objects that come back into view, of which nothing was to be seen before."""
    seen = {found.colour for found in shapes.find_objects(clip.first_frame, clip.before.background)}
    back = {obj.colour for obj in shapes.in_view(clip.after)}
    return back - seen


def _right(frame: Frame, clip: Clip, colours: set[str]) -> bool:
    verdict = shapes.judge(frame, clip.after)
    return all(obj.right for obj in verdict.objects if obj.colour in colours)
