"""What is shown of a flow: counts, rates, reasons of verdicts, metrics, and the export."""

import json
import time
import urllib.request
from contextlib import closing
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from flow_stages import flow_config, write_table
from prometheus_client.parser import text_string_to_metric_families

from worldmodel.cli import main
from worldmodel.config import build, to_dict
from worldmodel.config.flow import FlowConfig
from worldmodel.data.tar import samples
from worldmodel.errors import ConfigError, InputError, OutputError
from worldmodel.flow.catalog.clip_table import ClipTable
from worldmodel.flow.catalog.records import BEGINNING, NewClip, Result
from worldmodel.flow.errors import FlowError
from worldmodel.flow.log.export import export_log
from worldmodel.flow.log.metrics import metrics_server
from worldmodel.flow.log.status import StatusReader, general
from worldmodel.flow.work.run import run_flow


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


def metrics(port: int) -> dict[tuple[str, str | None], float]:
    """The metrics that a server has, by name and stage."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    return {
        (sample.name, sample.labels.get("stage")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


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


def test_machines_with_the_same_stages_are_a_tier_whose_rates_are_added(
    finished: FlowConfig, path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two machines read and measure, one has trouble; packing has no worker now."""
    cpus, gpu = {"one": 2, "two": 1}, {"gpu-1": 4}
    found = {"read": cpus, "measure": dict(reversed(cpus.items())), "trouble": gpu}
    monkeypatch.setattr(StatusReader, "_machines", lambda reader, db: found)
    with closing(StatusReader(finished)) as reader:
        status = reader.read()
    rates = {stage.name: stage.rate for stage in status.stages}
    first, second = status.tiers
    assert (first.machines, first.stages, first.workers) == (("one", "two"), ("read", "measure"), 6)
    assert first.rate == rates["read"] + rates["measure"] > rates["read"] > 0
    assert (second.machines, second.stages, second.workers) == (("gpu-1",), ("trouble",), 4)
    assert second.rate == rates["trouble"]
    assert main(["flow", "status", path]) == 0
    assert "one, two: read, measure, 6 workers, " in capsys.readouterr().out
    assert main(["flow", "status", path, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["tiers"]
    assert [tier["machines"] for tier in shown] == [["one", "two"], ["gpu-1"]]
    monkeypatch.setattr(StatusReader, "_machines", lambda reader, db: {"read": cpus})
    assert main(["flow", "status", path]) == 0
    assert "one, two: read" not in capsys.readouterr().out, "a single tier is what the table shows"


def test_the_rate_is_that_of_the_last_minute(finished: FlowConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    later = time.time() + 100
    with closing(StatusReader(finished)) as reader:
        monkeypatch.setattr(time, "time", lambda: later)
        assert [stage.rate for stage in reader.read().stages] == [0.0] * 4


def test_waiting_clips_have_an_age_and_an_estimated_end(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    config = flow_config(tmp_path / "flow", write_table(tmp_path / "files", 12), {"read": {}, "measure": {}})
    with closing(StatusReader(config, create=True)) as reader:
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


def test_the_time_that_is_left_is_known_for_stages_that_have_begun(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    table = write_table(tmp_path / "files", 4)
    config = build(
        FlowConfig,
        {
            "folder": str(tmp_path / "flow"), "sources": {"files": {"path": str(table)}},
            "stages": {"fetch": {}, "probe": {}},
        },
    )  # fmt: skip
    with closing(StatusReader(config, create=True)) as reader:
        reader.catalog.begin()
        reader.catalog.add("files", [NewClip(str(i), str(i)) for i in range(4)], 4, finished=True)
        reader.catalog.record("fetch", [Result(str(i)) for i in range(4)], seconds=1800.0)
        reader.catalog.record("probe", [Result("0")], seconds=3600.0)
        with metrics_server(reader.read, "127.0.0.1", 0) as port:
            found = metrics(port)
    assert found["worldmodel_flow_worker_seconds", "fetch"] == 1800.0
    assert found["worldmodel_flow_remaining_seconds", "fetch"] == 0.0
    assert found["worldmodel_flow_remaining_seconds", "probe"] > 0
    assert ("worldmodel_flow_remaining_seconds", "pack") not in found, "nothing is packed yet"
    assert ("worldmodel_flow_total_remaining_seconds", None) not in found


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


def test_reasons_keep_hosts_and_the_codes_of_their_answers() -> None:
    assert general("videos.example answered HTTP 403") == "videos.example answered HTTP 403"
    assert general("127.0.0.1 answered HTTP 404") == "127.0.0.1 answered HTTP 404"
    assert general("http://host:80/a/1.mp4 is 12 s long") == general("http://host:80/b is 3.5 s long")
    assert "http://host:80/" in general("http://host:80/a/1.mp4 is 12 s long").replace("#", "80")


def test_the_commands_show_status_and_reasons(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flow", "status", path]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "20 listed" in out[0]
    assert out[1].split()[:5] == ["stage", "done", "dropped", "dead", "waiting"]
    assert out[3].split()[:5] == ["measure", "15", "4", "0", "0"]
    assert main(["flow", "status", path, "--stage", "measure"]) == 0
    assert "4 dropped: # bytes, below #" in capsys.readouterr().out
    assert main(["flow", "status", path, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["stages"][1]["dropped"] == 4
    assert main(["flow", "status", path, "--stage", "banana"]) == 2
    assert "banana" in capsys.readouterr().err


def test_a_parquet_export_has_every_clip_with_its_verdict(
    finished: FlowConfig, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClipTable.pages, "__defaults__", (6,))  # several batches
    out = tmp_path / "clips.parquet"
    assert main(["flow", "export", path, str(out)]) == 0
    assert pq.ParquetFile(out).num_row_groups == 4
    table = pq.read_table(out)
    assert {name: str(table.schema.field(name).type) for name in ("length", "odd", "digits", "start_s")} == {
        "length": "int64", "odd": "int64", "digits": "string", "start_s": "double",
    }  # fmt: skip
    assert not {"video", "sum"} & set(table.schema.names)
    rows = {Path(row["address"]).name: row for row in table.to_pylist()}
    assert len(rows) == table.num_rows == 20
    verdicts = {name: (row["verdict"], row["stage"], row["reason"]) for name, row in rows.items()}
    assert verdicts.pop("19.bin") == ("dropped", "read", "there is no such file")
    assert verdicts.pop("7.bin") == ("dead", "trouble", "the host is busy")
    assert [verdicts.pop(f"{n}.bin") for n in range(4)] == [
        ("dropped", "measure", f"{100 + n} bytes, below 104") for n in range(4)
    ]
    assert set(verdicts.values()) == {("packed", None, None)}
    five = rows["5.bin"]
    assert (five["length"], json.loads(five["digits"]), five["text"]) == (105, [1, 0, 5], "clip 5")
    assert (five["source"], five["licence"], five["row"]) == ("files", "", '{"text":"clip 5"}')


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"verdict": "dead"}, ["7"]),
        ({"stage": "measure"}, ["0", "1", "2", "3"]),
        ({"verdict": "dropped", "reason": "NO SUCH"}, ["19"]),
        ({"reason": "100%"}, []),
        ({"verdict": "waiting"}, []),
        ({"verdict": "packed"}, [str(n) for n in range(4, 19) if n != 7]),
    ],
)
def test_clips_are_found_by_verdict_stage_and_reason(
    finished: FlowConfig, asked: dict[str, str], found: list[str]
) -> None:
    with closing(StatusReader(finished)) as reader:
        table, place, names = ClipTable(reader.catalog), BEGINNING, []
        while entries := table.page(place, 3, **asked):
            place = entries[-1].place
            names += [Path(entry.address).stem for entry in entries]
        assert names == found
        with pytest.raises(InputError, match="banana"):
            table.page(BEGINNING, 1, stage="banana")


@pytest.mark.parametrize("command", ["status", "retry", "compact", "prune"])
def test_no_command_but_run_creates_a_catalog(
    command: str, database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = flow_config(tmp_path / "flow", tmp_path / "clips.jsonl", catalog=database_url)
    path = tmp_path / "flow.yaml"
    path.write_text(json.dumps(to_dict(config)))
    before = sorted(tmp_path.rglob("*"))
    assert main(["flow", command, str(path)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(FlowError):  # and the empty database of PostgreSQL stays empty
        StatusReader(config)


def test_prometheus_reads_the_metrics(finished: FlowConfig) -> None:
    with closing(StatusReader(finished)) as reader, metrics_server(reader.read, "127.0.0.1", 0) as port:
        found = metrics(port)
        with pytest.raises(ConfigError, match=str(port)), metrics_server(reader.read, "127.0.0.1", port):
            pass
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
