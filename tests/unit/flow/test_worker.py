"""The loops of workers: clips whose earlier workers ended."""

import threading
from contextlib import closing
from pathlib import Path

import pytest
from flow_stages import flow_config, write_table

from worldmodel.database import transaction
from worldmodel.flow.catalog.catalog import Catalog
from worldmodel.flow.catalog.chain import PACK, Chain
from worldmodel.flow.catalog.claims import Claims
from worldmodel.flow.catalog.records import BEGINNING
from worldmodel.flow.work.feeder import Feeder
from worldmodel.flow.work.loops import IDLE, run_stage, run_waiting
from worldmodel.flow.work.work import Work


@pytest.mark.parametrize(
    ("max_attempts", "ended", "state"), [(1, 1, "done"), (1, 2, "dead"), (2, 2, "dead"), (3, 2, "done")]
)
def test_clips_of_a_batch_whose_worker_ended_have_an_attempt_alone(
    tmp_path: Path, max_attempts: int, ended: int, state: str
) -> None:
    (tmp_path / "files").mkdir()
    table = write_table(tmp_path / "files", 4)
    config = flow_config(tmp_path / "flow", table, {"read": {}}, max_attempts=max_attempts)
    stop, served = threading.Event(), []

    def report(now: str) -> None:
        served.append(now)
        if served.count(IDLE) == 4:
            stop.set()

    with closing(Catalog(config.place("catalog"), Chain.of(config))) as catalog:
        Feeder(config, catalog).list_next()
        catalog.admit(3)
        clips = [each.id for each in catalog.waiting(BEGINNING, 4)]
        lost = Claims(catalog, "read", 60.0)
        for number in range(ended):
            transaction(catalog.engine, lost.lease.beat)
            assert len(lost.claim(4)) == 4
            transaction(catalog.engine, lost.lease.end)
            for clip in clips if number else ():  # each alone
                catalog.attempt("read", clip)
        run_stage(config, "read", stop, report)
        assert catalog.done("read", clips) == dict.fromkeys(clips, state)


def test_a_worker_under_the_name_of_one_that_ended_gets_its_clips_at_once(tmp_path: Path) -> None:
    """As a task of Spark that begins again: the lease of the former one goes on."""
    (tmp_path / "files").mkdir()
    config = flow_config(tmp_path / "flow", write_table(tmp_path / "files", 4))
    stages = [Work(config, name) for name in config.stages]
    catalog = stages[0].catalog
    Feeder(config, catalog).list_next()
    catalog.admit(3)
    catalog.owner = "task-0"
    lost = Claims(catalog, "read", 60.0)
    transaction(catalog.engine, lost.lease.beat)
    assert len(lost.claim(2)) == 2
    run_waiting(stages, "other", 0.05)
    assert [each.state for each in catalog.after(BEGINNING, 9)] == ["read", "read", PACK, PACK]
    run_waiting(stages, "task", 0.05)
    assert [each.state for each in catalog.after(BEGINNING, 9)] == [PACK] * 4
    for stage in stages:
        stage.close()
