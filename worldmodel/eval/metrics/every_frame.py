"""Verdict of the judge on all frames of a round."""

from collections.abc import Sequence

from worldmodel.eval.metrics import Metric, Played


class EveryFrame(Metric):
    """Every frame of the round is right; frames whose truth the judge cannot read are skipped."""

    name, title = "every_frame", "every frame right"

    def __call__(self, played: Played) -> Sequence[bool]:
        return [_every_frame(played, world) for world in range(len(played.clips))]


def _every_frame(played: Played, world: int) -> bool:
    if not played.verdicts[world].strict:
        return False
    # The truth of a frame in which objects overlap cannot always be read back, even from the true pixels.
    return all(
        played.verdict(world, frame).strict or not played.readable(world, frame)
        for frame in range(played.clips.shape[1])
    )
