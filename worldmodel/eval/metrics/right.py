"""Verdict of a judge that compares the last frame with the recorded one."""

from collections.abc import Sequence

from worldmodel.eval.metrics import Metric, Played


class Right(Metric):
    """The whole last frame is right by the judge."""

    name, title = "right", "right by the judge"

    def __call__(self, played: Played) -> Sequence[bool]:
        return [bool(verdict.strict) for verdict in played.verdicts]
