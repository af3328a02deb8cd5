"""The table of an export beside its shards."""

import json
import tarfile
from pathlib import Path

from flow_stages import flow_config

from worldmodel.flow.log.export import export_log
from worldmodel.flow.work.run import run_flow


def test_columns_of_the_sources_table_do_not_replace_those_of_the_export(tmp_path: Path) -> None:
    (tmp_path / "0.bin").write_bytes(b"x" * 50)
    table = tmp_path / "clips.jsonl"
    table.write_text('{"address": "0.bin", "text": "a", "key": "000017", "shard": "s9", "take": 3}\n')
    config = flow_config(tmp_path / "flow", table, {"read": {}})
    run_flow(config)
    assert export_log(config.place("log"), tmp_path / "out") == (1, 1)
    row = json.loads((tmp_path / "out" / "clips.jsonl").read_text())
    with tarfile.open(tmp_path / "out" / row["shard"]) as shard:
        assert f"{row['key']}.mp4" in shard.getnames()
    assert row["take"] == 3
