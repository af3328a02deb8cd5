"""Verdict of the judge on the last frame: `others`."""

from collections.abc import Sequence

from worldmodel.eval.metrics import Metric, Played


class Others(Metric):
    """Everything that the action does not name is right in the last frame."""

    name, title = "others", "other objects right"

    def __call__(self, played: Played) -> Sequence[bool]:
        return [bool(verdict.others) for verdict in played.verdicts]
