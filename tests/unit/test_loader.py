"""The loader: the same order for any number of workers, and errors instead of hangs."""

import dataclasses
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worldmodel.actions import Action
from worldmodel.config import ActionConfig, DataConfig, SourceConfig, StageConfig, WorldModelConfig
from worldmodel.data import loader
from worldmodel.data.loader import Batch, BatchLoader
from worldmodel.data.sources import Recipe
from worldmodel.episodes import Episode
from worldmodel.errors import ConfigError, InputError
from worldmodel.shapes.source import KEYS, ShapesSource

MODEL = WorldModelConfig(action=ActionConfig(keys=KEYS))
STAGE = StageConfig(steps=5, batch_size=4, rounds=1, tasks={"rounds": 0.5, "describe": 0.5})


def names(
    config: DataConfig, stage: StageConfig = STAGE, first: int = 0, rank: int = 0, size: int = 1
) -> list[list[str]]:
    """Names of a rank's episodes, step by step, in the order of their indices."""
    with loader.batches(config, MODEL, stage, 3, first, rank, size) as stream:
        return [
            [
                name
                for _, name in sorted(
                    (i, e.name) for b in step for i, e in zip(b.indices, b.episodes, strict=True)
                )
            ]
            for step in stream
        ]


SHAPES = {"shapes": SourceConfig("shapes")}


@pytest.fixture
def mixed(recorded: Path) -> DataConfig:
    """The procedural world, mixed with clips on disk."""
    columns = {"video": "path", "text": "text", "keys": "keys"}
    clips = SourceConfig(kind="clips", path=str(recorded / "clips.jsonl"), columns=columns, weight=2.0)
    return DataConfig({"world": SourceConfig("shapes"), "clips": clips}, window=4)


@dataclass(frozen=True)
class Numbered:
    """Episodes that are made at once, some of them bad; lengths differ."""

    size: int | None = 40
    bad: frozenset[int] = frozenset()
    tasks: tuple[str, ...] = ("rounds",)
    streams: int = 0

    def at(self, index: int) -> Recipe:
        return NumberedRecipe(index % (self.size or sys.maxsize) in self.bad)

    def cost(self, index: int, rounds: int) -> float:
        return 1 + index % 3

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class NumberedRecipe:
    bad: bool
    name: str = "numbered"
    texts: tuple[str, ...] = ()

    def episode(self, task: str, seed: int, index: int, rounds: int) -> Episode:
        if self.bad:
            raise InputError(f"number {index} is bad")
        clip = np.zeros((8, 8, 8, 3), np.uint8)
        rounds = 1 + index % 3
        return Episode(f"{index}", (clip[:1], *[clip] * rounds), (Action(),) * rounds)


