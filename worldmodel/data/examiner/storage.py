"""How a source is stored: sizes and rates of its files, times of its rows, and columns that nothing reads."""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

import numpy as np

from worldmodel import media
from worldmodel.data.clips import Clip, Files, Part
from worldmodel.data.examiner.opening import Examined
from worldmodel.data.examiner.report import Finding, in_episodes
from worldmodel.data.lerobot import LeRobotDataset, LeRobotSource
from worldmodel.data.sources import Recipe
from worldmodel.errors import InputError
from worldmodel.media import MediaInfo

USUAL = 0.75
"""Share of the files that must have one size or rate for the others to be named."""
LANGUAGE = ("instruction", "language", "caption", "subtask", "prompt")


def media_info(recipe: Recipe) -> MediaInfo | None:
    """Return what the header of a clip's file says; None where it has no file of its own, or a broken one."""
    if not isinstance(recipe, Clip) or not isinstance(recipe.video, Files | Part | bytes):
        return None
    with suppress(InputError):
        video = recipe.video if isinstance(recipe.video, bytes) else recipe.video.read()
        return media.probe(video, decode=False)
    return None


def media_findings(infos: Mapping[str, MediaInfo]) -> list[Finding]:
    """Return which files have another size, shape or rate than most."""
    findings = []
    tests = (
        ("size", "pixels", {name: f"{each.width} x {each.height}" for name, each in infos.items()}),
        (
            "rate",
            "frames per second",
            {name: f"{each.fps:.4g}" for name, each in infos.items() if each.fps},
        ),
    )
    for kind, what, values in tests:
        counts = Counter(values.values())
        if len(counts) < 2:
            continue
        usual, count = counts.most_common(1)[0]
        told = ", ".join(f"{value} in {number}" for value, number in counts.most_common(4))
        if count >= USUAL * len(values):
            names = tuple(name for name, value in values.items() if value != usual)
            text = f"{len(names)} of {len(values)} files have other {what} than most: {told}"
            findings.append(Finding(kind, text, True, names))
        else:
            findings.append(Finding(kind, f"files differ in {what}: {told}", False))
    return findings


def column_findings(examined: Examined) -> list[Finding]:
    """Return columns that a source has and that nothing reads."""
    if not examined.unread:
        return []
    language = [name for name in examined.unread if any(word in name.lower() for word in LANGUAGE)]
    acting = [name for name in examined.unread if name.lower().split(".")[-1] in ("actions", "action")]
    findings = []
    if language:
        text = f"texts that are not read: {', '.join(language)}; name one as columns.text"
        findings.append(Finding("unread_text", text, False))
    if acting and not examined.specs:
        text = f"actions that are not read: {', '.join(acting)}; name them in data.sources.NAME.columns"
        findings.append(Finding("unread_actions", text, True))
    others = [name for name in examined.unread if name not in language]
    if others:
        findings.append(Finding("unread", f"columns that are not read: {', '.join(others)}", False))
    return findings


def lerobot_findings(source: LeRobotSource, names: Mapping[int, str]) -> list[Finding]:
    """Return what is wrong with the rows and files of a LeRobot dataset, for some episodes of the source."""
    dataset, found = source.dataset, []
    for number, name in names.items():
        episode = dataset.episodes[source.chosen[number]]
        with suppress(InputError):
            wrong = _times(dataset, dataset.times(episode))
            found += [(kind, text, name) for kind, text in wrong]
    return in_episodes(found, len(names)) + _totals(dataset) + _videos(dataset)


def _times(dataset: LeRobotDataset, times: np.ndarray) -> list[tuple[str, str]]:
    """Return what is wrong with the times of the rows of an episode, in seconds."""
    if len(times) < 2:
        return []
    if not np.isfinite(times).all():
        return [("timestamps", "a timestamp is not a finite number")]
    steps = np.diff(times)
    if (steps <= 0).any():
        return [("timestamps", "timestamps do not increase: rows are out of order, or were joined")]
    usual = float(np.median(steps))
    if abs(usual * dataset.stored_fps - 1) > 0.1:
        text = f"timestamps say {1 / usual:.3g} rows per second, and meta/info.json {dataset.stored_fps:.3g}"
        return [("rate", text)]
    if (steps > 1.5 * usual).any():
        return [("timestamps", "timestamps have gaps: rows were lost")]
    return []


def _totals(dataset: LeRobotDataset) -> list[Finding]:
    """Return where the index contradicts itself."""
    findings = []
    indices = Counter(each.index for each in dataset.episodes)
    if twice := [index for index, count in indices.items() if count > 1]:
        names = tuple(f"episode {index}" for index in twice)
        findings.append(Finding("index", f"{len(twice)} episode indices are given twice", True, names))
    rows, stated = sum(each.num_rows for each in dataset.episodes), dataset.info.get("total_frames")
    if isinstance(stated, int) and stated != rows:
        text = f"meta/info.json says {stated} frames, and the index of episodes {rows}"
        findings.append(Finding("index", text))
    return findings


def _videos(dataset: LeRobotDataset) -> list[Finding]:
    """Return which video files have another rate or size than the index says."""
    findings, stated = [], dataset.info["features"][dataset.camera]["shape"][:2]
    rates, sizes = [], []
    parts = (each.footage[0] for each in dataset.episodes)
    paths = list(dict.fromkeys(part.path for part in parts if not part.column))[:20]
    for path in paths:
        with suppress(InputError):
            video = media.shared_video(path)
            rate = float(video.stream.average_rate or 0)
            if rate and abs(rate / dataset.stored_fps - 1) > 0.02:
                rates.append((path, rate))
            size = (video.stream.codec_context.height, video.stream.codec_context.width)
            if size != tuple(stated):
                sizes.append((path, size))
    if rates:
        text = (
            f"{len(rates)} of {len(paths)} videos have {rates[0][1]:.4g} frames per second, and "
            f"meta/info.json says {dataset.stored_fps:.4g}"
        )
        findings.append(Finding("rate", text, True, tuple(path for path, _ in rates)))
    if sizes:
        (path, (height, width)) = sizes[0]
        text = (
            f"{len(sizes)} of {len(paths)} videos have {width} x {height} pixels, and meta/info.json says "
            f"{stated[1]} x {stated[0]}"
        )
        findings.append(Finding("size", text, len(sizes) < len(paths), tuple(path for path, _ in sizes)))
    return findings
