"""`worldmodel flow prune`: results of former chains go, those in use and all segments stay."""

import json
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from flow_stages import CALLS, flow_config, write_table

from worldmodel.cli import main
from worldmodel.config import to_dict
from worldmodel.config.flow import FlowConfig, FlowStageConfig
from worldmodel.flow.buffer import open_buffer
from worldmodel.flow.catalog.catalog import Catalog
from worldmodel.flow.catalog.chain import Chain
from worldmodel.flow.catalog.prune import FormerStage, Pruner
from worldmodel.flow.errors import FlowError
from worldmodel.flow.log.status import StatusReader
from worldmodel.flow.storage import Storage
from worldmodel.flow.work.run import run_flow

FORMER = {"read": {}, "measure": {}}
CURRENT = {"again": {"function": "flow_stages:read"}, "measure": {}}


@pytest.fixture(params=["", "lance:"])
def flows(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[FlowConfig, FlowConfig]:
    """A flow of 20 clips as it was, and as it is after one of its stages got another name; both have run."""
    (tmp_path / "files").mkdir()
    table = write_table(tmp_path / "files", 20)
    buffer = request.param and f"{request.param}{tmp_path / 'buffer'}"
    former, current = (
        flow_config(tmp_path / "flow", table, stages, buffer=buffer) for stages in (FORMER, CURRENT)
    )
    run_flow(former)
    run_flow(current)
    return former, current


def pruner(config: FlowConfig) -> Pruner:
    catalog = Catalog(config.place("catalog"), Chain.of(config), create=False)
    return Pruner(catalog, open_buffer(config.place("buffer")))


def log_files(config: FlowConfig) -> dict[str, bytes]:
    log = Storage(config.place("log"))
    return {name: log.read(name) for name in log.files()}


def test_results_of_former_chains_are_removed_and_no_others(
    flows: tuple[FlowConfig, FlowConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former, current = flows
    monkeypatch.setenv(CALLS, str(tmp_path / "calls"))
    (tmp_path / "calls").touch()
    before, found = log_files(current), pruner(current)
    listed = found.former()
    old = {link.name: link.key for link in Chain.of(former).links}
    assert {(each.stage, each.key): each.num_results for each in listed} == {
        ("read", old["read"]): 20, ("measure", old["measure"]): 20,
    }  # fmt: skip
    bytes_of = {each.stage: each.num_bytes for each in listed}
    assert bytes_of["read"] > sum(range(100, 120))
    assert bytes_of["measure"] == 0  # in the catalog alone
    places = set(found.catalog.places())
    freed = found.remove(listed, older_than_s=0)
    assert freed > 0
    assert found.former() == []
    kept = set(found.catalog.places())
    assert kept < places
    assert len(found.buffer.read(sorted(kept), "video")) == 20
    with pytest.raises(FlowError):
        found.buffer.read(sorted(places - kept), "video")
    assert log_files(current) == before
    run_flow(current)
    assert (tmp_path / "calls").read_text() == ""  # nothing is computed again
    run_flow(former)  # all its clips are packed already
    assert (tmp_path / "calls").read_text() == ""
    assert {name: data for name, data in log_files(current).items() if "/" in name} == {
        name: data for name, data in before.items() if "/" in name
    }


def test_the_command_removes_only_when_told_to(
    flows: tuple[FlowConfig, FlowConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "flow.yaml"
    path.write_text(json.dumps(to_dict(flows[1])))
    for _ in range(2):
        assert main(["flow", "prune", str(path)]) == 0
        assert capsys.readouterr().out.count("20 results") == 2
    assert main(["flow", "prune", str(path), "--delete"]) == 0
    assert capsys.readouterr().out.count("20 results") == 2
    assert main(["flow", "prune", str(path)]) == 0
    assert "20 results" not in capsys.readouterr().out


def test_old_files_of_clips_that_have_ended_are_removed_and_made_again_by_a_changed_chain(
    flows: tuple[FlowConfig, FlowConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, current = flows
    found, before = pruner(current), log_files(current)
    assert found.ended(older_than_s=3600.0) == [], "they are a few seconds old"
    assert [(each.stage, each.num_results) for each in found.ended(0.0)] == [("again", 20), ("read", 20)]
    assert found.remove_ended(0.0, files_older_than_s=0.0) > 2 * sum(range(100, 120))
    assert found.ended(0.0) == [] and [*found.catalog.places()] == []
    assert log_files(current) == before
    monkeypatch.setenv(CALLS, str(tmp_path / "calls"))
    (tmp_path / "calls").touch()
    run_flow(current)
    assert (tmp_path / "calls").read_text() == "", "what is packed is not made again"
    measure = FlowStageConfig("flow_stages:measure", settings={"least": 1})
    changed = replace(current, stages={**current.stages, "measure": measure})
    run_flow(changed)
    lines = [line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()]
    assert (lines.count("read"), lines.count("measure")) == (20, 20)


def test_files_of_clips_on_their_way_are_kept(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    config = flow_config(tmp_path / "flow", write_table(tmp_path / "files", 20))
    stop = threading.Event()
    with closing(StatusReader(config, create=True)) as reader:

        def stop_when_read() -> None:
            if reader.read().stages[0].done == 20:
                stop.set()

        run_flow(config.only(["feed", "read"]), stop_when_read, stop=stop)
    found = pruner(config)
    assert found.ended(0.0) == []
    assert len([*found.catalog.places()]) == 20
    run_flow(config)
    assert [(each.stage, each.num_results) for each in found.ended(0.0)] == [("read", 20)]


def test_a_config_that_has_not_run_removes_nothing(flows: tuple[FlowConfig, FlowConfig]) -> None:
    former, _ = flows
    with pytest.raises(FlowError):
        pruner(former)


def test_results_are_removed_in_several_transactions(
    flows: tuple[FlowConfig, FlowConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worldmodel.flow.catalog.prune.BATCH", 7)
    found = pruner(flows[1])
    assert {type(each) for each in found.former()} == {FormerStage}
    found.remove(found.former())
    assert found.former() == []