def stream(source: Numbered, stage: StageConfig, max_bad_fraction: float = 1.0, **more: Any) -> BatchLoader:
    config = DataConfig({"numbers": SourceConfig("shapes")}, window=8, max_bad_fraction=max_bad_fraction)
    return BatchLoader({"numbers": source}, config, stage, 0, **more)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 13),
    st.integers(1, 6),
    st.integers(0, 6),
    st.integers(0, 4),
    st.sets(st.integers(0, 39), max_size=4),
)
def test_a_step_is_the_same_for_any_ranks_from_any_start(
    batch_size: int, dp_size: int, first: int, microbatch: int, bad: set[int]
) -> None:
    stage = StageConfig(
        steps=7, batch_size=batch_size, microbatch_size=microbatch, tasks={"rounds": 1}, self_rollout=(0, 1)
    )
    source = Numbered(bad=frozenset(bad))

    def episodes(first: int = 0, **more: int) -> dict[int, dict[int, str]]:
        found: dict[int, dict[int, str]] = {}
        for step, batches in enumerate(stream(source, stage, first_step=first, **more), first):
            for batch in batches:
                assert batch.step == step
                assert len(batch.episodes) == len(batch.indices) <= (microbatch or batch_size)
                assert len({len(episode.actions) for episode in batch.episodes}) == 1
            assert len({batch.self_rollout for batch in batches}) <= 1
            found[step] = {i: e.name for b in batches for i, e in zip(b.indices, b.episodes, strict=True)}
        return found

    whole = episodes()
    assert [sorted(step) for step in whole.values()] == [
        list(range(s * batch_size, (s + 1) * batch_size)) for s in range(7)
    ]
    assert not {int(name) % 40 for step in whole.values() for name in step.values()} & bad
    assert episodes(first) == {step: found for step, found in whole.items() if step >= first}
    parts = [episodes(dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]
    for step, found in whole.items():
        assert sum(len(part[step]) for part in parts) == batch_size
        assert {i: name for part in parts for i, name in part[step].items()} == found


@pytest.mark.parametrize("num_workers", [1, 3])
def test_workers_change_nothing(mixed: DataConfig, num_workers: int) -> None:
    threads, torch_threads = threading.active_count(), torch.get_num_threads()
    alone = names(mixed)
    assert [len(step) for step in alone] == [4] * 5
    assert {name.split("/")[0].split(" ")[0] for step in alone for name in step} == {"train", "clips.jsonl"}
    together = dataclasses.replace(mixed, num_workers=num_workers)
    assert names(together) == alone
    assert names(together, first=3) == alone[3:]
    halves = [names(together, rank=rank, size=2) for rank in range(2)]
    assert [one + two for one, two in zip(*halves, strict=True)] == alone
    assert torch.get_num_threads() == torch_threads
    deadline = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= threads


def test_episodes_from_workers_are_the_episodes(mixed: DataConfig) -> None:
    def pixels(config: DataConfig) -> list[Batch]:
        with loader.batches(config, MODEL, STAGE, 3) as made:
            return [batch for step in made for batch in step]

    for one, two in zip(pixels(mixed), pixels(dataclasses.replace(mixed, num_workers=1)), strict=True):
        assert dataclasses.replace(one, episodes=[]) == dataclasses.replace(two, episodes=[])
        for ours, theirs in zip(one.episodes, two.episodes, strict=True):
            assert (ours.actions, ours.answer) == (theirs.actions, theirs.answer)
            assert all(map(np.array_equal, ours.observations, theirs.observations))


def test_the_state_resumes_a_loader(mixed: DataConfig) -> None:
    whole = names(mixed)
    with loader.batches(mixed, MODEL, STAGE, 3) as made:
        next(made)
        next(made)
        state = made.state()
    assert state == {"first_step": 2, "bad": {}, "bookmarks": {}}
    assert names(mixed, first=state["first_step"]) == whole[2:]
    assert names(mixed, first=5) == []


def test_more_ranks_than_samples() -> None:
    stage = dataclasses.replace(STAGE, batch_size=1, tasks={"rounds": 1.0})
    parts = [list(stream(Numbered(), stage, dp_rank=rank, dp_size=3)) for rank in range(3)]
    assert [sum(len(part[step]) for part in parts) for step in range(5)] == [1] * 5


# Lost workers and sources


def broken_clips(recorded: Path, folder: Path, number: int) -> DataConfig:
    """The recorded clips, copied ten times; `number` of the copies are cut off."""
    rows = ["path,text"]
    for copy in range(10):
        for clip in sorted(recorded.glob("*.mp4")):
            name = f"{copy}-{clip.name}"
            shutil.copy(clip, folder / name)
            rows.append(f"{name},the {clip.stem}")
    for name in sorted(folder.glob("*.mp4"))[7 : 7 + number]:
        name.write_bytes(name.read_bytes()[:-900])
    (folder / "clips.csv").write_text("\n".join(rows) + "\n")
    columns = {"video": "path", "text": "text"}
    return DataConfig(
        {"mine": SourceConfig(kind="clips", path=str(folder / "clips.csv"), columns=columns)}, window=16
    )


EPOCH = StageConfig(steps=6, batch_size=10, rounds=1, tasks={"rounds": 1.0})


def test_a_bad_clip_is_named_and_replaced(
    recorded: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = broken_clips(recorded, tmp_path, 2)
    with caplog.at_level(logging.WARNING), loader.batches(config, MODEL, EPOCH, 3) as made:
        seen = [e.name for step in made for batch in step for e in batch.episodes]
        assert made.bad == {"mine": 2}
    bad = [path.name for path in sorted(tmp_path.glob("*.mp4"))[7:9]]
    skipped = [message for message in caplog.messages if "cut off" in message]
    assert len(skipped) == 1 and any(name in skipped[0] for name in bad)  # one cause, one line
    assert not any(name in episode for episode in seen for name in bad)
    assert len(seen) == 60
    # The replacement does not depend on the rank that reads the clip.
    with_workers = dataclasses.replace(config, num_workers=2)
    assert [name for step in names(with_workers, EPOCH) for name in step] == seen
    # Nor does where the run goes on, on other processes and workers.
    parts = [names(with_workers if rank else config, EPOCH, 2, rank, size=3) for rank in range(3)]
    assert [name for step in zip(*parts, strict=True) for part in step for name in part] == seen[20:]


def test_too_many_bad_clips_end_the_run(recorded: Path, tmp_path: Path) -> None:
    config = broken_clips(recorded, tmp_path, 3)
    with pytest.raises(ConfigError, match=r"3 of \d+ .*data.sources.mine.*max_bad_fraction"):
        names(config, EPOCH)
    assert len(names(dataclasses.replace(config, max_bad_fraction=0.1), EPOCH)) == 6
    with pytest.raises(ConfigError, match="2 of 12 "):
        names(dataclasses.replace(config, max_bad_fraction=0.0, num_workers=1), EPOCH)


def test_a_text_that_is_too_long_is_a_bad_clip(recorded: Path, tmp_path: Path) -> None:
    """It ended the run, whatever share of the clips may be bad."""
    config = broken_clips(recorded, tmp_path, 0)
    table = tmp_path / "clips.csv"
    header, first, *rest = table.read_text().splitlines()
    table.write_text("\n".join([header, first + " very" * 20_000, *rest]) + "\n")
    with loader.batches(config, MODEL, EPOCH, 3) as made:
        seen = [e.name for step in made for batch in step for e in batch.episodes]
        assert made.bad == {"mine": 1} and len(seen) == 60
    (cause,) = made.causes
    assert "words" in cause


def test_a_source_of_bad_clips_only_ends_the_run() -> None:
    made = stream(Numbered(bad=frozenset(range(40))), dataclasses.replace(STAGE, tasks={"rounds": 1.0}))
    with pytest.raises(ConfigError, match=r"20 .*data.sources.numbers.*is bad"):
        list(made)
    assert list(made) == []


@settings(max_examples=25, deadline=None)
@given(
    st.sets(st.integers(0, 39), max_size=6),
    st.floats(0, 0.3),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_bad_clips_are_counted_over_all_ranks_and_starts(
    bad: set[int], max_bad_fraction: float, starts: list[int]
) -> None:
    stage = StageConfig(steps=12, batch_size=5, tasks={"rounds": 1})
    source = Numbered(bad=frozenset(bad))

    def go_on(state: dict[str, Any], steps: int, dp_size: int) -> tuple[dict[str, Any], str]:
        """Continue from a state for some steps on some ranks; returns their common state, and the error."""
        board: list[list[int]] = [[]] * dp_size
        barrier = threading.Barrier(dp_size)

        def load(rank: int) -> tuple[dict[str, Any], str]:
            def sum_counts(counts: Sequence[int]) -> list[int]:
                board[rank] = list(counts)
                barrier.wait(30)
                total = [sum(column) for column in zip(*board, strict=True)]
                barrier.wait(30)
                return total

            made = stream(
                source,
                stage,
                max_bad_fraction,
                dp_rank=rank,
                dp_size=dp_size,
                sum_counts=sum_counts,
                **state,
            )
            try:
                for _ in range(min(steps, stage.steps - made.step)):
                    next(made)
            except ConfigError as error:
                return state, str(error)
            return made.state(), ""

        with ThreadPoolExecutor(dp_size) as threads:
            found = list(threads.map(load, range(dp_size)))
        assert all(each == found[0] for each in found)
        return found[0]

    with mock.patch.object(loader, "MIN_CLIPS", 10):
        straight, state, message = go_on({}, 12, 1), {}, ""
        for dp_size in starts:
            state, message = go_on(state, 4, dp_size) if not message else (state, message)
        if not message:
            state, message = go_on(state, 12, 1)
    assert bool(message) == bool(straight[1])
    if not message:
        assert state == straight[0]
        assert state["bad"].keys() <= {"numbers"}
    if set(starts) == {1}:
        assert message == straight[1]


def endless(num_workers: int = 2, timeout_s: float = 60.0) -> BatchLoader:
    stage = dataclasses.replace(STAGE, steps=10**6)
    return loader.batches(DataConfig(SHAPES, num_workers=num_workers, timeout_s=timeout_s), MODEL, stage, 0)


def until_error(made: BatchLoader) -> str:
    with pytest.raises(ConfigError) as caught:
        for _ in made:
            pass
    assert list(made) == []
    assert all(not worker.child.alive for worker in made.workers)
    return str(caught.value)


def test_a_killed_worker_is_an_error() -> None:
    with endless() as made:
        next(made)
        os.kill(made.workers[0].child.pid, signal.SIGKILL)
        began = time.monotonic()
        message = until_error(made)
        assert time.monotonic() - began < 30
    assert all(word in message for word in (str(made.workers[0].child.pid), "SIGKILL", "data.num_workers"))


def test_a_hanging_worker_is_an_error() -> None:
    with endless(num_workers=1) as made:
        next(made)
        made.workers[0].timeout_s = 3.0  # enough for one that has started
        for _ in range(6):  # results that were awaited with the old timeout
            next(made)
        os.kill(made.workers[0].child.pid, signal.SIGSTOP)
        message = until_error(made)
    assert "data.timeout_s" in message
    assert "train" in message


def test_a_bug_in_a_source_ends_the_run_with_its_traceback() -> None:
    source = ShapesSource()
    source.split = "nowhere"
    config = DataConfig({"shapes": SourceConfig("shapes")}, num_workers=1)
    with (
        BatchLoader({"shapes": source}, config, STAGE, 0) as made,
        pytest.raises(RuntimeError, match="nowhere"),
    ):
        next(made)
    for num_workers in (0, 1):
        lost = LostSource()
        config = DataConfig({"lost": SourceConfig("shapes")}, num_workers=num_workers)
        with BatchLoader({"lost": lost}, config, STAGE, 0) as made, pytest.raises(OSError, match="unplugged"):
            list(made)
        assert lost.closed


class LostSource:
    """A source whose disk is gone."""

    size, streams, tasks = 10, 0, ("rounds", "describe")
    closed = False

    def at(self, index: int) -> Recipe:
        raise OSError("the disk was unplugged")

    def cost(self, index: int, rounds: int) -> float:
        return 1

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_source_that_hangs_is_an_error(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "SOURCE_GRACE_S", 0.0)
    config = DataConfig({"stuck": SourceConfig("shapes")}, num_workers=num_workers, timeout_s=1.0)
    source = StuckSource()
    with BatchLoader({"stuck": source}, config, STAGE, 0) as made:
        with pytest.raises(ConfigError, match=r"data.sources.stuck.* 1 s.*data.timeout_s"):
            list(made)
        assert list(made) == []
    source.plugged.set()


class StuckSource(LostSource):
    """A source whose disk does not answer."""

    def __init__(self) -> None:
        self.plugged = threading.Event()

    def at(self, index: int) -> Recipe:
        self.plugged.wait()
        raise OSError("too late")


class CountingSource(ShapesSource):
    """Counts how often it was asked."""

    asked = 0

    def at(self, index: int) -> ShapesSource:
        self.asked += 1
        return ShapesSource()


def test_prefetching_is_bounded() -> None:
    """However slow the training: memory is bounded by data.prefetch, not by what the source could give."""
    source, stage = CountingSource(), dataclasses.replace(STAGE, steps=10**6)
    config = DataConfig({"shapes": SourceConfig("shapes")}, num_workers=2, prefetch=3)
    with BatchLoader({"shapes": source}, config, stage, 0) as made:
        next(made)
        asked = -1
        while asked != source.asked:
            asked = source.asked
            time.sleep(1.5)
    # Taken, prefetched and incomplete steps, and the samples that torchdata keeps for workers.
    assert asked <= stage.batch_size * (1 + 3 + 1) + 2 * (2 * 2) + 2


def train_on(pids: Connection) -> None:
    """Take a step, name the workers, and wait to be killed."""
    stage = StageConfig(steps=10**6, batch_size=2, tasks={"rounds": 1.0})
    data = DataConfig({"shapes": SourceConfig("shapes")}, num_workers=2)
    stream = loader.batches(data, WorldModelConfig(), stage, 0)
    next(stream)
    pids.send([worker.child.pid for worker in stream.workers])
    time.sleep(600)


def test_workers_end_with_a_training_that_was_killed() -> None:
    forked = multiprocessing.get_context("fork")  # a new process would first import torch
    ours, theirs = forked.Pipe()
    training = forked.Process(target=train_on, args=(theirs,))
    training.start()
    assert ours.poll(120)
    pids = ours.recv()
    assert len(pids) == 2 and all(map(alive, pids))
    training.kill()
    training.join()
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """No test may leave a process behind."""
    yield
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    assert [
        pid for pid in children if b"worldmodel.data.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ] == []
