"""`worldmodel flow prune`: results of former chains go, those in use and all segments stay."""

import json
from pathlib import Path

import pytest
from flow_stages import CALLS, flow_config, write_table

from worldmodel.cli import main
from worldmodel.config import to_dict
from worldmodel.config.flow import FlowConfig
from worldmodel.flow.buffer import open_buffer
from worldmodel.flow.catalog.catalog import Catalog
from worldmodel.flow.catalog.chain import Chain
from worldmodel.flow.catalog.prune import FormerStage, Pruner
from worldmodel.flow.errors import FlowError
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
