"""The error where actions make a difference."""

from collections.abc import Sequence

from worldmodel.eval.metrics import Metric, Played
from worldmodel.eval.metrics.obeyed import differing, distance


class ErrorThere(Metric):
    """Error of the model's two films over that of a copy of the last frame, where the truths differ."""

    name, title, unit = "error_there", "error there, of a copy's", ""

    def __call__(self, played: Played) -> Sequence[float]:
        return [
            distance((pair.made, pair.true), (pair.other_made, pair.other_true))
            / distance((pair.before, pair.true), (pair.before, pair.other_true))
            for pair in differing(played)
        ]
