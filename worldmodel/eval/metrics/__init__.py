"""Metrics: what is measured on played rounds.

A metric reads a batch of rounds beside their truth and returns one value for each. To add one, write a
subclass of `Metric`, in this folder with its name in `METRICS` or in a package of your own, and pass its name
or `MODULE:CLASS` to `worldmodel eval --metric`, or add it to the list of a suite. Packages can also register
metrics under the entry point group `worldmodel.metrics`. Tables, intervals, the report and JSON follow from
the attributes of the class.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any, ClassVar

import numpy as np

from worldmodel.actions import Action
from worldmodel.config.imports import import_object
from worldmodel.errors import InputError
from worldmodel.eval.figures import Figure, bootstrap_figure, rate_figure
from worldmodel.eval.judge import Judge, Verdict
from worldmodel.eval.table import Unit

GROUP = "worldmodel.metrics"
"""Entry point group of metrics in other packages."""
METRICS = {
    "named": f"{__name__}.verdicts:Named",
    "others": f"{__name__}.verdicts:Others",
    "strict": f"{__name__}.verdicts:Strict",
    "right": f"{__name__}.verdicts:Right",
    "every_frame": f"{__name__}.verdicts:EveryFrame",
    "obeyed": f"{__name__}.twins:Obeyed",
    "contrast": f"{__name__}.twins:Contrast",
    "error_there": f"{__name__}.twins:ErrorThere",
    "psnr": f"{__name__}.psnr:Psnr",
    "ssim": f"{__name__}.ssim:Ssim",
    "sharpness": f"{__name__}.sharpness:Sharpness",
    "perceptual": f"{__name__}.perceptual:Perceptual",
}
"""Metrics of this package."""


@dataclass(frozen=True)
class Played:
    """One round of a batch of worlds, with its truth.

    Attributes:
        starts: The frame before the round of every world, as it was played: uint8 `[b, h, w, 3]`.
        clips: The frames of the round, uint8 `[b, t, h, w, 3]`.
        truth: The true frames of the round, uint8 `[b, t, h, w, 3]`.
        actions: The action of every world.
        truths: For every world, the truth of each frame as the judge reads it; the true frames by default.
        judge: The judge of the world; None if it has none.
        twin: The same worlds under other actions, with the truth of these; None if it is not known.
    """

    starts: np.ndarray
    clips: np.ndarray
    truth: np.ndarray
    actions: Sequence[Action]
    truths: Sequence[Sequence[Any]] = ()
    judge: Judge | None = None
    twin: "Played | None" = None

    def verdict(self, world: int, frame: int = -1) -> Verdict:
        """Return the judge's verdict on a frame of a world."""
        assert self.judge is not None, "the suite has no judge"
        return self.judge(self.clips[world, frame], self._truth(world, frame))

    def readable(self, world: int, frame: int) -> bool:
        """Return whether the judge recognises the truth in the true frame itself."""
        assert self.judge is not None, "the suite has no judge"
        return self.judge(self.truth[world, frame], self._truth(world, frame)).strict

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """The verdicts on the last frames."""
        return [self.verdict(world) for world in range(len(self.clips))]

    def copied(self) -> "Played":
        """Return the same round of a model that repeats the frame before it."""
        still = np.repeat(self.starts[:, None], self.truth.shape[1], axis=1)
        return Played(self.starts, still, self.truth, self.actions, self.truths, self.judge)

    def _truth(self, world: int, frame: int) -> Any:
        return (self.truths or self.truth)[world][frame]


class Metric(ABC):
    """A value of every played round, and how it is reported.

    Attributes:
        name: Key in the results, and name on the command line.
        title: Title in tables.
        unit: Unit; shares are shown as percent.
        baseline: Whether action following also reports it for a copy of the first frame and for the forecast
            without the generator, and by verb and kind of action.
        of_truth: Whether the metric is also defined on the true frames themselves.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    unit: ClassVar[Unit] = "%"
    baseline: ClassVar[bool] = False
    of_truth: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, played: Played) -> Sequence[float | bool]:
        """Return a number or a yes-or-no answer for every world of the batch."""

    def figure(self, values: Sequence[float | bool]) -> Figure:
        """Return the mean with its 95 % interval: Wilson's for answers, a bootstrap for numbers."""
        if isinstance(values[0], bool):
            return rate_figure(int(sum(values)), len(values))
        return bootstrap_figure(values)


Metrics = Sequence[Metric]


def metric_names() -> list[str]:
    """Return the names of all metrics that can be named without `module:Class`."""
    return sorted(_known())


def _known() -> dict[str, str]:
    """Return metrics as `module:Class` by name; no other package changes one of ours."""
    return {**{point.name: point.value for point in entry_points(group=GROUP)}, **METRICS}


def get_metric(name: str) -> Metric:
    """Return a metric by its name, or by `module:Class`.

    Raises:
        InputError: There is no such metric, or it takes arguments (`perceptual` has an option of its own).
    """
    known = _known()
    if name not in known and ":" not in name:
        raise InputError(
            f"There is no metric {name!r}; use one of {', '.join(sorted(known))}, or MODULE:CLASS."
        )
    try:
        found: Any = import_object(known.get(name, name))
        metric = found() if isinstance(found, type) else found
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise InputError(
            f"The metric {name!r} cannot be made ({error}); name a subclass of "
            "worldmodel.eval.metrics.Metric that takes no arguments."
        ) from None
    if not isinstance(metric, Metric):
        raise InputError(f"{name!r} is not a metric; name a subclass of worldmodel.eval.metrics.Metric.")
    return metric


def get_metrics(names: Iterable[str]) -> list[Metric]:
    """Return metrics by their names, each once; for errors see `get_metric`."""
    return [get_metric(name) for name in dict.fromkeys(names)]
