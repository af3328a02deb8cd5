"""Buckets: clips of several sizes in one run, each in the size nearest to its aspect ratio."""

import json
import tarfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import bucketed
import numpy as np
import pytest
import torch
from bucketed import BUCKETS, NEAREST
from PIL import Image
from runs import WHOLE
from transformers import PreTrainedTokenizerBase

from worldmodel import media
from worldmodel.config import DataConfig, SourceConfig, StageConfig, TrainConfig, ValidationConfig
from worldmodel.data import loader
from worldmodel.data.buckets import BucketedSource, nearest, open_in_buckets
from worldmodel.data.loader import Batch
from worldmodel.errors import ConfigError
from worldmodel.models.layers.spatial import resample, resample_rows
from worldmodel.models.world_model import WorldModel
from worldmodel.train import finetune
from worldmodel.train.run import settings

STAGE = StageConfig(steps=12, batch_size=3, microbatch_size=2, rounds=2, tasks={"rounds": 1.0})


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bucketed.write_clips(tmp_path_factory.mktemp("shapes"))


@pytest.mark.parametrize(
    ("size", "buckets", "expected"),
    [
        ((720, 1280), [(64, 64), (48, 80)], 1),
        ((480, 480), [(64, 64), (48, 80)], 0),
        ((720, 1280), [(90, 160), (180, 320), (64, 64)], 1),  # the largest that it fills
        ((100, 178), [(90, 160), (180, 320), (64, 64)], 0),
        ((30, 54), [(180, 320), (90, 160)], 1),  # it fills none
        ((80, 48), [(48, 80), (64, 64)], 1),
    ],
)
def test_a_clip_is_in_the_bucket_of_its_aspect_ratio(
    size: tuple[int, int], buckets: list[tuple[int, int]], expected: int
) -> None:
    assert nearest(size, buckets) == expected


