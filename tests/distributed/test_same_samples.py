"""Processes that share sequences read the same samples, or the run ends with an error."""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.run import main as torchrun

from worldmodel import config as configs
from worldmodel.cli import main
from worldmodel.config import (
    ActionConfig,
    DataConfig,
    MeshConfig,
    SourceConfig,
    StageConfig,
    TrainConfig,
    TrainedConfig,
    WorldModelConfig,
)
from worldmodel.data import loader
from worldmodel.data.loader import Batch
from worldmodel.errors import ConfigError
from worldmodel.models.world_model import WorldModel
from worldmodel.parallel.mesh import Mesh
from worldmodel.train import tokenizer
from worldmodel.train.watchdog import check_same_samples
from worldmodel.types import Episode
from worldmodel.worlds import recorder
from worldmodel.worlds.shapes.source import KEYS

pytestmark = pytest.mark.slow
SELF = Path(__file__)
MODEL = WorldModelConfig(action=ActionConfig(keys=KEYS))
LOST = 2
"""The row of the clip that one process cannot read."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six clips with a table, in a tar file and as a dataset of Hugging Face."""
    folder = tmp_path_factory.mktemp("samples")
    table = recorder.record(folder / "clips", 6, rounds=2)
    (folder / "hub").mkdir()
    rows = []
    with tarfile.open(folder / "shard.tar", "w") as tar:
        for clip in sorted(table.parent.glob("*.mp4")):
            tar.add(clip, clip.name)
            shutil.copy(clip, folder / "hub" / clip.name)
            rows.append(json.dumps({"file_name": clip.name, "text": f"what {clip.stem} shows"}))
    (folder / "hub" / "metadata.jsonl").write_text("\n".join(rows))
    return folder


def start(mode: str, folder: Path) -> None:
    torchrun(["--standalone", "--nproc-per-node", "2", str(SELF), mode, str(folder)])


def test_sp_and_cp_see_the_same_samples_of_every_source(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed: worldmodel[data]")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    start("see", folder)


def see(folder: Path) -> None:
    """Both processes read all kinds of source, mixed; what they hold is compared bit by bit."""
    columns = {"video": "path", "text": "text", "keys": "keys"}
    sources = {
        "world": SourceConfig("shapes"),
        "table": SourceConfig("clips", str(folder / "clips" / "clips.csv"), columns=columns),
        "tar": SourceConfig("webdataset", str(folder / "shard.tar")),
        "hub": SourceConfig("huggingface", str(folder / "hub")),
    }
    stage = StageConfig(steps=3, batch_size=12, microbatch_size=4, rounds=1, tasks={"rounds": 1.0})
    dist.init_process_group("gloo")
    meshes = [Mesh.build(MeshConfig(**{axis: 2}), torch.device("cpu")) for axis in ("sp", "cp")]
    assert {(mesh.dp_rank, mesh.dp_size) for mesh in meshes} == {(0, 1)}
    for num_workers in (0, 2):
        data = DataConfig(sources, num_workers=num_workers, window=4)
        seen = []
        with loader.batches(data, MODEL, stage, seed=7) as stream:
            for step in stream:
                for mesh in meshes:
                    check_same_samples(step, stream.unreadable, mesh)
                seen += [exactly(step)]
        both = [seen, seen]
        dist.all_gather_object(both, seen)
        assert both[0] == both[1]
        begins = {name.split("/")[0].split(" ")[0] for step in seen for _, name, _ in step}
        assert len(begins) == len(sources), begins
    for mesh in meshes:
        refuse(mesh)
    dist.destroy_process_group()


def exactly(step: list[Batch]) -> list[tuple[int, str, str]]:
    rows = [row for batch in step for row in zip(batch.indices, batch.episodes, strict=True)]
    return [
        (index, one.name, hashlib.sha256(b"".join(c.tobytes() for c in one.observations)).hexdigest())
        for index, one in rows
    ]


def refuse(mesh: Mesh) -> None:
    """One value of one pixel differs, a text does, or one process has no such sample."""
    clip = np.zeros((1, 8, 8, 3), np.uint8)
    same = Episode("first", (clip,)), Episode("second", (clip,), answer="all that is said")
    other = clip.copy()
    other[0, 7, 7, 2] = 1
    for theirs, told in (
        ((same[0], dataclasses.replace(same[1], observations=(other,))), "process 0: second, checksum"),
        ((same[0], dataclasses.replace(same[1], answer="something else")), "process 0: second, checksum"),
        (same[:1], "process 1: nothing"),
    ):
        mine = theirs if mesh.rank else same
        with pytest.raises(ConfigError, match=f"Sample 5 of the stage.*{told}"):
            check_same_samples([Batch(2, "describe", (4, 5)[: len(mine)], list(mine))], [], mesh)
    check_same_samples([Batch(2, "describe", (4, 5), list(same))], [], mesh)


def test_a_clip_that_one_of_them_cannot_read_ends_the_run(
    folder: Path, make_model: Callable[..., WorldModel], tmp_path: Path
) -> None:
    for rank in range(2):
        shutil.copytree(folder / "clips", tmp_path / f"disk {rank}")
    sorted((tmp_path / "disk 1").glob("*.mp4"))[LOST].unlink()
    source = SourceConfig(
        "clips", str(folder / "clips" / "clips.csv"), columns={"video": "path", "text": "text"}
    )
    stage = StageConfig(
        "state", steps=3, batch_size=6, rounds=1, tasks={"rounds": 1.0}, train={"vision": TrainedConfig()}
    )
    config = TrainConfig(
        model=make_model(image_size=64).config,
        data=DataConfig({"mine": source}),
        mesh=MeshConfig(sp=2),
        stages={"state": stage},
        hang_timeout_s=120,
        precision="fp32",
    )
    (tmp_path / "config.yaml").write_text(json.dumps(configs.to_dict(config)))
    start("train", tmp_path)
    for num_workers in (0, 2):
        told = {(tmp_path / f"process {rank}, {num_workers} workers").read_text() for rank in range(2)}
        (sentence,) = told  # both ended, with code 2 and the same sentence
        assert sentence.startswith("2 error: Sample ")
        first, second = sentence.split(" | ")
        lost = f"clips.csv row {LOST + 1} (clip-0000{LOST}.mp4)"
        assert f"process 0: {lost}, checksum" in first
        assert "process 1" in second and lost in second
        assert sentence.count("\n") == 1
    assert not list(tmp_path.glob("run*/checkpoints/*"))


def train(folder: Path) -> None:
    """One run of training after the other, on a disk that is this process's own."""
    tokenizer.NUM_DOCUMENTS = 400
    rank = os.environ["RANK"]
    for num_workers in (0, 2):
        told = io.StringIO()
        with contextlib.redirect_stderr(told):
            code = main(
                [
                    "train",
                    str(folder / "config.yaml"),
                    f"data.sources.mine.root={folder / f'disk {rank}'}",
                    f"data.num_workers={num_workers}",
                    f"run_dir={folder / f'run {num_workers}'}",
                ]
            )
        lines = [line for line in told.getvalue().splitlines() if line.startswith("error: ")]
        text = "\n".join(lines) + "\n"
        (folder / f"process {rank}, {num_workers} workers").write_text(f"{code} {text}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"see": see, "train": train}[sys.argv[1]](Path(sys.argv[2]))
