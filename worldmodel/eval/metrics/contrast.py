"""How far apart two actions bring a model's films."""

from collections.abc import Sequence

from worldmodel.eval.metrics import Metric, Played
from worldmodel.eval.metrics.obeyed import differing, distance


class Contrast(Metric):
    """Distance of the model's two films over that of their truths, where these differ: 1 for the truth."""

    name, title, unit = "contrast", "contrast", ""

    def __call__(self, played: Played) -> Sequence[float]:
        return [
            distance((pair.made, pair.other_made)) / distance((pair.true, pair.other_true))
            for pair in differing(played)
        ]
