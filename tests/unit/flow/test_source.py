"""Training data from a log that grows: the order is that of the finished log."""

import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from clip_tables import MODEL
from flow_stages import flow_config
from PIL import Image

from worldmodel.config import DataConfig, SourceConfig, StageConfig, build
from worldmodel.config.flow import FlowConfig
from worldmodel.data.loader import BatchLoader, batches
from worldmodel.data.sources import open_source
from worldmodel.errors import ConfigError
from worldmodel.flow.log.status import StatusReader
from worldmodel.flow.work.run import run_flow
from worldmodel.media.encoding import encode_video

NUM_CLIPS = 27
HANGS_S = 300.0
"""Time after which a flow that takes seconds on an idle machine is taken to hang."""


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short videos, each of one colour, and a table of them."""
    folder = tmp_path_factory.mktemp("videos")
    rows = []
    for number in range(NUM_CLIPS):
        frames = np.full((17, 32, 32, 3), 9 * number, np.uint8)
        (folder / f"{number}.mp4").write_bytes(encode_video(frames, fps=8))
        rows.append(f'{{"address": "{number}.mp4", "text": "clip {number}", "keys": ["left"]}}\n')
    path = folder / "clips.jsonl"
    path.write_text("".join(rows))
    return path


def small_flow(folder: Path, table: Path, **settings: object) -> FlowConfig:
    return flow_config(folder, table, {"read": {}, "measure": {"settings": {"wait_s": 0.02}}}, **settings)


def loader(
    config: FlowConfig, first: int = 0, steps: int = 20, rank: int = 0, size: int = 1, **more: object
) -> BatchLoader:
    data = DataConfig({"web": SourceConfig("flow", config.place("log"))}, timeout_s=HANGS_S, **more)
    stage = StageConfig(steps=steps, batch_size=4, rounds=1, tasks={"rounds": 1.0})
    return batches(data, MODEL, stage, 5, first, rank, size)


def names(loader: BatchLoader) -> list[dict[int, str]]:
    """Sample index and text of every episode, by step."""
    with loader:
        return [
            {
                index: episode.actions[0].text or ""
                for batch in step
                for index, episode in zip(batch.indices, batch.episodes, strict=True)
            }
            for step in loader
        ]


def test_a_log_gives_every_clip_once_an_epoch_and_shuffles_within_segments(
    tmp_path: Path, table: Path
) -> None:
    config = small_flow(tmp_path, table)
    run_flow(config)
    seen = [text for step in names(loader(config, steps=54)) for _, text in sorted(step.items())]
    clips = [f"clip {number}" for number in range(NUM_CLIPS)]
    assert Counter(seen) == dict.fromkeys(clips, 8)
    assert sorted(seen[:8]) == clips[:8]  # the first segment
    assert seen[:8] != clips[:8]
    assert sorted(seen[8:16]) == sorted(clips[8:16])
    assert {*seen[32:40]} != {*clips[:8]}  # segments in another order later


def test_training_on_a_growing_log_sees_what_a_replay_sees(tmp_path: Path, table: Path) -> None:
    config = small_flow(tmp_path, table)
    thread = threading.Thread(target=run_flow, args=(config,))
    thread.start()
    log = Path(config.place("log"))
    while not list(log.glob("*/000000.json")):
        time.sleep(0.01)
    first = names(loader(config, steps=3))  # before the flow has ended
    resumed = [names(loader(config, 3, steps=20, rank=rank, size=2)) for rank in range(2)]
    thread.join()
    replay = names(loader(config, steps=20))
    assert first == replay[:3]
    assert [{**one, **two} for one, two in zip(*resumed, strict=True)] == replay[3:]
    with_workers = names(loader(config, steps=20, num_workers=2))
    assert with_workers == replay


def test_a_flow_that_stands_still_is_an_error_that_names_the_segment(tmp_path: Path, table: Path) -> None:
    config = small_flow(tmp_path, table, max_lead=1)  # nothing reads, so that it does not end by itself
    stop = threading.Event()

    def stop_soon() -> None:
        if list(Path(config.place("log")).glob("*/000001.json")):
            stop.set()

    run_flow(config, stop_soon, stop=stop)
    data = DataConfig({"web": SourceConfig("flow", config.place("log"))}, timeout_s=0.3)
    stage = StageConfig(steps=20, batch_size=4, rounds=1, tasks={"rounds": 1.0})
    with pytest.raises(ConfigError, match="Segment"), batches(data, MODEL, stage, 5) as stuck:
        list(stuck)


def test_segments_are_not_sealed_far_ahead_of_training(tmp_path: Path, table: Path) -> None:
    config = small_flow(tmp_path, table, max_lead=1)
    log = Path(config.place("log"))
    thread = threading.Thread(target=run_flow, args=(config,), daemon=True)
    thread.start()
    with closing(StatusReader(config, create=True)) as reader:
        while (state := reader.read()).packed < 16 or state.packed + state.stages[-1].waiting < NUM_CLIPS:
            time.sleep(0.05)
    time.sleep(0.5)  # all clips could be packed now
    assert len(list(log.glob("*/0*.json"))) == 2
    names(loader(config, steps=6))
    thread.join(HANGS_S)
    assert len(list(log.glob("*/0*.json"))) == 4


def test_what_is_no_log_is_an_error(tmp_path: Path) -> None:
    data = DataConfig({"web": SourceConfig("flow", str(tmp_path))})
    stage = StageConfig(steps=2, batch_size=4, rounds=1, tasks={"rounds": 1.0})
    with pytest.raises(ConfigError, match="not the log of a flow"):
        batches(data, MODEL, stage, 5)


def image_flow(folder: Path, texts: bool) -> FlowConfig:
    """A flow of six images, each of one grey value."""
    files = folder / "images"
    files.mkdir()
    for number in range(6):
        pixels = np.full((32, 32, 3), 40 * number, np.uint8)
        Image.fromarray(pixels).save(files / f"{number}.{'png' if number % 2 else 'webp'}", lossless=True)
        if texts:
            (files / f"{number}.txt").write_text(f"grey {40 * number}")
    values = {
        "folder": str(folder / "flow"), "executor": "threads", "segment_size": 4, "max_in_flight": 8,
        "sources": {"mine": {"kind": "folder", "path": str(files)}},
        "stages": {"fetch": {"settings": {"root": str(files)}}, "probe": {}},
    }  # fmt: skip
    return build(FlowConfig, values)


def test_images_of_a_flow_are_imagined_and_described(tmp_path: Path) -> None:
    config = image_flow(tmp_path, texts=True)
    run_flow(config)
    data = DataConfig({"web": SourceConfig("flow", config.place("log"))}, timeout_s=HANGS_S)
    source = open_source("web", data, MODEL)
    assert source.tasks == ("imagine", "describe")
    stage = StageConfig(steps=6, batch_size=4, rounds=1, tasks={"imagine": 0.5, "describe": 0.5})
    with batches(data, MODEL, stage, 5, 0, 0, 1) as found:
        episodes = [each for step in found for batch in step for each in batch.episodes]
    seen = set()
    for each in episodes:
        text = each.answer or each.actions[0].text
        frames = each.observations[-1]
        assert f"grey {frames.min()}" == f"grey {frames.max()}" == text
        seen.add(("describe" if each.answer else "imagine", text))
    assert len(episodes) == 24
    assert {task for task, _ in seen} == {"imagine", "describe"}
    assert {text for _, text in seen} == {f"grey {40 * n}" for n in range(6)}


def test_images_without_texts_are_refused(tmp_path: Path) -> None:
    config = image_flow(tmp_path, texts=False)
    run_flow(config)
    data = DataConfig({"web": SourceConfig("flow", config.place("log"))}, timeout_s=HANGS_S)
    with pytest.raises(ConfigError, match=r"data\.sources\.web"):
        open_source("web", data, MODEL)
