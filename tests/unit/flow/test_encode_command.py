"""`worldmodel encode`: latents of a plain table, which training reads."""

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import bucketed
import numpy as np
import pytest
from clip_tables import write_table
from PIL import Image

from worldmodel.cli import main
from worldmodel.config import DataConfig, SourceConfig, StageConfig, TrainConfig
from worldmodel.data import loader
from worldmodel.media.tensors import to_tensor
from worldmodel.models.rounds import RoundEncoder
from worldmodel.models.world_model import WorldModel
from worldmodel.train import finetune

THREADS = ["executor=threads", "segment_size=2"]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Six clips, and a file that is not a video."""
    table = bucketed.write_clips(tmp_path / "clips")
    (table.parent / "broken.mp4").write_bytes(b"no video")
    rows = [{"path": f"{number}.mp4", "caption": f"clip {number}"} for number in range(6)]
    return write_table(table.parent, [*rows, {"path": "broken.mp4", "caption": "nothing"}])


def encode(table: Path, model_folder: Path, out: Path, *more: str) -> int:
    columns = ["--column", "video=path", "--column", "text=caption"]
    return main(
        ["encode", str(table), "--model", str(model_folder), "--out", str(out), *columns, *more, *THREADS]
    )


def test_training_reads_the_latents_of_a_table(
    table: Path, model_folder: Path, tmp_path: Path, model: WorldModel, run_config: TrainConfig,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "latents"
    assert encode(table, model_folder, out, "--dtype", "float32") == 0
    printed = capsys.readouterr().out
    assert f"6 clips; train on data.sources.NAME: {{kind: flow, path: {out / 'log'}}}" in printed
    assert "1 clips were left out" in printed
    assert not list((out / "buffer").rglob("*.mp4")) and not list((out / "buffer").rglob("*.tar"))

    def batches(source: SourceConfig) -> dict[str, tuple[np.ndarray, ...]]:
        stage = StageConfig(steps=6, batch_size=2, rounds=3, tasks={"rounds": 1.0})
        found = {}
        with loader.batches(DataConfig({"mine": source}), model.config, stage, 5) as stream:
            for episode in (each for step in stream for batch in step for each in batch.episodes):
                assert episode.actions[0].text is not None
                if episode.encoded is None:
                    first, *clips = (to_tensor([clip]) for clip in episode.observations)
                    context, target = RoundEncoder.of(model).rounds(first, clips)
                    found[episode.actions[0].text] = context[0].numpy(), target[0].numpy()
                else:
                    assert not episode.observations
                    found[episode.actions[0].text] = episode.encoded.context, episode.encoded.target
        return found

    stored = batches(SourceConfig("flow", str(out / "log")))
    columns = {"video": "path", "text": "caption"}
    videos = SourceConfig("clips", str(table), columns=columns)
    assert set(stored) == {f"clip {number}" for number in range(6)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "MIN_CLIPS", 10_000)  # the broken one is drawn, too
        expected = batches(videos)
    for name, arrays in expected.items():
        for one, two in zip(arrays, stored[name], strict=True):
            np.testing.assert_allclose(one, two, atol=1e-5)
    config = replace(
        run_config, model=model.config, data=DataConfig({"mine": SourceConfig("flow", str(out / "log"))})
    )
    stage = replace(config.stages["state"], tasks={"rounds": 1.0}, steps=2)
    assert (finetune.train(replace(config, stages={"state": stage})) / "config.json").is_file()


def test_a_folder_of_videos_needs_no_table(
    table: Path, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table.unlink()
    for number in range(6):
        (table.parent / f"{number}.txt").write_text(f"clip {number}")
    (table.parent / "run").mkdir()
    for number in range(9):
        Image.new("RGB", (64, 64)).save(table.parent / "run" / f"{number}.png")
    out = tmp_path / "latents"
    argv = ["encode", str(table.parent), "--model", str(model_folder), "--out", str(out), *THREADS]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert "6 clips; train" in printed
    assert "2 clips were left out" in printed, "what is no video, and the images"
    assert main(argv) == 0
    assert "6 clips; train" in capsys.readouterr().out
    config = WorldModel.from_pretrained(model_folder).config
    stage = StageConfig(steps=4, batch_size=3, rounds=2, tasks={"rounds": 1.0})
    data = DataConfig({"mine": SourceConfig("flow", str(out / "log"))})
    with loader.batches(data, config, stage, 5) as stream:
        texts = {each.actions[0].text for step in stream for batch in step for each in batch.episodes}
    assert texts == {f"clip {number}" for number in range(6)}


def test_clips_of_several_sizes_are_encoded_in_their_buckets(
    table: Path, model_folder: Path, tmp_path: Path, make_model: Callable[..., WorldModel],
    run_config: TrainConfig, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Steps on the latents of two buckets are those that encode the clips themselves."""
    out, names = tmp_path / "latents", [f"{height}x{width}" for height, width in bucketed.BUCKETS]
    options = [word for name in names for word in ("--bucket", name)]
    assert encode(table, model_folder, out, "--dtype", "float32", *options) == 0
    printed = capsys.readouterr().out
    sources = {}
    for name, size in zip(names, bucketed.BUCKETS, strict=True):
        log = str(out / name / "log")
        assert f"{{kind: flow, path: {log}, size: {list(size)}, weight: 3}}" in printed
        sources[name] = SourceConfig("flow", log, size=size, weight=3)
    config = WorldModel.from_pretrained(model_folder).config
    stage = StageConfig(steps=8, batch_size=3, rounds=3, tasks={"rounds": 1.0})

    def latents(data: DataConfig) -> dict[str, np.ndarray]:
        found = {}
        with loader.batches(data, config, stage, 5) as stream:
            for batch in (batch for step in stream for batch in step):
                for episode in batch.episodes:
                    text, encoded = episode.actions[0].text, episode.encoded
                    assert text is not None
                    if encoded is not None:
                        found[text] = encoded.target
                        assert batch.image_size is not None
                        assert found[text].shape[-2:] == tuple(side // 8 for side in batch.image_size)
                        continue
                    first, *clips = (to_tensor([clip]) for clip in episode.observations)
                    model = make_model(image_size=batch.image_size)
                    model.codec.load_state_dict(codec.state_dict())
                    found[text] = RoundEncoder.of(model).rounds(first, clips)[1][0].numpy()
        return found

    codec = WorldModel.from_pretrained(model_folder).codec
    stored = latents(DataConfig(sources, buckets=list(bucketed.BUCKETS)))
    columns = {"video": "path", "text": "caption"}
    videos = {"mine": SourceConfig("clips", str(table), columns=columns)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "MIN_CLIPS", 10_000)
        expected = latents(DataConfig(videos, buckets=list(bucketed.BUCKETS)))
    assert {*stored} == {f"clip {number}" for number in range(6)}
    for text in {*stored} & {*expected}:
        np.testing.assert_allclose(stored[text], expected[text], atol=1e-5)
    data = DataConfig(sources, buckets=list(bucketed.BUCKETS))
    run = replace(run_config, model=make_model(image_size=64).config, data=data)
    state = replace(run.stages["state"], tasks={"rounds": 1.0}, steps=3)
    assert (finetune.train(replace(run, stages={"state": state})) / "config.json").is_file()


def test_an_interrupted_command_goes_on(
    table: Path, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert encode(table, model_folder, whole) == 0

    def interrupt() -> None:
        while not list(halves.glob("log/*/*.tar")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert encode(table, model_folder, halves) == 0
    capsys.readouterr()
    assert encode(table, model_folder, halves) == 0
    segments = {file.name: file.read_bytes() for file in whole.glob("log/*/*.tar")}
    assert len(segments) == 3
    assert {file.name: file.read_bytes() for file in halves.glob("log/*/*.tar")} == segments
    with table.open("a") as file:
        file.write('{"path": "0.mp4", "caption": "again", "start": 1.0}\n')
    capsys.readouterr()
    assert encode(table, model_folder, halves) == 0
    assert "7 clips; train" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"--model": "no-such-model"}, "no-such-model"),
        ({"--column": "caption"}, "FIELD=COLUMN"),
        ({"--dtype": "int8"}, "int8"),
        ({"--bucket": "64"}, "HEIGHTxWIDTH"),
        ({"--bucket": "60x64"}, "60"),
    ],
)
def test_wrong_arguments_are_a_sentence(
    table: Path, model_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    change: dict[str, str], named: str,
) -> None:  # fmt: skip
    arguments = {
        "--model": str(model_folder),
        "--out": str(tmp_path / "out"),
        "--column": "video=path",
    } | change
    assert main(["encode", str(table), *(part for pair in arguments.items() for part in pair), *THREADS]) == 2
    error = capfd.readouterr().err
    assert named in error
    assert "Traceback" not in error
