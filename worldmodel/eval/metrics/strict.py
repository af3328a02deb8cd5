"""Verdict of the judge on the last frame: `strict`."""

from collections.abc import Sequence

from worldmodel.eval.metrics import Metric, Played


class Strict(Metric):
    """The whole last frame is right."""

    name, title, baseline = "strict", "whole frame right", True

    def __call__(self, played: Played) -> Sequence[bool]:
        return [bool(verdict.strict) for verdict in played.verdicts]
