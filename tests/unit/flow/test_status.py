"""What is shown of a flow: counts, rates, reasons of verdicts, metrics, and the export."""

import json
import time
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest
from flow_stages import flow_config, write_table
from prometheus_client.parser import text_string_to_metric_families

from worldmodel.cli import main
from worldmodel.config import to_dict
from worldmodel.config.flow import FlowConfig
from worldmodel.data.tar import samples
from worldmodel.errors import ConfigError, InputError, OutputError
from worldmodel.flow.export import export_log
from worldmodel.flow.metrics import metrics_server
from worldmodel.flow.records import NewClip, Result
from worldmodel.flow.run import run_flow
from worldmodel.flow.status import StatusReader, general


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> FlowConfig:
    """A flow of 20 clips, of which one file is missing, four are short, and one fails in every attempt."""
    folder = tmp_path_factory.mktemp("flow")
    (folder / "files").mkdir()
    table = write_table(folder / "files", 20)
    (folder / "files" / "19.bin").unlink()
    config = flow_config(
        folder / "flow", table,
        {
            "read": {},
            "measure": {"settings": {"least": 104}},
            "trouble": {"settings": {"how": "retry", "where": "/7.bin"}},
        },
    )  # fmt: skip
    assert run_flow(config) == 0
    return config


@pytest.fixture
def path(finished: FlowConfig, tmp_path: Path) -> str:
    path = tmp_path / "flow.yaml"
    path.write_text(json.dumps(to_dict(finished)))
    return str(path)


def test_the_status_counts_every_clip_once(finished: FlowConfig) -> None:
    with closing(StatusReader(finished)) as reader:
        status = reader.read()
    found = {each.name: (each.done, each.dropped, each.dead, each.waiting) for each in status.stages}
    assert found == {
        "read": (19, 1, 0, 0), "measure": (15, 4, 0, 0), "trouble": (14, 0, 1, 0), "pack": (14, 0, 0, 0),
    }  # fmt: skip
    assert (status.listed, status.packed, status.end_s, status.running) == (20, 14, 0.0, 0)
    assert all(stage.rate > 0 for stage in status.stages)
    assert {stage.oldest_s for stage in status.stages} == {None}


def test_the_rate_is_that_of_the_last_minute(finished: FlowConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    later = time.time() + 100
    with closing(StatusReader(finished)) as reader:
        monkeypatch.setattr(time, "time", lambda: later)
        assert [stage.rate for stage in reader.read().stages] == [0.0] * 4


def test_waiting_clips_have_an_age_and_an_estimated_end(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    config = flow_config(tmp_path / "flow", write_table(tmp_path / "files", 12), {"read": {}, "measure": {}})
    with closing(StatusReader(config)) as reader:
        assert reader.read().end_s is None
        catalog = reader.catalog
        catalog.begin()
        catalog.add("files", [NewClip(str(i), str(i)) for i in range(12)], 12, finished=True)
        catalog.record("read", [Result(str(i)) for i in range(4)], seconds=2.0)
        read, measure, pack = reader.read().stages
        assert (read.done, read.waiting, measure.waiting, pack.waiting) == (4, 8, 4, 0)
        assert read.rate == pytest.approx(4, rel=0.5)  # 4 clips within the first second of the run
        assert read.end_s == pytest.approx(8 / read.rate)
        assert measure.end_s is None, "it has not moved"
        assert read.worker_s == 2.0
        assert 0 <= (read.oldest_s or -1) < 60


def test_verdicts_are_counted_by_reason_with_examples(finished: FlowConfig) -> None:
    with closing(StatusReader(finished)) as reader:
        (short,) = reader.verdicts("measure")
        assert (short.state, short.count, short.reason) == ("dropped", 4, "# bytes, below #")
        assert len(short.examples) == 3
        assert all(example["reason"].endswith("below 104") for example in short.examples)
        assert all(Path(example["address"]).exists() for example in short.examples)
        (dead,) = reader.verdicts("trouble")
        assert (dead.state, dead.count, dead.reason) == ("dead", 1, "the host is busy")
        with pytest.raises(InputError, match="banana"):
            reader.verdicts("banana")


def test_reasons_that_differ_in_values_are_one() -> None:
    first, second = "'a.mp4' is 3.2 s long", "'b.mp4' is 11 s long"
    assert general(first) == general(second) == "… is # s long"


def test_the_commands_show_status_and_reasons(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flow", "status", path]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "20 listed" in out[0]
    assert out[1].split()[:5] == ["stage", "done", "dropped", "dead", "waiting"]
    assert out[3].split()[:5] == ["measure", "15", "4", "0", "0"]
    assert main(["flow", "status", path, "--stage", "measure"]) == 0
    assert "4 dropped: # bytes, below #" in capsys.readouterr().out
    assert main(["flow", "status", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"][1]["dropped"] == 4
    assert main(["flow", "status", path, "--stage", "banana"]) == 2
    assert "banana" in capsys.readouterr().err


def test_prometheus_reads_the_metrics(finished: FlowConfig) -> None:
    with closing(StatusReader(finished)) as reader, metrics_server(reader.read, "127.0.0.1", 0) as port:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            text = answer.read().decode()
        with pytest.raises(ConfigError, match=str(port)), metrics_server(reader.read, "127.0.0.1", port):
            pass
    found = {
        (sample.name, sample.labels.get("stage")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["worldmodel_flow_clips_dropped", "measure"] == 4
    assert found["worldmodel_flow_clips_packed", None] == 14


def test_an_export_has_the_clips_and_their_columns(
    finished: FlowConfig, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["flow", "export", path, str(out)]) == 0
    assert "14 clips in 2 shards" in capsys.readouterr().out
    rows = [json.loads(line) for line in (out / "clips.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == [f"clip {i}" for i in range(4, 19) if i != 7]
    assert [row["length"] for row in rows] == [100 + i for i in range(4, 19) if i != 7]
    found = [
        [(out / shard).read_bytes()[part.offset :][: part.size] for part in (parts["video"], parts["json"])]
        for shard in ("000000.tar", "000001.tar")
        for parts in samples(str(out / shard))  # as the data source `webdataset` reads them
    ]
    assert [json.loads(data)["text"] for _, data in found] == [row["text"] for row in rows]
    assert [video for video, _ in found] == [Path(row["address"]).read_bytes() for row in rows]
    with pytest.raises(OutputError, match="out"):
        export_log(finished.place("log"), out)
    assert main(["flow", "export", path]) == 2
