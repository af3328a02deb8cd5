"""Does the model obey? Twin futures (`worldmodel.data.twins`), played by a model from their common moment."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from worldmodel.actions import Action
from worldmodel.config import DataConfig, WorldModelConfig
from worldmodel.data.twins import twins_of
from worldmodel.eval.action_following import BATCH
from worldmodel.eval.data.episodes import EpisodeReader, Recorded
from worldmodel.eval.data.subjects import play, subject_tables, subjects
from worldmodel.eval.examples import Album, Example
from worldmodel.eval.figures import Figure
from worldmodel.eval.metrics import Metric, Played
from worldmodel.eval.metrics.twins import Contrast, ErrorThere, Obeyed, where_differ
from worldmodel.eval.runner import Clips, Subject
from worldmodel.eval.table import Table
from worldmodel.media import Frame, Frames

STEPS = (1, 5, 10)
"""Lengths of the films that are compared, in actions."""
MAX_ROUNDS = 1000
"""Longest recorded twin, with its history."""


@dataclass(frozen=True, slots=True)
class Twins:
    """Two recorded futures of a moment.

    Attributes:
        past: What was seen up to the moment, uint8 `[t, h, w, 3]`: a frame, and then whole rounds.
        done: The actions of these rounds.
        actions: The actions of either future from there on.
        clips: The true frames of either, uint8 `[t, h, w, 3]` for each round.
    """

    past: Frames
    done: tuple[Action, ...]
    actions: tuple[tuple[Action, ...], tuple[Action, ...]]
    clips: tuple[tuple[Frames, ...], tuple[Frames, ...]]

    @property
    def start(self) -> Frame:
        """The frame of the moment."""
        return self.past[-1]

    @property
    def steps_per_round(self) -> int:
        """Number of actions of a round."""
        return max(1, len(self.actions[0][0].chunk))

    def first(self, steps: int) -> "Twins":
        """Return the same futures with the rounds of their first actions."""
        rounds = -(-steps // self.steps_per_round)
        one, other = self.actions
        mine, theirs = self.clips
        return replace(self, actions=(one[:rounds], other[:rounds]), clips=(mine[:rounds], theirs[:rounds]))


def twin_reader(data: DataConfig, model: WorldModelConfig, seed: int = 0) -> EpisodeReader | None:
    """Return the reader of the twins that were recorded beside the one source of `data`, if there are any."""
    ((name, source),) = data.sources.items()
    found = twins_of(source)
    if found is None:
        return None
    return EpisodeReader(replace(data, sources={f"{name}-twins": found}), model, MAX_ROUNDS, seed)


def read_twins(reader: EpisodeReader, count: int) -> Iterator[Twins]:
    """Yield up to `count` pairs; those of which one cannot be read are left out.

    Their past is as long as what the model remembers of a video (`history_rounds`), or as far as it was
    recorded: one frame does not show how things move.

    Raises:
        InputError: as `EpisodeReader.read`.
    """
    yielded = 0
    for _, pair in groupby(reader.read(), lambda each: each.number // 2):
        one, *others = pair
        found = _forked(one, others[0], reader.model.history_rounds) if others else None
        if found is None:
            continue
        yield found
        yielded += 1
        if yielded == count:
            return


def _forked(one: Recorded, other: Recorded, history: int) -> Twins | None:
    """Return the futures after the first action that differs; None if none does."""
    differ = (number for number, (a, b) in enumerate(zip(one.actions, other.actions, strict=False)) if a != b)
    moment = next(differ, None)
    if moment is None:
        return None
    first = max(0, moment - history)
    past = np.concatenate([one.starts[first][None], *one.clips[first:moment]])
    length = min(len(one.actions), len(other.actions))
    actions = one.actions[moment:length], other.actions[moment:length]
    clips = one.clips[moment:length], other.clips[moment:length]
    return Twins(past, one.actions[first:moment], actions, clips)


def twin_figures(
    subject: Subject,
    pairs: Sequence[Twins],
    seed: int = 0,
    steps: Sequence[int] = STEPS,
    forecasts: bool = False,
    album: Album | None = None,
    codec_alone: bool = False,
) -> dict[str, dict[str, dict[str, Figure]]]:
    """Play both futures of every pair with the same noise, and compare the films.

    Args:
        subject: The model.
        pairs: Recorded twins.
        seed: Seed of the noise.
        steps: Lengths of the films in actions. A film may end within a round, of which the rest then does not
            count.
        forecasts: Whether the model makes a forecast that 0 denoising steps show.
        album: Where examples are kept.
        codec_alone: Whether the model is left out, of which only the codec is trained so far.

    Returns:
        Figures by measure (`obeyed`, `contrast`, `error_there`), number of steps and row, over the pairs that
        last so long and whose truths differ by then; n is their number. A measure is absent without any.
    """
    metrics: Sequence[Metric] = (Obeyed(), Contrast(), ErrorThere())
    values: dict[tuple[str, int, str], list[float | bool]] = {}
    played = 0
    for batch in _batches([pair.first(max(steps)) for pair in pairs]):
        seeds = range(seed + played, seed + played + len(batch))
        rows = _bounds(subject, batch)
        if not codec_alone:
            rows = _rows(subject, batch, seeds, forecasts) | rows
        starts = np.stack([pair.start for pair in batch])
        truth = [_films(batch, which) for which in (0, 1)]
        verdicts: list[bool | None] = [None] * len(batch)
        for length in steps:
            frames = length * len(batch[0].clips[0][0]) // batch[0].steps_per_round
            if truth[0].shape[1] < frames:
                continue
            differ = [
                bool(where_differ(one[:frames], other[:frames]).any())
                for one, other in zip(*truth, strict=True)
            ]
            if not any(differ):
                continue
            for name, films in rows.items():
                one, other = (
                    Played(
                        starts[differ],
                        films[which][differ, :frames],
                        truth[which][differ, :frames],
                        [pair.actions[which][0] for pair, apart in zip(batch, differ, strict=True) if apart],
                    )
                    for which in (0, 1)
                )
                for metric in metrics:
                    found = list(metric(replace(one, twin=other)))
                    values.setdefault((metric.name, length, name), []).extend(found)
                    if metric.name == "obeyed" and name == "model":
                        for index, right in zip(np.flatnonzero(differ), found, strict=True):
                            verdicts[index] = bool(right)
        for index, (pair, right) in enumerate(zip(batch, verdicts, strict=True)):
            if album is not None and right is not None:
                album.add(_example(pair, [films[index] for films in rows["model"]], right))
        played += len(batch)
    results: dict[str, dict[str, dict[str, Figure]]] = {}
    for metric in metrics:
        for (measure, length, name), found in sorted(values.items(), key=lambda each: each[0][1]):
            if measure == metric.name:
                by_step = results.setdefault(measure, {}).setdefault(str(length), {})
                by_step[name] = metric.figure(found)
    return results


def twin_tables(results: Mapping[str, Any]) -> list[Table]:
    """Return the table of the figures."""
    about = (
        "Two sequences of actions from one moment: obeyed if the model's two films are nearer to their own "
        "truths than to each other's, where the truths differ (chance is 50 %). Contrast: how far the films "
        "are apart there, 1 for the truth."
    )
    rows, names = {}, {}
    for metric in (Obeyed(), Contrast(), ErrorThere()):
        for length, figures in results.get(metric.name, {}).items():
            key = f"{metric.name} {length}"
            rows[key], names[key] = figures, (f"{metric.title}, {_steps(length)}", metric.unit)
    return subject_tables(rows, "Does it obey?", names, about)


def _steps(length: str) -> str:
    return f"{length} step{'s' * (length != '1')}"


def _batches(pairs: Sequence[Twins]) -> Iterator[list[Twins]]:
    """Yield batches of futures and pasts of the same lengths; a batch plays two worlds for each."""
    waiting: dict[tuple[int, int], list[Twins]] = {}
    for pair in pairs:
        lengths = len(pair.actions[0]), len(pair.done)
        batch = waiting.setdefault(lengths, [])
        batch.append(pair)
        if len(batch) == BATCH // 2:
            yield waiting.pop(lengths)
    yield from waiting.values()


def _films(batch: Sequence[Twins], which: int) -> Clips:
    return np.stack([np.concatenate(pair.clips[which]) for pair in batch])


def _rows(
    subject: Subject, batch: Sequence[Twins], seeds: Sequence[int], forecasts: bool
) -> dict[str, tuple[Clips, Clips]]:
    """Return both films of every pair by the model and by the simpler predictions beside it."""
    count = len(batch)
    past, done = [pair.past for pair in batch] * 2, [pair.done for pair in batch] * 2
    actions = [pair.actions[which] for which in (0, 1) for pair in batch]
    rows: dict[str, tuple[Clips, Clips]] = {}
    for name, each in subjects(subject, forecasts).items():
        films = np.concatenate(play(each, past, actions, [*seeds, *seeds], done), axis=1)
        rows[name] = films[:count], films[count:]
    return rows


def _bounds(subject: Subject, batch: Sequence[Twins]) -> dict[str, tuple[Clips, Clips]]:
    """Return what the codec makes of both films, which no model exceeds, and the frame before them."""
    one, other = (
        np.concatenate([subject.reconstruct(np.stack(clips)) for clips in zip(*rounds, strict=True)], axis=1)
        for rounds in ([pair.clips[which] for pair in batch] for which in (0, 1))
    )
    still = np.repeat(np.stack([pair.start for pair in batch])[:, None], one.shape[1], axis=1)
    return {"codec": (one, other), "copy": (still, still)}


def _example(pair: Twins, films: Sequence[Frames], right: bool) -> Example:
    """Show the last frame of every round of both futures, one after the other."""
    chunk = len(pair.clips[0][0])
    truth = [clip[-1] for clips in pair.clips for clip in clips]
    made = [frame for film in films for frame in film[chunk - 1 :: chunk]]
    caption = " | ".join(" / ".join(map(str, actions)) for actions in pair.actions)
    return Example("twin futures, one after the other", caption, right, np.stack(truth), np.stack(made))
