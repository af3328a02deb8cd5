"""Tables of documents, and training of the language model on them."""

import dataclasses
import gzip
import json
import math
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from worldmodel.config import (
    DataConfig,
    SourceConfig,
    StageConfig,
    TrainConfig,
    TrainedConfig,
    WorldModelConfig,
)
from worldmodel.data import loader
from worldmodel.data.sources import open_source
from worldmodel.errors import ConfigError, InputError
from worldmodel.train import distributed
from worldmodel.train.trainer import Trainer

TEXTS = ["The red ball rolls.", "A square\njumps – twice.", "", "It stops."]


def write(path: Path) -> Path:
    """Write a table with the texts in one of the formats."""
    if path.suffix == ".parquet":
        parquet.write_table(pa.table({"url": ["u"] * 4, "text": TEXTS}), path, row_group_size=2)
    else:
        path.write_text("".join(json.dumps({"url": "u", "text": text}) + "\n" for text in TEXTS))
    return path


def config_of(path: Path, **columns: str) -> DataConfig:
    return DataConfig(sources={"web": SourceConfig("text", str(path), columns=columns)}, num_workers=0)


@pytest.mark.parametrize("name", ["documents.jsonl", "documents.parquet"])
def test_rows_are_documents_in_any_order(tmp_path: Path, name: str) -> None:
    source = open_source("web", config_of(write(tmp_path / name)), WorldModelConfig())
    assert (source.tasks, source.size) == (("document",), 4)
    for index in (3, 0, 5):
        assert source.at(index).episode("document", 0, index, 1).answer == TEXTS[index % 4]
    with pytest.raises(InputError, match=f"{name} row 3: it has no text"):
        source.at(2).episode("document", 0, 2, 1)
    source.close()


def test_a_dataset_is_streamed(tmp_path: Path) -> None:
    write(tmp_path / "documents.jsonl")
    source = open_source("web", config_of(tmp_path), WorldModelConfig())
    assert (source.tasks, source.size, source.streams) == (("document",), None, 1)
    for index in (0, 1, 5, 7):
        assert source.at(index).episode("document", 0, index, 1).answer == TEXTS[index % 4]
    with pytest.raises(InputError, match="it has no text"):
        source.at(2).episode("document", 0, 2, 1)
    source.close()


def test_compressed_files_in_folders_are_streamed(tmp_path: Path) -> None:
    """The layout of C4."""
    (tmp_path / "c4" / "en").mkdir(parents=True)
    for shard in range(2):
        rows = [{"text": f"Document {shard} {n}.", "url": f"https://example.com/{n}"} for n in range(3)]
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        name = f"c4-train.{shard:05d}-of-00002.json.gz"
        (tmp_path / "c4" / "en" / name).write_bytes(gzip.compress(lines))
    source = open_source("web", config_of(tmp_path / "c4"), WorldModelConfig())
    found = [source.at(index).episode("document", 0, 0, 1).answer for index in range(6)]
    source.close()
    assert found == [f"Document {shard} {n}." for n in range(3) for shard in range(2)]


def test_a_single_file_of_c4_is_a_table(tmp_path: Path) -> None:
    lines = b"".join(json.dumps({"text": text, "url": "https://a.b"}).encode() + b"\n" for text in "abc")
    path = tmp_path / "c4-train.00000-of-01024.json.gz"
    path.write_bytes(gzip.compress(lines))
    source = open_source("web", config_of(path), WorldModelConfig())
    assert (source.size, source.streams) == (3, 0)
    assert [source.at(index).episode("document", 0, 0, 1).answer for index in range(4)] == [*"abca"]
    source.close()


def test_wrong_columns_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "documents.jsonl")
    for columns, named in (({"text": "content"}, "content"), ({"video": "url"}, "video")):
        with pytest.raises(ConfigError, match=named):
            open_source("web", config_of(path, **columns), WorldModelConfig())


def test_the_language_model_is_trained_on_documents(run_config: TrainConfig, tmp_path: Path) -> None:
    stage = StageConfig(
        "language", steps=1, batch_size=2, tasks={"document": 1.0}, train={"backbone": TrainedConfig()}
    )
    data = config_of(write(tmp_path / "documents.jsonl"))
    config = dataclasses.replace(run_config, data=data, stages={"language": stage})
    mesh = distributed.init(config)
    try:
        current, _ = Trainer.start(config, "language", mesh, None)
        (batches,) = loader.batches(config.data, config.model, stage, seed=0)
        assert {episode.answer for batch in batches for episode in batch.episodes} <= {*TEXTS} - {""}
        result = current.step(batches, stop=False)
        current.finish(batches)
    finally:
        distributed.shutdown()
    assert 0 < result.losses["loss"] < math.inf
