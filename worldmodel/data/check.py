"""Examination of a data source before it is trained on: what is in it, and whether its actions act.

Every episode is read whole, at its own frame rate and a small size.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from worldmodel.config import (
    ActionConfig,
    ActionSpec,
    CodecConfig,
    DataConfig,
    SourceConfig,
    VisionConfig,
    WorldModelConfig,
    build,
    spec_settings,
)
from worldmodel.data.argument import read_source
from worldmodel.data.lerobot import LeRobotDataset
from worldmodel.data.recording import read_recording
from worldmodel.data.sources import Source, open_source
from worldmodel.errors import InputError
from worldmodel.media import contact_sheet
from worldmodel.types import Action, Episode

SIZE = 64
"""Side of the frames that are examined, in pixels."""
CHANGED, CHANGED_PIXELS = 24, 4
"""Difference of a colour, of 255, and number of such pixels from which a picture counts as changed: more than
an encoder adds."""
TOLERANCE = 16
"""Difference of the mean colour of a cell, of 255, up to which two pictures show the same layout."""
PARTS = 48
"""Parts in which pictures are compared, one after another."""
MOUSE = ("mouse left", "mouse right", "mouse up", "mouse down")
CAMERA = tuple(
    f"camera {verb} {sign}{axis}" for verb in ("moves", "turns about") for axis in "xyz" for sign in "+-"
)
MAX_TEXTS = 10
"""Texts of actions that are counted one by one, the most frequent ones."""
MIN_STEPS = 30
"""Fewer steps do not tell whether actions are repeated or shifted."""
MIN_GAIN = 0.05
"""Share of the variance of changes that a shift must explain beyond the actions in their place."""


@dataclass
class Effects:
    """How often an action was taken, and how often pixels changed after it."""

    count: int = 0
    changed: int = 0

    def add(self, changed: bool) -> None:
        """Count an action."""
        self.count += 1
        self.changed += changed


@dataclass
class Findings:
    """What is in a source."""

    fps: int
    lengths: list[int] = field(default_factory=list)
    """Actions of every episode."""
    broken: list[str] = field(default_factory=list)
    effects: dict[str, Effects] = field(default_factory=dict)
    outcomes: int = 0
    """Actions whose reward, and whether the episode ended after them, is known."""
    rewards: int = 0
    """Actions after which the reward was not 0."""
    ends: int = 0
    """Actions after which an episode ended."""
    unseen: list[str] = field(default_factory=list)
    """Keys that were never held, numbers that never changed, directions of mouse and camera, rewards and ends
    that never came."""
    repeated: int = 1
    """Frames for which each action is repeated."""
    shift: int = 0
    """Frames by which actions are late (above 0) or early."""

    def as_text(self) -> str:
        """Return the findings for a terminal."""
        lines = [f"{len(self.lengths)} episodes, {sum(self.lengths)} actions, {self.fps} frames per second"]
        if self.lengths:
            low, middle, high = np.percentile(self.lengths, [0, 50, 100]).astype(int)
            lines.append(f"actions per episode: {low} to {high}, median {middle}")
        width = min(max(map(len, self.effects), default=0), 40)
        for name, effect in sorted(self.effects.items()):
            share = effect.changed / effect.count
            lines.append(f"  {name:{width}s}  {effect.count:7d} times, pixels changed after {share:6.1%}")
        if self.outcomes:
            lines.append(
                f"a reward other than 0 after {self.rewards} of {self.outcomes} actions, "
                f"the end of an episode after {self.ends}"
            )
        if self.unseen:
            lines.append(f"never seen, so it cannot be learned: {', '.join(self.unseen)}")
        lines += [
            f"without any effect: {name}"
            for name, effect in sorted(self.effects.items())
            if not effect.changed
        ]
        if self.repeated > 1:
            lines.append(
                f"every action is repeated {self.repeated} times: actions change at every {self.repeated}th "
                "frame only; state the rate in the action spec, or keep one frame per action"
            )
        if self.shift:
            late = "after" if self.shift > 0 else "before"
            lines.append(
                f"actions are shifted: changes follow the action {abs(self.shift)} frame {late} their own; "
                "row t needs the action between frames t and t + 1"
            )
        lines += [f"broken: {reason}" for reason in self.broken[:10]]
        if len(self.broken) > 10:
            lines.append(f"broken: {len(self.broken) - 10} more")
        return "\n".join(lines)


@dataclass(frozen=True)
class Examined:
    """A source opened for examination."""

    source: Source
    specs: tuple[ActionSpec, ...]
    fps: int

    @property
    def size(self) -> int:
        """Number of its episodes."""
        assert self.source.size is not None
        return self.source.size

    def episode(self, index: int) -> Episode:
        """Return a whole episode.

        Raises:
            InputError: it is broken.
        """
        return self.source.at(index).episode("rounds", 0, index, 10**6)


def open_examined(path: str) -> Examined:
    """Open a LeRobot dataset, or a table with the `recording.json` of the recorder beside it.

    Raises:
        ConfigError: the source cannot be read.
    """
    table = Path(path).expanduser()
    if table.is_file():
        recording = read_recording(table.parent)
        if recording is None:
            raise InputError(
                f"{path!r} has no recording.json beside it, which tells its frame rate and actions; pass a "
                "LeRobot folder or a table of `worldmodel record`."
            )
        specs, fps = recording
        (source,) = read_source(path).sources.values()
    else:
        dataset = LeRobotDataset(path)
        specs, fps, source = dataset.specs, dataset.fps, SourceConfig("lerobot", path, split="all")
    action = build(ActionConfig, {**spec_settings(specs), "camera": "camera" in source.columns})
    columns = {field: column for field, column in source.columns.items() if action.takes.get(field, True)}
    chunk = max(1, round(fps / (max((spec.rate for spec in specs), default=0.0) or fps)))
    model = WorldModelConfig(
        codec=CodecConfig(image_size=SIZE, temporal_factor=1),
        vision=VisionConfig(max_frames=chunk + 1),
        action=action,
        fps=fps,
        chunk_frames=chunk,
    )
    data = DataConfig({"checked": replace(source, columns=columns)})
    return Examined(open_source("checked", data, model), specs, fps)


def check(examined: Examined) -> Findings:
    """Read all episodes of a source and say what is in it."""
    findings = Findings(examined.fps)
    numbers, changes, texts = [], [], dict[str, Effects]()
    for index in range(examined.size):
        try:
            episode = examined.episode(index)
        except InputError as error:
            findings.broken.append(str(error))
            continue
        last = np.stack([clip[-1] for clip in episode.observations]).astype(np.int16)
        differences = np.diff(last, axis=0)
        moved = (np.abs(differences) >= CHANGED).any(-1).sum(axis=(1, 2)) >= CHANGED_PIXELS
        for action, changed in zip(episode.actions, np.atleast_1d(moved), strict=True):
            for name in labels(action, examined.specs):
                findings.effects.setdefault(name, Effects()).add(bool(changed))
            if action.text:
                texts.setdefault(action.text, Effects()).add(bool(changed))
        findings.lengths.append(len(episode.actions))
        findings.outcomes += len(episode.outcomes)
        findings.rewards += sum(outcome.reward != 0 for outcome in episode.outcomes)
        findings.ends += sum(outcome.ended for outcome in episode.outcomes)
        numbers.append(np.array([numbers_of(action, examined.specs) for action in episode.actions]))
        steps = len(differences)
        changes.append(
            differences.reshape(steps, 8, SIZE // 8, 8, SIZE // 8, 3).mean((2, 4)).reshape(steps, -1)
        )
    if numbers:
        everything = np.concatenate(numbers)
        findings.unseen = [
            spec.name
            for spec, column in zip(examined.specs, everything.T, strict=True)
            if spec.kind != "mouse" and (not column.any() or (spec.kind != "key" and np.ptp(column) == 0))
        ]
        for directions in (MOUSE, CAMERA):
            if any(name.split()[0] == directions[0].split()[0] for name in findings.effects):
                findings.unseen += [name for name in directions if name not in findings.effects]
        findings.effects |= most_frequent(texts)
        if findings.outcomes:
            counts = {"rewards": findings.rewards, "ends of episodes": findings.ends}
            findings.unseen += [name for name, count in counts.items() if not count]
        findings.repeated = repetition(numbers)
        findings.shift = shift(numbers, changes)
    return findings


def labels(action: Action, specs: Sequence[ActionSpec]) -> list[str]:
    """Return names of an action: its keys, the signs of its numbers, the directions of mouse and camera."""
    kinds = {spec.kind for spec in specs}
    found = ["+".join(action.keys) or "(no key)"] if "key" in kinds else []
    vector = [spec.name for spec in specs if spec.kind == "vector"]
    for name, number in zip(vector, action.vector or (), strict=False):
        if number:
            found.append(f"{name} {'above' if number > 0 else 'below'} 0")
    if "mouse" in kinds:
        right, down = action.mouse or (0.0, 0.0)
        moved = [MOUSE[right > 0]] * bool(right) + [MOUSE[2 + (down > 0)]] * bool(down)
        found += moved or ["mouse still"]
    if action.camera:
        *axis, w = action.camera.pose.rotation
        turn = np.multiply(axis, math.copysign(1, w))  # q and -q are the same rotation
        parts = {"moves": np.array(action.camera.pose.translation), "turns about": turn}
        moved = [f"camera {verb} {_dominant(part)}" for verb, part in parts.items() if abs(part).max() > 1e-6]
        found += moved or ["camera still"]
    return found or ([] if action.text else ["(no action)"])


def _dominant(vector: np.ndarray) -> str:
    """Return the sign and the name of the axis along which a vector is longest."""
    axis = int(abs(vector).argmax())
    return f"{'-' if vector[axis] < 0 else '+'}{'xyz'[axis]}"


def most_frequent(texts: Mapping[str, Effects]) -> dict[str, Effects]:
    """Return the effects of the most frequent texts, in quotes, and those of all others together."""
    order = sorted(texts, key=lambda text: -texts[text].count)
    found = {f'"{text}"': texts[text] for text in order[:MAX_TEXTS]}
    if others := [texts[text] for text in order[MAX_TEXTS:]]:
        total = Effects(sum(each.count for each in others), sum(each.changed for each in others))
        found[f"({len(others)} other texts)"] = total
    return found


def numbers_of(action: Action, specs: Sequence[ActionSpec]) -> list[float]:
    """Return an action as one number per spec."""
    values = {"vector": iter(action.vector or ()), "mouse": iter(action.mouse or ())}
    return [
        float(spec.name in action.keys) if spec.kind == "key" else next(values[spec.kind], 0.0)
        for spec in specs
    ]


def repetition(episodes: Sequence[np.ndarray]) -> int:
    """Return the number of steps for which every action is repeated, counted from the start of an episode."""
    found, changes = 0, 0
    for numbers in episodes:
        places = np.flatnonzero((numbers[1:] != numbers[:-1]).any(axis=1)) + 1
        found = math.gcd(found, *places.tolist())
        changes += len(places)
    return found if found > 1 and changes >= 10 else 1


def shift(episodes: Sequence[np.ndarray], changes: Sequence[np.ndarray]) -> int:
    """Return by how many steps changes of the picture come after their actions (above 0) or before them.

    The changes are regressed on the action of the step before, of their own and of the step after; another
    than their own counts only if it explains clearly more of the variance.
    """
    if sum(map(len, episodes)) < MIN_STEPS:
        return 0
    explained = {lag: _explained(episodes, changes, lag) for lag in (-1, 0, 1)}
    best = max(explained, key=explained.__getitem__)
    return best if explained[best] > 1.5 * explained[0] + MIN_GAIN else 0


def _explained(episodes: Sequence[np.ndarray], changes: Sequence[np.ndarray], lag: int) -> float:
    """Return the share of the variance of changes that the actions `lag` steps earlier explain."""
    kept = [
        (each[1:-1], np.roll(acts, lag, axis=0)[1:-1]) for acts, each in zip(episodes, changes, strict=True)
    ]
    y, x = (np.concatenate(parts).astype(np.float64) for parts in zip(*kept, strict=True))
    x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    y -= y.mean(0)
    total = float((y**2).sum())
    if not total:
        return 0.0
    solution, *_ = np.linalg.lstsq(x, y, rcond=None)
    return 1 - float(((y - x @ solution) ** 2).sum()) / total


def draw_sheet(examined: Examined, episodes: int = 4, frames: int = 8, scale: int = 2) -> Image.Image:
    """Draw the first frames of some episodes, each with the action that follows it.

    Raises:
        InputError: no episode can be read.
    """
    rows, captions = [], []
    font = ImageFont.load_default(size=12)
    for index in range(examined.size):
        try:
            episode = examined.episode(index)
        except InputError:
            continue
        pictures = []
        for number, clip in enumerate(episode.observations[:frames]):
            label = _label(episode.actions[number]) if number < len(episode.actions) else "end"
            canvas = Image.new("RGB", (SIZE * scale, SIZE * scale + 18), (24, 26, 32))
            canvas.paste(
                Image.fromarray(clip[-1]).resize((SIZE * scale, SIZE * scale), Image.Resampling.NEAREST)
            )
            ImageDraw.Draw(canvas).text((2, SIZE * scale + 2), label[:20], fill=(226, 228, 234), font=font)
            pictures.append(np.array(canvas))
        rows.append(np.stack(pictures))
        words = episode.actions[0].text or ""
        captions.append(f"{episode.name}: {words}" if words else episode.name)
        if len(rows) == episodes:
            break
    if not rows:
        raise InputError("No episode of the source can be read; see `broken` in the report.")
    return contact_sheet(rows, captions, scale=1)


def _label(action: Action) -> str:
    """Return an action for a small picture: words only if it has nothing else."""
    return str(replace(action, text=None)) if len(action.as_dict()) > 1 else str(action)


def split(
    examined: Examined, share: float = 0.1, by: str = "episode", seed: int = 0
) -> tuple[list[int], dict[str, Any]]:
    """Choose episodes to hold out, and count what they share with the rest.

    Args:
        examined: the source.
        share: share of the episodes that is held out, at least one.
        by: `episode`, or `layout` to hold out all episodes that begin with the same picture, up to the losses
            of a video.
        seed: seed of the choice.

    Returns:
        The episodes that are held out, and the counts of their (frame, action) pairs: all, those that also
        occur in training exactly, and nearly (the same picture of 8 x 8 cells in steps of 32).

    Raises:
        InputError: a setting is out of range, or nothing would be left to train on.
    """
    if by not in ("episode", "layout") or not 0 < share < 1:
        raise InputError(f"by is {by!r} and share {share:g}; use episode or layout, and 0 to 1.")
    exact, near, groups = [], [], defaultdict(list)
    layouts = Layouts()
    for index in range(examined.size):
        try:
            episode = examined.episode(index)
        except InputError:
            exact.append(Counter())
            near.append(Counter())
            continue
        frames = [clip[-1] for clip in episode.observations]
        groups[layouts.number(frames[0]) if by == "layout" else index].append(index)
        pairs = list(zip(frames, map(str, episode.actions), strict=False))
        # Hashes: the frames of a long recording do not fit into memory.
        exact.append(Counter(hash((frame.tobytes(), action)) for frame, action in pairs))
        near.append(Counter(hash((small_hash(frame), action)) for frame, action in pairs))
    order = np.random.default_rng(seed).permutation(len(groups))
    listed, held = list(groups.values()), []
    for number in order:
        if held and len(held) >= share * examined.size:
            break
        held += listed[number]
    rest = set(range(examined.size)) - set(held)
    if not rest or len(groups) < 2:
        raise InputError(
            f"The source has {len(groups)} different {by}s, of which none would be left to train on."
        )
    counts: dict[str, Any] = {"pairs": sum(sum(near[index].values()) for index in held)}
    for name, tables in (("exact", exact), ("near", near)):
        known = set().union(*(tables[index] for index in rest))
        counts[name] = sum(
            number for index in held for pair, number in tables[index].items() if pair in known
        )
    return sorted(held), counts


class Layouts:
    """Numbers pictures; two are the same if no cell of 1/16 of a side differs by more than `TOLERANCE`."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._count = 0

    def number(self, frame: np.ndarray) -> int:
        """Return the number of the first picture that is the same."""
        height, width = (max(1, side // 16) for side in frame.shape[:2])
        rows, columns = frame.shape[0] // height, frame.shape[1] // width
        cells = frame[: rows * height, : columns * width].reshape(rows, height, columns, width, 3)
        means = cells.mean((1, 3), dtype=np.float32).ravel()
        # A few scattered cells tell most pictures apart, so that their other cells are never compared.
        parts = np.array_split(np.random.default_rng(0).permutation(means), PARTS)
        if not self._parts:
            self._parts = [np.empty((1024, part.size), np.float32) for part in parts]
        same = np.arange(self._count)
        for known, part in zip(self._parts, parts, strict=True):
            same = same[np.abs(known[same] - part).max(axis=1) <= TOLERANCE]
        if same.size:
            return int(same[0])
        if self._count == len(self._parts[0]):
            self._parts = [np.concatenate([known, np.empty_like(known)]) for known in self._parts]
        for known, part in zip(self._parts, parts, strict=True):
            known[self._count] = part
        self._count += 1
        return self._count - 1


def small_hash(frame: np.ndarray) -> bytes:
    """Return the mean colours of 8 x 8 cells in steps of 32: equal for pictures that look alike."""
    cells = frame.reshape(8, frame.shape[0] // 8, 8, frame.shape[1] // 8, 3).mean((1, 3))
    return np.round(cells / 32).astype(np.uint8).tobytes()
