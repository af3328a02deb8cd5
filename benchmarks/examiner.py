"""Planted faults that `worldmodel data check` names, and clean recordings in which it finds none.

Six clean sets are made: recordings of three environments as LeRobot datasets, one as a table of clips, films
with captions in tar files, and the same in parquet files of a Hugging Face dataset. Each fault is planted in
a copy of one of them, and counts as named if a fault of the right kind is reported. Clean recordings are
examined of as many environments as are installed; every fault that is reported there is a false alarm.

    python -m benchmarks examiner                  # all
    python -m benchmarks examiner --only reversed  # faults whose name contains a word
    python -m benchmarks examiner --clean          # clean recordings alone
"""

import argparse
import io
import json
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image
from pyarrow import parquet

from worldmodel import media
from worldmodel.data import examiner
from worldmodel.errors import WorldModelError
from worldmodel.recording.clip_table import ClipTableStore
from worldmodel.recording.environment import EnvironmentEpisodes
from worldmodel.recording.episode import RecordedEpisode
from worldmodel.recording.lerobot import LeRobotStore
from worldmodel.recording.settings import EnvironmentSettings

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # games draw without a screen
COUNT, ODD = 40, 8
"""Episodes of a set, and of those in which a fault is planted."""
Episodes = list[RecordedEpisode]
GRID = "minigrid:MiniGrid-"
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "door": {"env_id": f"{GRID}DoorKey-6x6-v0", "policy": "sticky"},
    "cart": {"env_id": "CartPole-v1"},
    "pusht": {"env_id": "gym_pusht:gym_pusht/PushT-v0"},
    "taxi": {"env_id": "Taxi-v4", "size": 80},
}
CLEAN: dict[str, dict[str, Any]] = {
    **ENVIRONMENTS,
    "acrobot": {"env_id": "Acrobot-v1"},
    "babyai": {"env_id": "minigrid:BabyAI-GoToLocal-v0"},
    "cart, sticky": {"env_id": "CartPole-v1", "policy": "sticky", "size": (64, 96)},
    "cliff": {"env_id": "CliffWalkingSlippery-v1", "size": (48, 144)},
    "crafter": {"env_id": "worldmodel.games.crafter:Crafter-v1", "policy": "sticky"},
    "dynamic": {"env_id": f"{GRID}Dynamic-Obstacles-6x6-v0"},
    "empty": {"env_id": f"{GRID}Empty-Random-6x6-v0"},
    "fetch": {"env_id": f"{GRID}Fetch-5x5-N2-v0"},
    "four rooms": {"env_id": f"{GRID}FourRooms-v0"},
    "frozen lake": {"env_id": "FrozenLake-v1"},
    "frozen lake 8": {"env_id": "FrozenLake8x8-v1", "policy": "sticky"},
    "key corridor": {"env_id": f"{GRID}KeyCorridorS3R1-v0", "policy": "sticky"},
    "lava": {"env_id": f"{GRID}LavaCrossingS9N1-v0"},
    "memory": {"env_id": f"{GRID}MemoryS7-v0"},
    "mountain car": {"env_id": "MountainCar-v0", "policy": "sticky"},
    "mountain car, continuous": {"env_id": "MountainCarContinuous-v0"},
    "multi room": {"env_id": f"{GRID}MultiRoom-N2-S4-v0"},
    "pendulum": {"env_id": "Pendulum-v1"},
    "put near": {"env_id": f"{GRID}PutNear-6x6-N2-v0"},
    "unlock": {"env_id": f"{GRID}Unlock-v0", "policy": "sticky"},
}


@dataclass(frozen=True)
class Fault:
    """A fault, and the kinds of finding of which one names it."""

    name: str
    of: str
    """Set in which it is planted."""
    kinds: tuple[str, ...]
    episodes: Callable[[Any], Any] | None = None
    """Returns episodes, or films, with the fault."""
    files: Callable[[Path], None] | None = None
    """Plants it in the files of a set."""


