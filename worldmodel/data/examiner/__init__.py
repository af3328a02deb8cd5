"""Examination of a source before it is trained on: what is in it, whether its actions act, and its faults.

Episodes are read one after another, each to a few kilobytes of measures, at their own frame rate and at most
`opening.MAX_SIDE` pixels wide. All rules compare episodes of one source with each other; their names are in
`docs/reference/data-check.md`, with what each was measured to find.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from worldmodel.actions import control_kinds
from worldmodel.actions.registry import kind_of_spec
from worldmodel.config import DataConfig
from worldmodel.data.examiner.copies import copy_findings, leak_findings
from worldmodel.data.examiner.measures import Measures, labels, measure
from worldmodel.data.examiner.numbers import number_findings, repetition
from worldmodel.data.examiner.opening import Examined, open_config, open_examined
from worldmodel.data.examiner.pictures import picture_findings
from worldmodel.data.examiner.report import Effects, Finding, Report, grouped
from worldmodel.data.examiner.sheet import draw_sheet
from worldmodel.data.examiner.split import Layouts, split
from worldmodel.data.examiner.storage import (
    column_findings,
    lerobot_findings,
    media_findings,
    media_info,
)
from worldmodel.data.examiner.texts import text_findings
from worldmodel.data.examiner.timing import find_lag, lag_findings
from worldmodel.data.lerobot import LeRobotSource
from worldmodel.errors import InputError, WorldModelError
from worldmodel.media import MediaInfo

__all__ = [
    "Effects",
    "Examination",
    "Examined",
    "Finding",
    "Layouts",
    "Report",
    "draw_sheet",
    "examine",
    "glance",
    "labels",
    "leak_findings",
    "most_frequent",
    "open_config",
    "open_examined",
    "repetition",
    "split",
]  # fmt: skip

MAX_EPISODES = 1000
"""Episodes that are read unless more are asked for, spread over the source."""
FEW_EPISODES, FEW_SECONDS = 200, 20.0
"""Episodes of a source that are read before a training, and seconds after which that ends."""
GLANCED = ("clips", "webdataset", "huggingface", "lerobot")
MAX_TEXTS = 10
"""Texts of actions that are counted one by one, the most frequent ones."""
ACTOR_PIXELS = 5
"""Pixels along the shorter side of what moves from which a model of one cell per 8 pixels sees it well."""
SMALL = 1 / 10
"""Share of the shorter side of a frame up to which what moves is small."""
Progress = Callable[[int], object]


@dataclass
class Examination:
    """What was read of a source."""

    examined: Examined
    measures: list[Measures] = field(default_factory=list)
    infos: dict[str, MediaInfo] = field(default_factory=dict)
    broken: list[tuple[str, str]] = field(default_factory=list)
    """Names of episodes that cannot be used, and why."""
    names: dict[int, str] = field(default_factory=dict)
    """Names of all episodes that were looked at, by their numbers; no two are equal."""

    def report(self) -> Report:
        """Return what is in the source."""
        return _report(self)

    def without(self, names: Collection[str]) -> "Examination":
        """Return what was read of the other episodes."""
        return Examination(
            self.examined,
            [each for each in self.measures if each.name not in names],
            {name: info for name, info in self.infos.items() if name not in names},
            [(name, reason) for name, reason in self.broken if name not in names],
            {number: name for number, name in self.names.items() if name not in names},
        )


def examine(
    examined: Examined,
    most: int = MAX_EPISODES,
    progress: Progress = lambda done: None,
    limit_s: float = math.inf,
) -> Examination:
    """Read episodes of a source.

    Args:
        examined: the source.
        most: episodes that are read; 0: all.
        progress: called with the number of episodes that were read.
        limit_s: seconds after which no further episode is read.
    """
    found, began = Examination(examined), time.monotonic()
    used: set[str] = set()
    for number, recipe in examined.recipes(most):
        if time.monotonic() - began > limit_s:
            break
        name = recipe.name if recipe.name not in used else f"{recipe.name} (number {number})"
        used.add(name)
        found.names[number] = name
        try:
            episode = examined.read(recipe, number)
            found.measures.append(replace(measure(episode, examined.specs, recipe.texts), name=name))
            if info := media_info(recipe):
                found.infos[name] = info
        except InputError as error:
            found.broken.append((name, str(error).removeprefix(f"{recipe.name}: ")))
        progress(len(found.names))
    return found


def glance(data: DataConfig) -> Iterator[str]:
    """Yield three lines about each source of a run on this machine, and read little of it.

    Sources that are elsewhere, still grow or generate their episodes have none.
    """
    for name, source in data.sources.items():
        here = os.path.exists(os.path.expanduser(source.path.partition("{")[0].partition("*")[0]))
        if not source.weight or source.kind not in GLANCED or not here:
            continue
        try:
            report = examine(open_config(name, source), FEW_EPISODES, limit_s=FEW_SECONDS).report()
        except WorldModelError as error:
            yield f"{name}: {error}"
            continue
        yield from (f"{name}: {line}" for line in report.summary() if line)


def _report(found: Examination) -> Report:
    examined, episodes = found.examined, found.measures
    report = Report(examined.fps, len(found.names), examined.source.size)
    report.lengths = [each.length for each in episodes]
    report.broken = [f"{name}: {reason}" for name, reason in found.broken]
    _count(report, episodes)
    _find_unseen(report, episodes, examined)
    report.repeated = repetition([each.numbers for each in episodes])
    pictures, unusable = picture_findings(episodes)
    usable = [each for each in episodes if each.name not in unusable and each.length]
    placed = find_lag(usable)
    report.lag, report.lag_certainty = placed.lag, placed.certainty
    report.information = dict(placed.information)
    shifted = lag_findings(usable, placed)
    report.findings = [
        *grouped(found.broken, len(found.names)),
        *pictures,
        *shifted,
        *number_findings(episodes, examined.specs),
        *copy_findings(episodes),
        *text_findings(episodes),
        *media_findings(found.infos),
        *column_findings(examined),
        *_length_findings(report.lengths),
        *_actor_findings(usable, examined),
        *_balance_findings(report.effects),
    ]
    if isinstance(examined.source, LeRobotSource):
        report.findings += lerobot_findings(examined.source, found.names)
    return report


def _count(report: Report, episodes: Sequence[Measures]) -> None:
    """Count actions, their effects and outcomes."""
    texts: dict[str, Effects] = {}
    for each in episodes:
        for names, text, changed in zip(each.labels, each.texts, each.changed, strict=True):
            for name in names:
                report.effects.setdefault(name, Effects()).add(bool(changed))
            if text:
                texts.setdefault(text, Effects()).add(bool(changed))
        report.outcomes += len(each.rewards)
        report.rewards += sum(reward != 0 for reward in each.rewards)
        report.ends += sum(each.ended)
    report.effects |= most_frequent(texts)


def most_frequent(texts: Mapping[str, Effects]) -> dict[str, Effects]:
    """Return the effects of the most frequent texts, in quotes, and the effects of all others together."""
    order = sorted(texts, key=lambda text: -texts[text].count)
    found = {f'"{text}"': texts[text] for text in order[:MAX_TEXTS]}
    if others := [texts[text] for text in order[MAX_TEXTS:]]:
        total = Effects(sum(each.count for each in others), sum(each.changed for each in others))
        found[f"({len(others)} other texts)"] = total
    return found


def _find_unseen(report: Report, episodes: Sequence[Measures], examined: Examined) -> None:
    """Name what never came."""
    width = len(examined.specs)
    fitting = [each.numbers for each in episodes if each.numbers.shape[1] == width and each.length]
    if fitting:
        columns = np.concatenate(fitting).T
        report.unseen = [
            spec.name
            for spec, column in zip(examined.specs, columns, strict=True)
            if kind_of_spec(spec.kind).is_unseen(column)
        ]
    for kind in control_kinds():
        if any(name.startswith(f"{kind.name} ") for name in report.effects):
            report.unseen += [name for name in kind.all_effects() if name not in report.effects]
    if report.outcomes:
        counts = {"rewards": report.rewards, "ends of episodes": report.ends}
        report.unseen += [name for name, count in counts.items() if not count]


def _length_findings(lengths: Sequence[int]) -> list[Finding]:
    acting = [length for length in lengths if length]
    if len(acting) > 3 and len(set(acting)) == 1:
        return [Finding("lengths", f"all episodes have one length, {acting[0]} actions", False)]
    return []


def _actor_findings(episodes: Sequence[Measures], examined: Examined) -> list[Finding]:
    """Return how large what moves is, in pixels of the files."""
    extents = [min(box) for each in episodes for box in each.extents]
    steps = sum(int(each.changed.sum()) for each in episodes)
    if len(extents) < 20 or len(extents) < steps / 2 or not min(examined.native):
        return []
    shape = next(each.shape for each in episodes if each.extents)
    scale = max(examined.native) / max(shape)
    extent, side = max(1, round(statistics.median(extents) * scale)), min(examined.native)
    text = f"what moves is about {extent} of {side} pixels wide"
    if extent > SMALL * side or extent >= ACTOR_PIXELS * 2:
        return [Finding("actor", text, False)]
    wanted = 16 * -(-side * ACTOR_PIXELS // (16 * extent))
    if wanted > side:
        text += f": record it, and train, at {wanted}"
    return [Finding("actor", text, False)]


def _balance_findings(effects: Mapping[str, Effects]) -> list[Finding]:
    counts = {name: each.count for name, each in effects.items() if not name.startswith(('"', "("))}
    total = sum(counts.values())
    if len(counts) > 1 and total >= 200 and max(counts.values()) > 0.9 * total:
        name = max(counts, key=counts.__getitem__)
        return [Finding("balance", f"{counts[name] / total:.0%} of all actions are {name!r}", False)]
    return []
