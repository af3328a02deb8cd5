"""Verdict of the judge on the last frame: `named`."""

from collections.abc import Sequence

from worldmodel.eval.metrics import Metric, Played


class Named(Metric):
    """Everything that the action names is right in the last frame."""

    name, title, baseline = "named", "named object right", True

    def __call__(self, played: Played) -> Sequence[bool]:
        return [bool(verdict.named) for verdict in played.verdicts]
