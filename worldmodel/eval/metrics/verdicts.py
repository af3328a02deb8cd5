"""Verdicts of the judge on frames of a round."""

from collections.abc import Sequence

from worldmodel.eval.metrics import Metric, Played


class Named(Metric):
    """Everything that the action names is right in the last frame."""

    name, title, baseline = "named", "named object right", True

    def __call__(self, played: Played) -> Sequence[bool]:
        return [bool(verdict.named) for verdict in played.verdicts]


class Others(Metric):
    """Everything that the action does not name is right in the last frame."""

    name, title, baseline = "others", "other objects right", True

    def __call__(self, played: Played) -> Sequence[bool]:
        return [bool(verdict.others) for verdict in played.verdicts]


class Strict(Metric):
    """The whole last frame is right."""

    name, title, baseline = "strict", "whole frame right", True

    def __call__(self, played: Played) -> Sequence[bool]:
        return [bool(verdict.strict) for verdict in played.verdicts]


class Right(Strict):
    """The whole last frame is right by a judge that compares it with the recorded one."""

    name, title, baseline = "right", "right by the judge", False


class EveryFrame(Metric):
    """Every frame of the round is right; frames whose truth the judge cannot read are skipped."""

    name, title = "every_frame", "every frame right"

    def __call__(self, played: Played) -> Sequence[bool]:
        return [self._right(played, world) for world in range(len(played.clips))]

    @staticmethod
    def _right(played: Played, world: int) -> bool:
        if not played.verdicts[world].strict:
            return False
        # The truth of a frame in which objects overlap cannot always be read back, even from the true pixels.
        return all(
            played.verdict(world, frame).strict or not played.readable(world, frame)
            for frame in range(played.clips.shape[1])
        )
