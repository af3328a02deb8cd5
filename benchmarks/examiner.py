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
    """A fault of a set."""

    of: str
    name: str
    kinds: str
    """Kinds of finding, of which one names it."""
    plant: Callable[[Any], Any]
    """Returns episodes or films with the fault, or changes the files of a set."""
    in_files: bool = False


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


def stopped(rows: np.ndarray) -> np.ndarray:
    """Repeat the action after a third of an episode."""
    return np.minimum(rows, len(rows) // 3)


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

    def changed(frames: np.ndarray) -> np.ndarray:
        height, width = frames.shape[1:3]
        box = (width * left, height * top, width * (1 - right), height * (1 - bottom))
        images = (Image.fromarray(frame).resize((width, height), 2, box) for frame in frames)
        return np.stack([np.asarray(image) for image in images])

    return changed


def uncoloured(frames: np.ndarray) -> np.ndarray:
    """Return grey frames."""
    return frames.mean(-1, keepdims=True).repeat(3, -1).astype(np.uint8)


def lose_numbers(rows: list[dict[str, Any]]) -> None:
    """Let the actions of the first episodes be no numbers."""
    for row in rows:
        if row["episode_index"] < 4:
            row["action"] = [float("nan")] * 7


def reverse_times(rows: list[dict[str, Any]]) -> None:
    """Let times of the first episodes run backwards."""
    for number, row in enumerate(rows):
        if row["episode_index"] < 4:
            row["timestamp"] = 1000.0 - number


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


def captioned(mark: Callable[[str], str], count: int = ODD) -> Callable[[list[Film]], list[Film]]:
    """Change captions."""
    return lambda given: [
        replace(film, caption=mark(film.caption)) if number < count else film
        for number, film in enumerate(given)
    ]


def misread(text: str) -> str:
    """Return a text whose UTF-8 was read as Latin-1."""
    return (text + " läuft").encode().decode("latin-1")


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
IN_EPISODES: dict[str, tuple[tuple[str, str, Callable[[Any], Any]], ...]] = {
    "door": (
        ("all actions 1 row late", "lag", every(shifted(1))),
        ("all actions 1 row early", "lag", every(shifted(-1))),
        ("all actions 3 rows late", "lag", every(shifted(3))),
        ("1 row late in 8 of 40", "lag", some(shifted(1))),
        ("2 rows early in 8 of 40", "lag", some(shifted(-2))),
        ("actions of other episodes in 8", "foreign", foreign),
        ("actions held for 4 frames", "repeated", every(acting(lambda rows: rows // 4 * 4))),
        ("constant action in 8", "constant", some(acting(np.zeros_like))),
        ("action stops half-way in 8", "constant", some(acting(stopped))),
        ("pictures reversed in 8", "reversed", some(seen(lambda f: f[::-1]))),
        ("black in 8", "black", some(seen(np.zeros_like))),
        ("a third of the frames black in 6", "black", some(seen(part(0.3, 0.6, np.zeros_like)), 6)),
        ("still in 8", "still", some(seen(frozen))),
        ("frozen from the middle on in 8", "frozen", some(seen(part(0.5, 1, frozen)))),
        ("noise in 8", "noise", some(seen(noise))),
        ("grain in 8", "noise", some(seen(grain(25)))),
        ("blurred in 8", "blurred", some(seen(blurred))),
        ("cropped by an eighth in 8", "cropped", some(seen(cropped(1 / 8, 1 / 8, 1 / 8, 1 / 8)))),
        ("cropped at the left in 6", "cropped", some(seen(cropped(1 / 6, 0, 0, 0)), 6)),
        ("letterboxed in 8", "letterbox", some(seen(barred(0.15)))),
        ("colours inverted in 8", "inverted", some(seen(lambda f: 255 - f))),
        ("half as bright in 8", "brightness", some(seen(lambda f: f // 2))),
        ("4 exact copies", "copies", copied(lambda each: each)),
        ("4 copies, encoded again", "near_copies copies", copied(seen(grain(2)))),
        ("rewards that are not numbers", "unreadable", some(ended_early, 4)),
    ),
    "cart": (
        ("upside down in 8", "upside_down", some(seen(lambda f: f[:, ::-1]))),
        ("turned by 90 degrees in 8", "turned", some(seen(lambda f: np.rot90(f, axes=(1, 2))))),
        ("cropped at the top in 6", "cropped", some(seen(cropped(0, 1 / 5, 0, 0)), 6)),
        ("constant action in 8, forces", "constant", some(acting(np.zeros_like))),
        ("black in 4, forces", "black", some(seen(np.zeros_like), 4)),
    ),
    "taxi": (
        ("red and blue swapped in 8", "channels", some(seen(lambda f: f[..., ::-1]))),
        ("mirrored in 6", "mirrored", some(seen(lambda f: f[:, :, ::-1]), 6)),
        ("all actions 1 row late, table", "lag", every(shifted(1))),
    ),
    "pusht": (
        ("degrees for radians in 4", "scale unreadable", some(scaled(57.3), 4)),
        ("a value 1000 times as large", "spike unreadable", some(scaled(1000, slice(7, 8)), 4)),
        ("scale of a hundredth in 4", "scale", some(scaled(0.01), 4)),
        ("action stops half-way in 6", "constant", some(acting(stopped), 6)),
        ("every 2nd frame repeated", "held", every(seen(lambda f: f[np.arange(len(f)) // 2 * 2]))),
    ),
    "tar": (
        ("no caption in 5", "no_text", captioned(lambda text: "", 5)),
        ("captions decoded wrongly", "damaged_text", captioned(misread)),
        ("captions with markup", "markup", captioned(lambda text: f"<p>{text}</p>")),
        ("placeholders for captions", "placeholder", captioned(lambda text: "nan", 3)),
        ("one caption for 12", "same_text", captioned(lambda text: "stock footage, 4k", 12)),
        ("captions of 900 words", "long_text unreadable", captioned(lambda text: " ".join([text] * 80), 3)),
        ("still films", "still", filmed(frozen)),
        ("films letterboxed", "letterbox", filmed(barred(0.12))),
    ),
    "parquet": (
        ("films without colour", "grey", filmed(uncoloured)),
        ("films of noise", "noise", filmed(noise)),
        ("films that are black at the end", "black", filmed(part(0.6, 1, np.zeros_like))),
        ("joined from two films", "cut", spliced),
        ("films encoded again", "near_copies copies", lambda films: [*films, *filmed(grain(3))(films[:4])]),
    ),
}
"""Faults of episodes or films by set: name, kinds of finding of which one names it, and what plants it."""
IN_FILES: dict[str, tuple[tuple[str, str, Callable[[Path], None]], ...]] = {
    "door": (
        ("actions that are not numbers", "unreadable", rows_of(lose_numbers)),
        ("times that run backwards", "timestamps", rows_of(reverse_times)),
        ("times with a gap", "timestamps", rows_of(lose_rows)),
        ("times of half of the rate", "rate", rows_of(slow_times)),
        ("twice the frame rate in info.json", "rate", info_of(lambda info: info.update(fps=20))),
        ("an episode index twice", "index unreadable", twice),
        ("a lost video", "unreadable", videos_of(Path.unlink)),
        ("a cut video", "unreadable", videos_of(cut_file)),
    ),
    "taxi": (
        ("5 files lost", "unreadable", videos_of(Path.unlink)),
        ("5 pointers of Git LFS", "unreadable", videos_of(lambda path: path.write_bytes(POINTER))),
        ("5 pages for videos", "unreadable", videos_of(lambda path: path.write_bytes(PAGE))),
        ("5 videos of half the size", "size", videos_of(again(1, 0.5))),
        ("5 videos of twice the rate", "rate unreadable", videos_of(again(2, 1))),
        ("lists of actions cut in 5", "unreadable constant", lines_of(cut_lists)),
        ("3 rows twice", "copies", lines_of(lambda rows: [*rows, *rows[:3]])),
    ),
}
"""The same of the files of a set."""
FAULTS = [Fault(of, *each) for of, faults in IN_EPISODES.items() for each in faults]
FAULTS += [Fault(of, *each, in_files=True) for of, faults in IN_FILES.items() for each in faults]


def planted(fault: Fault, folder: Path) -> list[examiner.Finding]:
    """Plant a fault, and return what is found."""
    given = clean(fault.of)
    argument = write(fault.of, given if fault.in_files else fault.plant(given), folder)
    if fault.in_files:
        fault.plant(folder)
    return found_in(argument)


def main() -> None:
    """Print a row for each fault and for each clean recording."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="faults whose name contains this")
    parser.add_argument("--clean", action="store_true", help="clean recordings alone")
    args = parser.parse_args()
    named = 0
    wanted = [fault for fault in FAULTS if args.only in fault.name and not args.clean]
    for fault in wanted:
        with tempfile.TemporaryDirectory() as folder:
            found = planted(fault, Path(folder, "set"))
        right = [each for each in found if each.kind in fault.kinds.split()]
        named += bool(right)
        told = (right or found)[0].as_text() if found else "nothing"
        print(f"| {fault.name} | {fault.of} | {'yes' if right else '**no**'} | {told[:140]} |", flush=True)
    if wanted:
        print(f"named: {named} of {len(wanted)}")
    if args.only:
        return
    alarms = 0
    for name in [*CLEAN, "tar", "parquet"]:
        with tempfile.TemporaryDirectory() as folder:
            argument = write(name, clean(name), Path(folder, "set"))
            made = time.process_time()
            faults = found_in(argument)
        alarms += len(faults)
        told = "; ".join(each.as_text()[:100] for each in faults) or "none"
        print(f"| {name} | {told} | {time.process_time() - made:.1f} s |", flush=True)
    print(f"alarms: {alarms} in {len(CLEAN) + 2} recordings")


if __name__ == "__main__":
    main()