@cache
def recorded(name: str, count: int = COUNT) -> tuple[Any, Episodes]:
    """Return the format and the episodes of an environment."""
    settings = EnvironmentSettings(**{"size": 64, "max_steps": 60, **CLEAN[name]})
    opened = EnvironmentEpisodes(settings)
    return opened.format, [opened.episode(index) for index in range(count)]


# ---- films -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Film:
    """Frames with a caption."""

    frames: np.ndarray
    caption: str


WORDS = "a red boat drifts across the calm lake while birds circle above trees near an old bridge".split()  # noqa: SIM905


@cache
def films() -> tuple[Film, ...]:
    """Return films of random landscapes that a camera passes, each with a sentence."""
    found = []
    for seed in range(COUNT):
        rng = np.random.default_rng(seed)
        land = np.zeros((160, 320, 3))
        for cells in (4, 8, 16, 40):
            part = rng.uniform(0, 255, (cells, 2 * cells, 3)).astype(np.uint8)
            land += np.asarray(Image.fromarray(part).resize((320, 160), Image.Resampling.BICUBIC)) / cells
        land = ((land - land.min()) / np.ptp(land) * 235 + 10).astype(np.uint8)
        step, first = int(rng.integers(1, 4)), int(rng.integers(0, 60))
        x = first + step * np.arange(24)
        frames = np.stack([land[20 : 20 + 64, at : at + 96] for at in x])
        found.append(Film(frames, " ".join(rng.choice(WORDS, 9)) + f" in scene {seed}"))
    return tuple(found)