def test_a_source_has_its_clips_bucket_after_bucket(table: Path, model: WorldModel) -> None:
    source = open_in_buckets(bucketed.data(table), model.config)["mine"]
    assert isinstance(source, BucketedSource)
    assert source.bucket.tolist() == list(NEAREST)
    assert source.counts == [3, 3]
    names = []
    for index in range(source.size):
        episode = source.at(index).episode("rounds", 0, index, 1)
        assert {clip.shape[1:3] for clip in episode.observations} == {BUCKETS[index // 3]}
        names.append(episode.name)
    assert sorted(names) == [f"clips.jsonl row {number + 1} ({number}.mp4)" for number in range(6)]
    source.close()


def steps_of(data: DataConfig, model: WorldModel, **more: Any) -> list[list[Batch]]:
    with loader.batches(data, model.config, STAGE, 5, **more) as stream:
        return list(stream)


def sizes_and_names(steps: list[list[Batch]]) -> list[dict[int, tuple[Any, str]]]:
    found = []
    for step in steps:
        rows = {}
        for batch in step:
            for index, episode in zip(batch.indices, batch.episodes, strict=True):
                assert {clip.shape[1:3] for clip in episode.observations} == {batch.image_size}
                rows[index] = batch.image_size, episode.name
        assert len({size for size, _ in rows.values()}) == 1  # a step is of one bucket
        found.append(rows)
    return found


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_step_is_the_same_for_any_ranks_from_any_start(
    table: Path, model: WorldModel, num_workers: int
) -> None:
    data = bucketed.data(table, num_workers=num_workers)
    alone = sizes_and_names(steps_of(data, model))
    assert {size for step in alone for size, _ in step.values()} == set(BUCKETS)
    later = sizes_and_names(steps_of(data, model, first_step=7))
    assert later == alone[7:]
    shares = [sizes_and_names(steps_of(data, model, dp_rank=rank, dp_size=3)) for rank in range(3)]
    assert [{**one, **two, **three} for one, two, three in zip(*shares, strict=True)] == alone


def test_clips_of_all_buckets_come_equally_often(tmp_path: Path, model: WorldModel) -> None:
    table = bucketed.write_clips(tmp_path, ((64, 64),) * 4 + ((48, 80),))
    seen: Counter[str] = Counter()
    data = bucketed.data(table)
    sampler = loader.batches(data, model.config, replace(STAGE, steps=600), 5).sampler
    for step in range(600):
        for sample in sampler.samples(step):
            seen[str(sample.episode % 5)] += 1
    assert sum(seen.values()) == 1800
    assert all(270 <= count <= 450 for count in seen.values()), seen  # 360, and 3 sigma of the bucket's draw


def test_a_bucket_without_clips_is_refused_before_weights_are_read(
    table: Path, run_config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unexpected(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("worldmodel.train.trainer.build_root", unexpected)
    config = bucketed.run_of(run_config, table)
    config = replace(config, data=replace(config.data, buckets=[*BUCKETS, (96, 48)]))
    with pytest.raises(ConfigError, match=r"data\.buckets has \[96, 48\].*no clip"):
        finetune.train(config)


def test_sources_that_do_not_know_their_sizes_are_refused(make_model: Callable[..., WorldModel]) -> None:
    model = make_model(image_size=64)
    data = DataConfig({"world": SourceConfig("shapes")}, buckets=list(BUCKETS))
    with pytest.raises(ConfigError, match=r"data\.sources\.world .*set its size"):
        open_in_buckets(data, model.config)
    for size, buckets in (((32, 32), list(BUCKETS)), ((64, 64), [])):
        data = DataConfig({"world": SourceConfig("shapes", size=size)}, buckets=buckets)
        with pytest.raises(ConfigError, match=rf"world\.size is \[{size[0]}, {size[1]}\]"):
            open_in_buckets(data, model.config)


def write_shard(folder: Path) -> Path:
    """The clips of `bucketed.write_clips` in a tar file, and a clip of numbered images."""
    bucketed.write_clips(folder)
    with tarfile.open(folder / "clips.tar", "w") as tar:
        for number in range(len(NEAREST)):
            tar.add(folder / f"{number}.mp4", f"{number}.mp4")
        for number, frame in enumerate(np.zeros((18, 54, 96, 3), np.uint8)):
            Image.fromarray(frame).save(folder / "a.png")
            tar.add(folder / "a.png", f"run.{number:03}.png")
    return folder / "clips.tar"


def test_sizes_of_clips_in_tar_files_and_of_frame_folders_are_found(
    tmp_path: Path, model: WorldModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = write_shard(tmp_path)
    data = DataConfig({"mine": SourceConfig("webdataset", str(shard))}, buckets=list(BUCKETS))
    source = open_in_buckets(data, model.config)["mine"]
    assert isinstance(source, BucketedSource)
    assert source.bucket.tolist() == [*NEAREST, 1]
    episode = source.at(6).episode("rounds", 0, 0, 1)
    assert {clip.shape[1:3] for clip in episode.observations} == {BUCKETS[1]}
    monkeypatch.setattr(source.source, "shards", ["https://host/clips.tar"])
    with pytest.raises(ConfigError, match="not on this machine"):
        source.source.frame_sizes()

    for name, size in (("square", (64, 64)), ("wide", (54, 96))):
        (tmp_path / "runs" / name).mkdir(parents=True)
        for number in range(18):
            Image.new("RGB", size[::-1]).save(tmp_path / "runs" / name / f"{number}.jpg")
    data = DataConfig({"mine": SourceConfig("clips", str(tmp_path / "runs"))}, buckets=list(BUCKETS))
    data.sources["mine"].columns["video"] = "video"
    found = open_in_buckets(data, model.config)["mine"]
    assert isinstance(found, BucketedSource)
    assert found.bucket.tolist() == [0, 1]


def test_pixels_that_are_not_square_count_as_they_are_shown(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "a.mp4"), "w") as file:
        stream = file.add_stream("libx264", 8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"  # type: ignore[attr-defined]
        stream.codec_context.sample_aspect_ratio = Fraction(3, 2)
        for _ in range(4):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8))))  # type: ignore[attr-defined]
        file.mux(stream.encode())  # type: ignore[attr-defined]
    assert media.frame_size(str(tmp_path / "a.mp4")) == (48, 96)


@pytest.mark.parametrize("kind", ["shapes", "huggingface"])
def test_a_stream_is_in_the_bucket_of_its_size(
    table: Path, make_model: Callable[..., WorldModel], tmp_path: Path, kind: str
) -> None:
    model, size = make_model(image_size=64), BUCKETS[kind == "huggingface"]
    path = "" if kind == "shapes" else bucketed.write_parquet(table.parent, tmp_path / "rows.parquet")
    data = bucketed.data(table)
    stream = SourceConfig(kind, path, size=size, streams=2, weight=0.5)
    data = replace(data, sources={**data.sources, "stream": stream})
    alone = sizes_and_names(steps_of(data, model))
    named = [(shape, name) for step in alone for shape, name in step.values()]
    streamed = [shape for shape, name in named if "clips.jsonl" not in name]
    assert {*streamed} == {size}
    assert 6 <= len(streamed) <= 18, "a third of 36"
    assert {shape for shape, _ in named} == set(BUCKETS)
    shares = [sizes_and_names(steps_of(data, model, dp_rank=rank, dp_size=2)) for rank in range(2)]
    assert [{**one, **two} for one, two in zip(*shares, strict=True)] == alone
    with loader.batches(data, model.config, STAGE, 5) as begun:
        for _ in range(7):
            next(begun)
        state = begun.state()
    assert sizes_and_names(steps_of(data, model, **state)) == alone[7:]


@pytest.mark.parametrize("buckets", [[64], [[64, 64, 3]], [["a", 64]], [[64, 64], [64, 64]], [[0, 64]]])
def test_buckets_are_pairs_of_sides(buckets: list[Any]) -> None:
    with pytest.raises(ConfigError, match=r"data\.buckets has"):
        DataConfig(buckets=buckets)


def test_sizes_that_the_model_cannot_have_are_refused(run_config: TrainConfig) -> None:
    for size, named in (((64, 60), "multiple"), ((64, 72), "divisor")):
        model = replace(run_config.model, query_merge=2)
        config = replace(run_config, model=model, data=replace(run_config.data, buckets=[size]))
        with pytest.raises(ConfigError, match=rf"data\.buckets has \[{size[0]}, {size[1]}\].*{named}"):
            settings.check_stages(config)


def test_positions_are_interpolated_between_their_cells() -> None:
    positions = torch.arange(4.0)[None, :, None] + 10 * torch.arange(2.0)[None, None]
    assert resample(positions, (4, 2)) is positions
    assert resample(positions, (2, 2))[0].tolist() == [[0.5, 10.5], [2.5, 12.5]]
    rows = torch.randn(6 * 4, 5)
    expected = torch.nn.functional.interpolate(
        rows.T.unflatten(1, (6, 4))[None], size=(3, 10), mode="bilinear"
    )[0]
    torch.testing.assert_close(resample_rows(rows, (6, 4), (3, 10)), expected.flatten(1).T)


def test_a_model_plays_frames_of_another_size_and_is_stored_with_its_own(
    make_model: Callable[..., WorldModel], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model = make_model(image_size=64)
    own = bucketed.played(model, (64, 64))
    expected = bucketed.played(bucketed.built_for(model, (48, 80), tokenizer), (48, 80))
    model.resize((48, 80))
    found = bucketed.played(model, (48, 80))
    assert found.shape == (2 * model.config.chunk_frames, 48, 80, 3)
    assert np.abs(found.astype(int) - expected).max() <= 1  # rounding of the interpolation
    assert found.std() > 1
    again = WorldModel.from_pretrained(model.save_pretrained(tmp_path / "model", dtype=torch.float32))
    assert again.config.codec.image_size == 64
    model.resize(64)
    for each in (model, again.eval()):
        assert np.array_equal(bucketed.played(each, (64, 64)), own)


@pytest.mark.slow
def test_a_run_on_two_buckets_resumes_bit_for_bit(
    table: Path, run_config: TrainConfig, tmp_path: Path
) -> None:
    stage = replace(run_config.stages["state"], objective="joint", train=WHOLE)
    config = bucketed.run_of(replace(run_config, stages={"state": stage}), table)
    held = replace(config.data.sources["mine"], weight=0.0)
    config = replace(
        config,
        data=replace(config.data, sources={**config.data.sources, "held": held}),
        validation=ValidationConfig("held", every=2, batches=2, codec_frames=18),
    )
    model = bucketed.train_twice(config, tmp_path / "halves")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("validation/loss" in line for line in lines)
    loaded = WorldModel.from_pretrained(model)
    loaded.resize((48, 80))
    assert bucketed.played(loaded, (48, 80)).shape == (16, 48, 80, 3)
