"""The loop of a worker: clips whose earlier workers ended."""

import threading
from contextlib import closing
from pathlib import Path

import pytest
from flow_stages import flow_config, write_table

from worldmodel.flow.catalog import Catalog
from worldmodel.flow.chain import Chain
from worldmodel.flow.feeder import Lister
from worldmodel.flow.records import BEGINNING
from worldmodel.flow.topics import Message, open_topic
from worldmodel.flow.worker import IDLE, run_stage


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
        Lister(config, catalog).list_next()
        clips = [each.id for each in catalog.waiting(BEGINNING, 4)]
        url = f"memory:{tmp_path}"
        topic = open_topic(url, catalog.chain.link("read").topic)
        topic.publish([Message(clip) for clip in clips])
        for number in range(ended):
            assert len(topic.claim(4, lease_s=0.0)) == 4
            for clip in clips if number else ():  # each alone
                catalog.attempt("read", clip)
        run_stage(config, "read", url, stop, report)
        assert catalog.done("read", clips) == dict.fromkeys(clips, state)
