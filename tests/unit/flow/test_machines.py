"""A flow whose stages run on different machines: one lists and packs, others run some of the stages."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from flow_stages import CALLS, flow_config, write_table

from worldmodel.cli import main
from worldmodel.config import to_dict
from worldmodel.config.flow import FEED, FlowConfig, FlowStageConfig
from worldmodel.errors import ConfigError
from worldmodel.flow.catalog.chain import Chain
from worldmodel.flow.log.log import Log
from worldmodel.flow.log.status import StatusReader
from worldmodel.flow.work.run import run_flow

LIMIT_S = 120.0
"""Time after which a flow that takes a second is taken to hang."""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    return write_table(tmp_path / "files", 30)


def digests(config: FlowConfig) -> list[str]:
    """The hashes of the segments of a finished log."""
    log = Log(config.place("log"))
    end = log.end()
    assert end is not None
    return [json.loads(log.storage.read(f"{number:06d}.json"))["sha256"] for number in range(end[0])]


def run_together(*parts: FlowConfig) -> None:
    """Run what each machine does at the same time, until all have ended."""
    stop = threading.Event()
    timer = threading.Timer(LIMIT_S, stop.set)
    timer.start()
    with ThreadPoolExecutor(len(parts)) as machines:
        running = [machines.submit(run_flow, part, stop=stop) for part in parts]
        assert [each.result() for each in running] == [0] * len(parts)
    assert not stop.is_set(), "it hangs"
    timer.cancel()


def test_machines_with_a_part_of_the_stages_each_make_the_log_of_one(tmp_path: Path, table: Path) -> None:
    one = flow_config(tmp_path / "one", table)
    run_flow(one)
    config = flow_config(tmp_path / "several", table)
    run_together(config.only(["measure"]), config.only(["read"]), config.only([FEED]))
    assert digests(config) == digests(one) != []
    with closing(StatusReader(config)) as reader:
        stages = reader.read().stages
        assert [(stage.done, stage.waiting) for stage in stages] == [(30, 0)] * 3
        assert [stage.machines for stage in stages] == [{}] * 3, "all have ended"


def test_a_machine_runs_its_own_stages_only(
    tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = flow_config(tmp_path / "flow", table, {"read": {"workers": 2}, "measure": {}})
    calls, stop = tmp_path / "calls", threading.Event()
    monkeypatch.setenv(CALLS, str(calls))
    with closing(StatusReader(config, create=True)) as reader:

        def stop_when_measuring_waits() -> None:
            read, measure, pack = status = reader.read().stages
            if measure.waiting == 30 and not stop.is_set():
                host = socket.gethostname()
                assert [stage.machines for stage in status] == [{host: 2}, {}, {host: 1}]
                assert [stage.workers for stage in status] == [2, 0, 1]
                assert read.rate > 0 == measure.rate == pack.rate
                stop.set()

        run_flow(config.only([FEED, "read"]), stop_when_measuring_waits, stop=stop)
    assert {line.split()[0] for line in calls.read_text().splitlines()} == {"read"}
    assert len(calls.read_text().splitlines()) == 30


def test_parts_of_a_flow_are_named_by_its_stages(tmp_path: Path, table: Path) -> None:
    config = flow_config(tmp_path / "flow", table, {"read": {}, "measure": {"workers": 0}})
    part = config.only(["read"])
    assert (part.feed, part.stages["read"].workers, part.stages["measure"].workers) == (False, 1, 0)
    assert Chain.of(part).key == Chain.of(config).key, "machines with other parts share the log"
    with pytest.raises(ConfigError, match=r"'reed'.*read, measure, feed"):
        config.only(["reed"])
    with pytest.raises(ConfigError, match=r"stages\.measure\.workers is 0"):
        config.only(["measure"])
    with pytest.raises(ConfigError, match=r"workers.*-1"):
        FlowStageConfig(workers=-1)
    with pytest.raises(ConfigError, match="feed"):
        Chain.of(flow_config(tmp_path / "flow", table, {"feed": {}}))


def test_the_command_says_what_a_machine_can_do(
    tmp_path: Path, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "flow.yaml"
    path.write_text(yaml.safe_dump(to_dict(flow_config(tmp_path / "flow", table)), sort_keys=False))
    assert main(["flow", "work", str(path)]) == 2
    assert "read, measure, feed" in capsys.readouterr().err
    assert main(["flow", "run", str(path), "--stages", "read"]) == 2
    assert "flow work" in capsys.readouterr().err
    assert main(["flow", "work", str(path), "--stages", "feed, read,measure"]) == 0
    assert "30 packed in 4 segments" in capsys.readouterr().out
