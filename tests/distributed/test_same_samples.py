"""Processes that share sequences have the same samples: one of them reads for all."""

import hashlib
import json
import os
import shutil
import sys
import tarfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import torchrun

from worldmodel.config import (
    ActionConfig,
    DataConfig,
    MeshConfig,
    SourceConfig,
    StageConfig,
    WorldModelConfig,
)
from worldmodel.data import loader
from worldmodel.data.loader import Batch
from worldmodel.data.sequence_loader import SequenceLoader
from worldmodel.errors import ConfigError
from worldmodel.parallel.mesh import Mesh
from worldmodel.shapes.source import KEYS
from worldmodel.worlds import get_world

pytestmark = pytest.mark.slow
MODEL = WorldModelConfig(action=ActionConfig(keys=KEYS))
STAGE = StageConfig(steps=3, batch_size=12, microbatch_size=4, rounds=1, tasks={"rounds": 1.0})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six clips with a table, in a tar file and as a dataset of Hugging Face."""
    folder = tmp_path_factory.mktemp("samples")
    table = get_world("shapes").record(folder / "clips", 6, rounds=2)
    (folder / "hub").mkdir()
    rows = []
    with tarfile.open(folder / "shard.tar", "w") as tar:
        for clip in sorted(table.parent.glob("*.mp4")):
            tar.add(clip, clip.name)
            shutil.copy(clip, folder / "hub" / clip.name)
            rows.append(json.dumps({"file_name": clip.name, "text": f"what {clip.stem} shows"}))
    (folder / "hub" / "metadata.jsonl").write_text("\n".join(rows))
    return folder


def test_one_process_reads_for_those_that_share_sequences(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed: openworldmodel[data]")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    torchrun(__file__, 2, folder)


def work(folder: Path) -> None:
    """In each of two processes, of which only the first has the files."""
    here = folder if os.environ["RANK"] == "0" else folder / "not there"
    columns = {"video": "path", "text": "text", "keys": "keys"}
    sources = {
        "world": SourceConfig("shapes"),
        "table": SourceConfig("clips", str(here / "clips" / "clips.jsonl"), columns=columns),
        "tar": SourceConfig("webdataset", str(here / "shard.tar")),
        "hub": SourceConfig("huggingface", str(here / "hub")),
    }
    dist.init_process_group("gloo")
    for axis in ("sp", "cp"):
        mesh = Mesh.build(MeshConfig(**{axis: 2}), torch.device("cpu"))
        assert (mesh.dp_rank, mesh.dp_size) == (0, 1)
        for num_workers in (0, 2):
            data = DataConfig(sources, num_workers=num_workers, window=4)
            see(mesh, data)
    refuse(mesh, folder, columns)
    dist.destroy_process_group()


def see(mesh: Mesh, data: DataConfig) -> None:
    with SequenceLoader(lambda: loader.batches(data, MODEL, STAGE, seed=7), mesh) as stream:
        assert (stream.loader is None) == (mesh.rank == 1)
        seen = [exactly(step) for step in stream]
        assert stream.stall_s > 0
    both = mesh.all_gather(seen)
    assert len(seen) == STAGE.steps
    assert both[0] == both[1]
    begins = {name.split("/")[0].split(" ")[0] for step in seen for _, name, _ in step}
    assert len(begins) == len(data.sources), begins


def exactly(step: list[Batch]) -> list[tuple[int, str, str]]:
    rows = [row for batch in step for row in zip(batch.indices, batch.episodes, strict=True)]
    return [
        (index, one.name, hashlib.sha256(b"".join(c.tobytes() for c in one.observations)).hexdigest())
        for index, one in rows
    ]


def refuse(mesh: Mesh, folder: Path, columns: dict[str, str]) -> None:
    """Errors are raised by both processes: one of opening, and one of reading."""
    gone = DataConfig({"mine": SourceConfig("clips", str(folder / "gone.csv"), columns=columns)})
    with pytest.raises(ConfigError, match=r"gone\.csv"):
        SequenceLoader(lambda: loader.batches(gone, MODEL, STAGE, seed=7), mesh)
    if mesh.rank == 0:
        for clip in sorted((folder / "clips").glob("*.mp4"))[1:]:
            clip.write_bytes(b"damaged")
    table = SourceConfig("clips", str(folder / "clips" / "clips.jsonl"), columns=columns)
    data = DataConfig({"mine": table}, max_bad_fraction=0.0)
    with (
        SequenceLoader(lambda: loader.batches(data, MODEL, STAGE, seed=7), mesh) as stream,
        pytest.raises(ConfigError, match=r"data\.max_bad_fraction"),
    ):
        list(stream)


if __name__ == "__main__":
    torch.set_num_threads(1)
    work(Path(sys.argv[1]))
