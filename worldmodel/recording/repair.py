"""Writing of a repaired copy of a source, as a LeRobot dataset, by what its examination found.

Faults that an episode shows by itself are repaired, or the episode is left out. What is only told by
comparison with the other episodes, such as a lag of the actions, is a suspicion: it is repaired only where it
is named.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import unescape
from pathlib import Path

import numpy as np

from worldmodel.actions import Action, ActionSpec
from worldmodel.data import examiner
from worldmodel.data.clips import Clip, Footage
from worldmodel.data.examiner import Examination, Examined, Finding, Measures
from worldmodel.data.examiner.texts import MARKUP, PLACEHOLDERS
from worldmodel.data.footage import Tiles
from worldmodel.data.lerobot import LeRobotDataset, LeRobotSource
from worldmodel.errors import InputError, OutputError
from worldmodel.io import atomic_file, atomic_folder
from worldmodel.recording.episode import RecordedEpisode, RecordingFormat
from worldmodel.recording.lerobot import PLAIN_COLUMNS, LeRobotStore

REPORT = "meta/repair.json"
ALL = 10**7
"""More rounds than any episode has."""
DROPPED = ("unreadable", "black", "noise", "still", "copies", "near_copies", "timestamps")
CHANGED = ("ends", "damaged_text", "markup", "placeholder", "size", "rate", "index")
"""Faults that are repaired unless others are named; all files are written anew, with one size and rate."""
DOUBTED = (
    "frozen", "constant", "blurred", "grey", "letterbox", "cropped", "displaced", "brightness", "unlike",
    "cut", "opposite", "foreign", "scale", "spike",
)  # fmt: skip
"""Suspicions for which an episode is left out where they are named."""
TRANSFORMS: Mapping[str, Sequence[Callable[[np.ndarray], np.ndarray]]] = {
    "mirrored": [lambda p: p[..., :, ::-1, :]],
    "upside_down": [lambda p: p[..., ::-1, :, :], lambda p: p[..., ::-1, ::-1, :]],
    "turned": [lambda p: np.rot90(p, 1, (-3, -2)), lambda p: np.rot90(p, 3, (-3, -2))],
    "inverted": [lambda p: 255 - p],
    "channels": [
        lambda p, order=order: p[..., order]
        for order in ([2, 1, 0], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1])
    ],
}
"""Suspicions that undo a change of the pictures; of several, the one that comes nearest to the others."""
TURNED = ("lag", "reversed", *TRANSFORMS)
"""Suspicions that change episodes where they are named."""
FIXES = (*DROPPED, *CHANGED, *DOUBTED, *TURNED)
PASSES = 5
"""Examinations, at most: without some episodes, others may stand out."""


@dataclass
class Repair:
    """What was done to a source."""

    source: str
    episodes: int = 0
    """Episodes of the source."""
    written: int = 0
    changed: list[Finding] = field(default_factory=list)
    dropped: list[Finding] = field(default_factory=list)
    left: list[Finding] = field(default_factory=list)
    """Faults of the copy, by an examination of it."""
    columns: list[str] = field(default_factory=list)
    """Columns that the copy does not have."""

    def as_text(self) -> str:
        """Return it for a terminal."""
        lines = [f"{self.written} of {self.episodes} episodes are written"]
        for what in ("changed", "dropped", "left"):
            lines += [f"{what}, {found.kind}: {found.as_text()}" for found in getattr(self, what)]
        if self.columns:
            lines.append(f"columns that are not in the copy: {', '.join(self.columns)}")
        return "\n".join(lines)


def chosen_fixes(only: str = "", also: str = "") -> tuple[str, ...]:
    """Return the kinds of faults that are repaired.

    Args:
        only: kinds with commas between them, in place of those that are sure.
        also: kinds beside these.

    Raises:
        InputError: there is no such kind, or it cannot be repaired.
    """
    named = [name.strip() for name in f"{only},{also}".split(",") if name.strip()]
    if unknown := [name for name in named if name not in FIXES]:
        raise InputError(f"There is no repair of {unknown[0]!r}; use one of {', '.join(sorted(FIXES))}.")
    sure = () if only else (*DROPPED, *CHANGED)
    return tuple(dict.fromkeys((*sure, *named)))


def repair(
    found: Examination,
    folder: str | Path,
    fixes: Collection[str],
    progress: Callable[[int], object] = lambda done: None,
) -> Repair:
    """Write a repaired copy of a source; the folder gets its name when the copy is complete.

    Args:
        found: what was read of all episodes.
        folder: a new or empty folder outside of the source.
        fixes: kinds of faults, as `chosen_fixes` returns them.
        progress: called with the number of episodes that were written.

    Raises:
        InputError: the source has single images, or no episode would be left.
        OutputError: the folder has something in it, lies in the source, or cannot be written.
    """
    folder, examined = Path(folder).expanduser().absolute(), found.examined
    _check_folder(folder, examined)
    if "rounds" not in examined.source.tasks:
        raise InputError(f"{examined.name} has single images, of which no recording can be written.")
    plan = _plan(found, fixes)
    reader = _Reader(examined)
    result = Repair(examined.name, len(found.names), columns=reader.lost)
    result.dropped += plan.dropped
    gone, numbers = {name for each in plan.dropped for name in each.episodes}, []
    with atomic_folder(folder) as temporary:
        store = LeRobotStore(temporary, replace(reader.format, settings={"repaired": examined.name}))
        for number, name in found.names.items():
            if name in gone:
                continue
            try:
                episode = reader.read(number)
                for change in plan.changes.get(name, []):
                    episode = change(episode)
                if not len(episode.actions):
                    raise InputError("nothing of it is left")
                store.write(episode)
            except InputError as error:
                result.dropped.append(Finding("unreadable", str(error), True, (name,)))
                continue
            numbers.append(number)
            progress(len(numbers))
        if not numbers:
            raise InputError(f"Of {examined.name}, no episode would be left.")
        store.finish()
        _keep_split(examined, numbers, temporary)
        result.written, result.changed = len(numbers), plan.changed
        after = examiner.examine(examiner.open_examined(str(temporary)), 0).report()
        result.left = [_renamed(each, temporary.name, folder.name) for each in after.faults]
        with atomic_file(temporary / REPORT) as file:
            file.write_text(json.dumps(asdict(result), indent=2), encoding="utf-8")
    return result


def _check_folder(folder: Path, examined: Examined) -> None:
    source = Path(examined.config.path).expanduser().absolute()
    if source.is_dir() and (folder.is_relative_to(source) or source.is_relative_to(folder)):
        raise OutputError(f"{str(folder)!r} and the source lie in one another; choose another folder.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{str(folder)!r} exists already; choose a new folder.")


def _renamed(finding: Finding, before: str, after: str) -> Finding:
    names = tuple(name.replace(before, after) for name in finding.episodes)
    return replace(finding, text=finding.text.replace(before, after), episodes=names)


Change = Callable[[RecordedEpisode], RecordedEpisode]


@dataclass
class _Plan:
    dropped: list[Finding] = field(default_factory=list)
    changed: list[Finding] = field(default_factory=list)
    changes: dict[str, list[Change]] = field(default_factory=dict)
    """What is done to each episode, by its name."""


def _plan(found: Examination, fixes: Collection[str]) -> _Plan:
    """Decide what is dropped and changed; episodes that will be changed are not judged a second time."""
    plan, rest, handled = _Plan(), found, set[tuple[str, str]]()
    for number in range(PASSES):
        dropped: set[str] = set()
        for finding in rest.report().faults:
            names = finding.episodes or tuple(each.name for each in rest.measures)
            new = tuple(name for name in names if (finding.kind, name) not in handled and name not in dropped)
            known = {each.name for each in rest.measures} | {name for name, _ in rest.broken}
            new = tuple(name for name in new if name in known)
            told = replace(finding, episodes=new if finding.episodes else ())
            # What cannot be read cannot be written, whatever is asked for.
            if finding.kind == "unreadable" or (
                finding.kind in fixes and finding.kind in (*DROPPED, *DOUBTED) and finding.episodes
            ):
                dropped |= {*new}
                plan.dropped += [told] if new else []
            elif finding.kind in fixes and (new or not number):
                handled |= {(finding.kind, name) for name in new}
                plan.changed += [told] if new or not finding.episodes else []
                for name in new:
                    if change := _change(finding, name, rest.measures):
                        plan.changes.setdefault(name, []).append(change)
        if not dropped:
            break
        rest = rest.without(dropped)
    return plan


def _change(finding: Finding, name: str, episodes: Sequence[Measures]) -> Change | None:
    """Return what is done to an episode; None if writing it anew is enough."""
    if finding.kind == "lag":
        return lambda episode: _shifted(episode, finding.amount)
    if finding.kind == "reversed":
        return lambda episode: _seen(episode, lambda frames: frames[::-1])
    if finding.kind == "ends":
        own = next(each for each in episodes if each.name == name)
        return lambda episode: _part(episode, 0, own.ended.index(True) + 1)
    if finding.kind in TRANSFORMS:
        others = [each.mean for each in episodes if each.name not in finding.episodes]
        usual = np.median(np.stack(others), axis=0)
        own = next(each for each in episodes if each.name == name).mean
        best = min(TRANSFORMS[finding.kind], key=lambda undo: float(np.abs(undo(own) - usual).mean()))
        return lambda episode: _seen(episode, best)
    if finding.kind in ("damaged_text", "markup", "placeholder"):
        return _with_clean_texts
    return None


def _seen(episode: RecordedEpisode, change: Callable[[np.ndarray], np.ndarray]) -> RecordedEpisode:
    cameras = {name: np.ascontiguousarray(change(frames)) for name, frames in episode.cameras.items()}
    return replace(episode, cameras=cameras)


def _shifted(episode: RecordedEpisode, lag: int) -> RecordedEpisode:
    """Return the steps of an episode that have an action after it was put into its place.

    Rewards and all other columns stay with the frames.
    """
    count = len(episode.actions)
    part = _part(episode, max(lag, 0), count + min(lag, 0))
    acting = slice(max(-lag, 0), count - max(lag, 0))
    return replace(part, actions=episode.actions[acting], numbers=episode.numbers[acting])


def _part(episode: RecordedEpisode, first: int, end: int) -> RecordedEpisode:
    """Return steps `first` to `end` of an episode."""
    if first >= end:
        raise InputError("nothing of it is left")
    frames = len(next(iter(episode.cameras.values())))
    length = (frames - 1) // len(episode.actions)
    rows = slice(first * length, end * length + 1)
    return replace(
        episode,
        cameras={name: each[rows] for name, each in episode.cameras.items()},
        columns={name: each[rows] for name, each in episode.columns.items()},
        actions=episode.actions[first:end],
        numbers=episode.numbers[first:end],
        rewards=episode.rewards[first:end],
    )


def _with_clean_texts(episode: RecordedEpisode) -> RecordedEpisode:
    actions = tuple(replace(each, text=_clean(each.text or "") or None) for each in episode.actions)
    return replace(episode, actions=actions, text=_clean(episode.text))


def _clean(text: str) -> str:
    """Return a text without markup, decoded as it should have been; placeholders are empty."""
    for wrong in ("cp1252", "latin-1"):
        try:
            text = text.encode(wrong).decode("utf-8")
            break
        except UnicodeError:
            continue  # it was right, or cannot be told
    text = " ".join(unescape(MARKUP.sub(lambda tag: tag[0] if tag[0][0] == "&" else " ", text)).split())
    return "" if text.lower() in PLACEHOLDERS else text


class _Reader:
    """Reads whole episodes of a source, with frames as large as they are stored."""

    def __init__(self, examined: Examined) -> None:
        self.examined, source = examined, examined.source
        self.dataset: LeRobotDataset | None = None
        self.lost = list(examined.unread)
        if isinstance(source, LeRobotSource):
            self._open_lerobot(source)
            return
        recipes = dict(examined.recipes(0))
        specs = list(examined.specs)
        tracks = [each.controls for each in recipes.values() if isinstance(each, Clip)]
        held = {
            key for each in tracks if "keys" in each for keys in each["keys"].values for key in keys or ()
        }
        fields, clip = {spec.field for spec in specs}, getattr(source, "format", None)
        length = clip.chunk if clip else 1
        if "keys" not in fields:
            rate = examined.fps / length
            specs = [*(ActionSpec(key, "key", low=0, high=1, rate=rate) for key in sorted(held)), *specs]
        known = {"keys"} | fields
        self.lost += sorted({name for each in tracks for name, one in each.items() if one.values} - known)
        self.recipes = recipes
        rewarded = any(each.outcomes for each in recipes.values() if isinstance(each, Clip))
        self.format = RecordingFormat(examined.fps, tuple(specs), {}, length, rewarded)

    def _open_lerobot(self, source: LeRobotSource) -> None:
        opened = source.dataset
        features = opened.info["features"]
        cameras = [name for name, each in features.items() if each["dtype"] in ("video", "image")]
        columns = {**self.examined.config.columns, "video": "+".join(cameras)}
        self.dataset = dataset = LeRobotDataset(self.examined.config.path, self.examined.name, columns)
        plain = ("float32", "float64", "int64", "int32", "bool", "string")
        written = {*PLAIN_COLUMNS, *cameras, dataset.action}
        others = {name: each for name, each in features.items() if name not in written}
        self.columns = {
            name: {key: each.get(key) for key in ("dtype", "shape", "names")}
            for name, each in others.items()
            if each["dtype"] in plain and len(each["shape"]) == 1 and "/" not in name
        }
        self.lost = [name for name in others if name not in self.columns]
        rate = max((spec.rate for spec in dataset.specs), default=0.0) or dataset.rate
        fps = int(dataset.stored_fps) if dataset.stored_fps.is_integer() else dataset.stored_fps
        self.stride = max(1, round(dataset.rate / rate))
        specs = tuple(replace(each, rate=each.rate * fps / dataset.rate) for each in dataset.specs)
        self.format = RecordingFormat(
            fps, specs, {}, self.stride, dataset.states_outcomes, columns=self.columns
        )

    def read(self, number: int) -> RecordedEpisode:
        return self._of_clip(number) if self.dataset is None else self._of_lerobot(number)

    def _of_clip(self, number: int) -> RecordedEpisode:
        clip = self.recipes[number]
        assert isinstance(clip, Clip)
        native = replace(clip.format, size=self.examined.native, max_words=0)
        episode = replace(clip, format=native).episode("rounds", 0, number, ALL)
        ended = [each.ended for each in episode.outcomes]
        count = len(episode.actions)
        rewards = np.array([each.reward for each in episode.outcomes] or [0.0] * count, np.float32)
        specs = self.format.specs
        return RecordedEpisode(
            {"camera": np.concatenate(episode.observations)},
            episode.actions,
            np.array([each.numbers(specs) for each in episode.actions], np.float32).reshape(count, -1),
            rewards,
            any(ended),
            not any(ended),
            number,
        )

    def _of_lerobot(self, number: int) -> RecordedEpisode:
        dataset, source = self.dataset, self.examined.source
        assert dataset is not None and isinstance(source, LeRobotSource)
        place = dataset.episodes[source.chosen[number]]
        numbers, texts, outcomes = dataset.steps(place)
        clip = dataset.clip(source.chosen[number], source.format, source.takes, False)
        if not isinstance(clip, Clip):
            raise InputError(clip.reason)
        shots = clip.video.parts if isinstance(clip.video, Tiles) else (clip.video,)
        steps = len(numbers) // self.stride
        cameras = {}
        for name, shot in zip(dataset.cameras, shots, strict=True):
            assert isinstance(shot, Footage)
            # The rate of the rows, which may be a fraction: no frame is left out or repeated.
            whole = replace(source.format, size=dataset.shape_of(name), fps=dataset.rate)
            frames = shot.read(whole, 0, steps * self.stride + 1)
            cameras[name.removeprefix("observation.images.")] = frames
        if len({len(frames) for frames in cameras.values()} | {steps * self.stride + 1}) > 1:
            raise InputError("its cameras have fewer frames than it has rows")
        rows = slice(place.first_row, place.first_row + steps * self.stride + 1)
        further = {}
        if self.columns:
            table = dataset.files.table(place.data_path, list(self.columns))
            further = {name: np.array(table[name][rows].to_pylist()) for name in self.columns}
        starts = np.arange(steps) * self.stride
        rewards = outcomes[:, 0] if outcomes.shape[1] else np.zeros(len(numbers), np.float32)
        parts = rewards[: steps * self.stride].reshape(steps, self.stride).sum(axis=1)
        ended = bool(outcomes.shape[1] and outcomes[:, 1].any())
        return RecordedEpisode(
            cameras,
            tuple(Action(text=texts[start]) if texts[start] else Action() for start in starts),
            numbers[starts],
            parts.astype(np.float32),
            ended,
            not ended,
            place.index,
            columns=further,
        )


def _keep_split(examined: Examined, numbers: Sequence[int], folder: Path) -> None:
    """Hold out the same episodes in the copy as in the source."""
    if not isinstance(examined.source, LeRobotSource):
        return
    try:
        with examined.source.dataset.files.open("meta/split.json") as file:
            split = json.load(file)
    except OSError:
        return
    chosen, held = examined.source.chosen, {*split["held-out"]}
    split["held-out"] = [new for new, number in enumerate(numbers) if chosen[number] in held]
    with atomic_file(folder / "meta" / "split.json") as temporary:
        temporary.write_text(json.dumps(split), encoding="utf-8")