def encoded(frames: np.ndarray, fps: int = 8) -> bytes:
    """Return frames as an MP4."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "film.mp4")
        media.write_video(frames, path, fps, scale=1)
        return path.read_bytes()


def write_tar(given: Sequence[Film | bytes], folder: Path) -> Path:
    """Write films as a WebDataset shard; bytes take the place of a video."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / "films.tar", "w") as tar:
        for number, film in enumerate(given):
            parts = {"mp4": film if isinstance(film, bytes) else encoded(film.frames)}
            if isinstance(film, Film) and film.caption:
                parts["json"] = json.dumps({"text": film.caption}).encode()
            for kind, data in parts.items():
                member = tarfile.TarInfo(f"{number:05d}.{kind}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return folder / "films.tar"


def write_parquet(given: Sequence[Film], folder: Path) -> Path:
    """Write films as a Hugging Face dataset of two parquet files."""
    folder.mkdir(parents=True, exist_ok=True)
    half = len(given) // 2
    for number, part in enumerate((given[:half], given[half:])):
        rows = {
            "video": pa.array([encoded(film.frames) for film in part], pa.binary()),
            "caption": [film.caption for film in part],
        }
        parquet.write_table(pa.table(rows), folder / f"train-{number}.parquet")
    return folder


# ---- writing and examining ---------------------------------------------------------------------------------


def write(of: str, given: Any, folder: Path) -> str:
    """Write a set, and return it as an argument of `worldmodel data check`."""
    if of == "tar":
        return f"webdataset:{write_tar(given, folder)}"
    if of == "parquet":
        return f"huggingface:{write_parquet(given, folder)}"
    format, _ = recorded(of, COUNT)
    if of == "taxi":
        table = ClipTableStore(folder, format)
        folder.mkdir(parents=True, exist_ok=True)
        for episode in given:
            table.write(episode)
        return str(folder / "clips.jsonl")
    store = LeRobotStore(folder, format)
    for episode in given:
        store.write(episode)
    store.finish()
    return str(folder)


def clean(of: str) -> Any:
    """Return the episodes or films of a set without a fault."""
    return list(films()) if of in ("tar", "parquet") else list(recorded(of)[1])


def found_in(argument: str) -> list[examiner.Finding]:
    """Return the faults that are found in a source."""
    try:
        return examiner.examine(examiner.open_examined(argument)).report().faults
    except WorldModelError as error:
        return [examiner.Finding("refused", str(error))]


# ---- faults of recordings ----------------------------------------------------------------------------------


def some(
    change: Callable[[RecordedEpisode], RecordedEpisode], count: int = ODD
) -> Callable[[Episodes], Episodes]:
    """Change the first long episodes."""

    def changed(episodes: Episodes) -> Episodes:
        long = [index for index, each in enumerate(episodes) if len(each.actions) >= 20][:count]
        return [change(each) if index in long else each for index, each in enumerate(episodes)]

    return changed


def every(change: Callable[[RecordedEpisode], RecordedEpisode]) -> Callable[[Episodes], Episodes]:
    """Change all episodes."""
    return lambda episodes: [change(each) for each in episodes]


def acting(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[RecordedEpisode], RecordedEpisode]:
    """Change the rows of actions; the first axis is time."""

    def changed(each: RecordedEpisode) -> RecordedEpisode:
        rows = change(np.arange(len(each.actions)))
        actions = tuple(each.actions[row] for row in rows)
        return replace(each, actions=actions, numbers=each.numbers[rows])

    return changed


def scaled(factor: float, place: slice = slice(None)) -> Callable[[RecordedEpisode], RecordedEpisode]:
    """Multiply the numbers of actions."""

    def changed(each: RecordedEpisode) -> RecordedEpisode:
        numbers = each.numbers.copy()
        numbers[place] *= factor
        return replace(each, numbers=numbers)

    return changed


def seen(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[RecordedEpisode], RecordedEpisode]:
    """Change the frames."""
    return lambda each: replace(
        each, cameras={name: np.ascontiguousarray(change(frames)) for name, frames in each.cameras.items()}
    )


def shifted(by: int) -> Callable[[RecordedEpisode], RecordedEpisode]:
    """Move actions to later rows."""
    return acting(lambda rows: np.roll(rows, by))


def noise(frames: np.ndarray) -> np.ndarray:
    """Return random pixels."""
    return np.random.default_rng(0).integers(0, 256, frames.shape, np.uint8)


def grain(sigma: float) -> Callable[[np.ndarray], np.ndarray]:
    """Add random numbers to pixels."""

    def changed(frames: np.ndarray) -> np.ndarray:
        added = frames + np.random.default_rng(1).normal(0, sigma, frames.shape)
        return np.clip(added, 0, 255).astype(np.uint8)

    return changed


def resized(box: Callable[[int, int], tuple[float, ...]]) -> Callable[[np.ndarray], np.ndarray]:
    """Enlarge a part of every frame to the whole."""

    def changed(frames: np.ndarray) -> np.ndarray:
        height, width = frames.shape[1:3]
        images = (Image.fromarray(frame) for frame in frames)
        return np.stack([np.asarray(i.resize((width, height), 2, box(width, height))) for i in images])  # type: ignore[arg-type]

    return changed


def blurred(frames: np.ndarray) -> np.ndarray:
    """Shrink and enlarge frames."""
    height, width = frames.shape[1:3]
    small = [Image.fromarray(frame).resize((width // 4, height // 4), 4) for frame in frames]
    return np.stack([np.asarray(image.resize((width, height), 2)) for image in small])


def barred(share: float) -> Callable[[np.ndarray], np.ndarray]:
    """Squeeze frames between black bars."""

    def changed(frames: np.ndarray) -> np.ndarray:
        height, width = frames.shape[1:3]
        bar = round(share * height)
        found = np.zeros_like(frames)
        for frame, target in zip(frames, found, strict=True):
            target[bar : height - bar] = np.asarray(Image.fromarray(frame).resize((width, height - 2 * bar)))
        return found

    return changed


def part(
    first: float, last: float, change: Callable[[np.ndarray], np.ndarray]
) -> Callable[[np.ndarray], np.ndarray]:
    """Change frames of a part of an episode."""

    def changed(frames: np.ndarray) -> np.ndarray:
        found = frames.copy()
        place = slice(int(first * len(frames)), int(last * len(frames)))
        found[place] = change(frames[place])
        return found

    return changed


def frozen(frames: np.ndarray) -> np.ndarray:
    """Return the first frame again and again."""
    return np.repeat(frames[:1], len(frames), axis=0)


def black(frames: np.ndarray) -> np.ndarray:
    """Return black frames."""
    return np.zeros_like(frames)


def foreign(episodes: Episodes) -> Episodes:
    """Give episodes the actions of others."""
    found = list(episodes)
    for index in range(ODD):
        mine, other = episodes[index], episodes[index + ODD]
        count = min(len(mine.actions), len(other.actions))
        rows = slice(0, count)
        found[index] = replace(
            mine,
            actions=other.actions[rows],
            numbers=other.numbers[rows],
            rewards=mine.rewards[rows],
            cameras={name: frames[: count + 1] for name, frames in mine.cameras.items()},
            infos=mine.infos[: count + 1],
        )
    return found


def copied(change: Callable[[RecordedEpisode], RecordedEpisode]) -> Callable[[Episodes], Episodes]:
    """Add episodes again."""

    def changed(episodes: Episodes) -> Episodes:
        long = [each for each in episodes if len(each.actions) >= 30][:4]
        return [*episodes, *(change(each) for each in long)]

    return changed


def ended_early(each: RecordedEpisode) -> RecordedEpisode:
    """State no reward but one that is not a number."""
    return replace(each, rewards=np.full(len(each.rewards), np.nan, np.float32))


# ---- faults of files ---------------------------------------------------------------------------------------


def rows_of(change: Callable[[list[dict[str, Any]]], None]) -> Callable[[Path], None]:
    """Change the rows of a LeRobot dataset."""

    def changed(folder: Path) -> None:
        path = next((folder / "data").rglob("*.parquet"))
        table = parquet.read_table(path)
        rows = table.to_pylist()
        change(rows)
        parquet.write_table(pa.Table.from_pylist(rows, table.schema), path)

    return changed


def info_of(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Change `meta/info.json`."""

    def changed(folder: Path) -> None:
        path = folder / "meta/info.json"
        info = json.loads(path.read_text())
        change(info)
        path.write_text(json.dumps(info))

    return changed


def lines_of(change: Callable[[list[dict[str, Any]]], Any]) -> Callable[[Path], None]:
    """Change the rows of a table."""

    def changed(folder: Path) -> None:
        path = folder / "clips.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = change(rows) or rows
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    return changed


def videos_of(change: Callable[[Path], object], count: int = 5) -> Callable[[Path], None]:
    """Change the first videos of a set."""

    def changed(folder: Path) -> None:
        for path in sorted(folder.rglob("*.mp4"))[:count]:
            change(path)

    return changed


def again(fps: float, scale: float) -> Callable[[Path], None]:
    """Encode a video at another rate or size."""

    def changed(path: Path) -> None:
        with media.open_video(path.read_bytes()) as video:
            info = media.probe(path, decode=False)
            size = (2 * round(info.height * scale / 2), 2 * round(info.width * scale / 2))
            frames = video.read(size, None, 10_000)
        media.write_video(frames, path, int((info.fps or 10) * fps), scale=1)

    return changed


def cut_file(path: Path) -> None:
    """Keep half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_lists(rows: list[dict[str, Any]]) -> None:
    """Keep half of the actions of the first rows."""
    for row in rows[:5]:
        row["keys"] = row["keys"][: len(row["keys"]) // 2]


def cropped(left: float, top: float, right: float, bottom: float) -> Callable[[np.ndarray], np.ndarray]:
    """Enlarge the part of every frame that is left when shares of its sides are cut off."""
    return resized(lambda w, h: (w * left, h * top, w * (1 - right), h * (1 - bottom)))


def uncoloured(frames: np.ndarray) -> np.ndarray:
    """Return grey frames."""
    return frames.mean(-1, keepdims=True).repeat(3, -1).astype(np.uint8)


def set_rows(rows: list[dict[str, Any]], name: str, value: Callable[[int], Any], episodes: int = 4) -> None:
    """Set a column in the first episodes."""
    for number, row in enumerate(rows):
        if row["episode_index"] < episodes:
            row[name] = value(number)


def reverse_times(rows: list[dict[str, Any]]) -> None:
    """Let times run backwards."""
    set_rows(rows, "timestamp", lambda number: 1000.0 - number)


def lose_rows(rows: list[dict[str, Any]]) -> None:
    """Let times have a gap."""
    for row in rows:
        if row["episode_index"] < 4 and row["frame_index"] > 8:
            row["timestamp"] += 0.7


def slow_times(rows: list[dict[str, Any]]) -> None:
    """Let times say half of the rate."""
    for row in rows:
        row["timestamp"] *= 2


def twice(folder: Path) -> None:
    """Give two episodes one index."""
    path = next((folder / "meta/episodes").rglob("*.parquet"))
    table = parquet.read_table(path)
    rows = table.to_pylist()
    rows[3]["episode_index"] = rows[2]["episode_index"]
    parquet.write_table(pa.Table.from_pylist(rows, table.schema), path)


def swap_captions(mark: Callable[[str], str], count: int = ODD) -> Callable[[list[Film]], list[Film]]:
    """Change captions."""
    return lambda given: [
        replace(film, caption=mark(film.caption)) if number < count else film
        for number, film in enumerate(given)
    ]


def filmed(
    change: Callable[[np.ndarray], np.ndarray], count: int = ODD
) -> Callable[[list[Film]], list[Film]]:
    """Change the frames of films."""
    return lambda given: [
        replace(film, frames=np.ascontiguousarray(change(film.frames))) if number < count else film
        for number, film in enumerate(given)
    ]


def spliced(given: list[Film]) -> list[Film]:
    """Let the second half of films be of another one."""
    return [
        replace(film, frames=np.concatenate([film.frames[:12], given[number + ODD].frames[12:]]))
        if number < ODD
        else film
        for number, film in enumerate(given)
    ]


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n"
PAGE = b"<!DOCTYPE html><html><head><title>403</title></head><body>Forbidden</body></html>"
FAULTS = (
    Fault("all actions 1 row late", "door", ("lag",), every(shifted(1))),
    Fault("all actions 1 row early", "door", ("lag",), every(shifted(-1))),
    Fault("all actions 3 rows late", "door", ("lag",), every(shifted(3))),
    Fault("1 row late in 8 of 40", "door", ("lag",), some(shifted(1))),
    Fault("2 rows early in 8 of 40", "door", ("lag",), some(shifted(-2))),
    Fault("actions of other episodes in 8", "door", ("foreign",), foreign),
    Fault("actions held for 4 frames", "door", ("repeated",), every(acting(lambda rows: rows // 4 * 4))),
    Fault("constant action in 8", "door", ("constant",), some(acting(np.zeros_like))),
    Fault(
        "action stops half-way in 8",
        "door",
        ("constant",),
        some(acting(lambda r: np.minimum(r, len(r) // 3))),
    ),
    Fault("pictures reversed in 8", "door", ("reversed",), some(seen(lambda f: f[::-1]))),
    Fault("black in 8", "door", ("black",), some(seen(black))),
    Fault("a third of the frames black in 6", "door", ("black",), some(seen(part(0.3, 0.6, black)), 6)),
    Fault("still in 8", "door", ("still",), some(seen(frozen))),
    Fault("frozen from the middle on in 8", "door", ("frozen",), some(seen(part(0.5, 1, frozen)))),
    Fault("noise in 8", "door", ("noise",), some(seen(noise))),
    Fault("grain in 8", "door", ("noise",), some(seen(grain(25)))),
    Fault("blurred in 8", "door", ("blurred",), some(seen(blurred))),
    Fault("cropped by an eighth in 8", "door", ("cropped",), some(seen(cropped(1 / 8, 1 / 8, 1 / 8, 1 / 8)))),
    Fault("cropped at the left in 6", "door", ("cropped",), some(seen(cropped(1 / 6, 0, 0, 0)), 6)),
    Fault("letterboxed in 8", "door", ("letterbox",), some(seen(barred(0.15)))),
    Fault("red and blue swapped in 8", "taxi", ("channels",), some(seen(lambda f: f[..., ::-1]))),
    Fault("colours inverted in 8", "door", ("inverted",), some(seen(lambda f: 255 - f))),
    Fault("half as bright in 8", "door", ("brightness",), some(seen(lambda f: f // 2))),
    Fault("4 exact copies", "door", ("copies",), copied(lambda each: each)),
    Fault("4 copies, encoded again", "door", ("near_copies", "copies"), copied(seen(grain(2)))),
    Fault("rewards that are no numbers", "door", ("unreadable",), some(ended_early, 4)),
    Fault(
        "actions that are no numbers",
        "door",
        ("unreadable",),
        files=rows_of(lambda rows: set_rows(rows, "action", lambda n: [float("nan")] * 7)),
    ),
    Fault("times that run backwards", "door", ("timestamps",), files=rows_of(reverse_times)),
    Fault("times with a gap", "door", ("timestamps",), files=rows_of(lose_rows)),
    Fault("times of half of the rate", "door", ("rate",), files=rows_of(slow_times)),
    Fault(
        "twice the frame rate in info.json",
        "door",
        ("rate",),
        files=info_of(lambda info: info.update(fps=20)),
    ),
    Fault("an episode index twice", "door", ("index", "unreadable"), files=twice),
    Fault("a lost video", "door", ("unreadable",), files=videos_of(Path.unlink)),
    Fault("a cut video", "door", ("unreadable",), files=videos_of(cut_file)),
    Fault("upside down in 8", "cart", ("upside_down",), some(seen(lambda f: f[:, ::-1]))),
    Fault("turned by 90 degrees in 8", "cart", ("turned",), some(seen(lambda f: np.rot90(f, axes=(1, 2))))),
    Fault("cropped at the top in 6", "cart", ("cropped",), some(seen(cropped(0, 1 / 5, 0, 0)), 6)),
    Fault("constant action in 8, forces", "cart", ("constant",), some(acting(np.zeros_like))),
    Fault("black in 4, forces", "cart", ("black",), some(seen(black), 4)),
    Fault("mirrored in 6", "taxi", ("mirrored",), some(seen(lambda f: f[:, :, ::-1]), 6)),
    Fault("degrees for radians in 4", "pusht", ("scale", "unreadable"), some(scaled(57.3), 4)),
    Fault(
        "a value 1000 times as large", "pusht", ("spike", "unreadable"), some(scaled(1000, slice(7, 8)), 4)
    ),
    Fault("scale of a hundredth in 4", "pusht", ("scale",), some(scaled(0.01), 4)),
    Fault(
        "action stops half-way in 6",
        "pusht",
        ("constant",),
        some(acting(lambda r: np.minimum(r, len(r) // 3)), 6),
    ),
    Fault(
        "every 2nd frame repeated", "pusht", ("held",), every(seen(lambda f: f[np.arange(len(f)) // 2 * 2]))
    ),
    Fault("all actions 1 row late, table", "taxi", ("lag",), every(shifted(1))),
    Fault("5 files lost", "taxi", ("unreadable",), files=videos_of(Path.unlink)),
    Fault(
        "5 pointers of Git LFS", "taxi", ("unreadable",), files=videos_of(lambda p: p.write_bytes(POINTER))
    ),
    Fault("5 pages for videos", "taxi", ("unreadable",), files=videos_of(lambda p: p.write_bytes(PAGE))),
    Fault("5 videos of half the size", "taxi", ("size",), files=videos_of(again(1, 0.5))),
    Fault("5 videos of twice the rate", "taxi", ("rate", "unreadable"), files=videos_of(again(2, 1))),
    Fault("lists of actions cut in 5", "taxi", ("unreadable", "constant"), files=lines_of(cut_lists)),
    Fault("3 rows twice", "taxi", ("copies",), files=lines_of(lambda rows: [*rows, *rows[:3]])),
    Fault("no caption in 5", "tar", ("no_text",), swap_captions(lambda text: "", 5)),
    Fault(
        "captions decoded wrongly",
        "tar",
        ("damaged_text",),
        swap_captions(lambda text: (text + " läuft").encode().decode("latin-1")),
    ),
    Fault("captions with markup", "tar", ("markup",), swap_captions(lambda text: f"<p>{text}</p>")),
    Fault("placeholders for captions", "tar", ("placeholder",), swap_captions(lambda text: "nan", 3)),
    Fault("one caption for 12", "tar", ("same_text",), swap_captions(lambda text: "stock footage, 4k", 12)),
    Fault(
        "captions of 900 words",
        "tar",
        ("long_text", "unreadable"),
        swap_captions(lambda text: " ".join([text] * 80), 3),
    ),
    Fault("still films", "tar", ("still",), filmed(frozen)),
    Fault("films letterboxed", "tar", ("letterbox",), filmed(barred(0.12))),
    Fault("films without colour", "parquet", ("grey",), filmed(uncoloured)),
    Fault("films of noise", "parquet", ("noise",), filmed(noise)),
    Fault("films that are black at the end", "parquet", ("black",), filmed(part(0.6, 1, black))),
    Fault("joined from two films", "parquet", ("cut",), spliced),
    Fault(
        "films encoded again",
        "parquet",
        ("near_copies", "copies"),
        lambda given: [*given, *filmed(grain(3))(given[:4])],
    ),
)


def planted(fault: Fault, folder: Path) -> list[examiner.Finding]:
    """Plant a fault, and return what is found."""
    given = clean(fault.of)
    argument = write(fault.of, fault.episodes(given) if fault.episodes else given, folder)
    if fault.files:
        fault.files(folder)
    return found_in(argument)


def main() -> None:
    """Print a row for each fault and for each clean recording."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="faults whose name contains this")
    parser.add_argument("--of", default="", help="faults of one set")
    parser.add_argument("--clean", action="store_true", help="clean recordings alone")
    args = parser.parse_args()
    named, wanted = (
        0,
        [fault for fault in FAULTS if args.only in fault.name and args.of in fault.of and not args.clean],
    )
    for fault in wanted:
        folder = Path(tempfile.mkdtemp())
        try:
            found = planted(fault, folder / "set")
        finally:
            shutil.rmtree(folder)
        right = [each for each in found if each.kind in fault.kinds]
        named += bool(right)
        told = (right or found)[0].as_text() if found else "nothing"
        print(f"| {fault.name} | {fault.of} | {'yes' if right else '**no**'} | {told[:140]} |", flush=True)
    if wanted:
        print(f"named: {named} of {len(wanted)}")
    if args.only or args.of:
        return
    alarms = 0
    for name in [*CLEAN, "tar", "parquet"]:
        folder, began = Path(tempfile.mkdtemp()), time.process_time()
        try:
            argument = write(name, clean(name), folder / "set")
            made = time.process_time()
            faults = found_in(argument)
        finally:
            shutil.rmtree(folder)
        alarms += len(faults)
        told = "; ".join(each.as_text()[:100] for each in faults) or "none"
        print(f"| {name} | {told} | {time.process_time() - made:.1f} s |", flush=True)
        del began
    print(f"alarms: {alarms} in {len(CLEAN) + 2} recordings")


if __name__ == "__main__":
    main()
