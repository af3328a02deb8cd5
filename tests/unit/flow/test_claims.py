"""Claims of clips: nothing lost, leases, order, delays, and one worker at a time per clip."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import claim_worker
import pytest
import sqlalchemy as sa
from claim_worker import STAGE, deliveries, open_catalog
from postgres import PostgresServer

from worldmodel.database import transaction
from worldmodel.flow.catalog.catalog import Catalog
from worldmodel.flow.catalog.claims import Claims
from worldmodel.flow.catalog.records import BEGINNING, Claim, NewClip, Result, Retry
from worldmodel.flow.catalog.schema import clip, lease

SHORT_S, LONG_S = 0.3, 60.0
WAIT_S = 60.0
"""Limit for what happens at once on an idle machine."""
HANGS_S = 600.0
"""Time after which processes that take seconds on an idle machine are taken to hang."""

Open = Callable[..., Claims]


@pytest.fixture
def opened(database_url: str) -> Iterator[Open]:
    """Opens the claims of a further worker with a live lease, which nobody renews."""
    catalogs: list[Catalog] = []

    def call(lease_s: float = LONG_S) -> Claims:
        catalogs.append(open_catalog(database_url))
        claims = Claims(catalogs[-1], STAGE, lease_s)
        transaction(claims.engine, claims.lease.beat)
        return claims

    yield call
    for catalog in catalogs:
        catalog.close()


def add(catalog: Catalog, count: int, before: int = 0) -> list[str]:
    """List clips and admit them."""
    names = [f"clip-{before + index:04}" for index in range(count)]
    catalog.add("files", [NewClip(name, name) for name in names], before + count, False, before=before)
    catalog.admit(before + count)
    return names


def names(claims: list[Claim]) -> list[str]:
    return [claim.clip for claim in claims]


def end_lease(claims: Claims) -> None:
    """Let the lease of a worker that has died end."""
    ended = sa.update(lease).where(lease.c.id == claims.lease.id).values(expires_at=0)
    transaction(claims.engine, lambda db: db.execute(ended))


def retry(claims: Claims, claimed: list[Claim], after_s: float) -> None:
    claims.catalog.record(STAGE, [], retry={each.clip: Retry("busy", after_s) for each in claimed})


def test_clips_are_claimed_in_the_order_of_the_catalog_and_once(opened: Open) -> None:
    mine, other = opened(), opened()
    clips = add(mine.catalog, 5)
    assert names(mine.claim(2)) == clips[:2]
    assert names(other.claim(9)) == clips[2:]
    assert opened().claim(9) == []


def test_a_claim_whose_answer_was_lost_comes_again(opened: Open) -> None:
    """As when the database is killed after the commit."""
    worker = opened()
    clips = add(worker.catalog, 3)
    worker.claim(2)
    assert [(each.clip, each.delivery) for each in worker.claim(3)] == list(
        zip(clips, (2, 2, 1), strict=True)
    )


def test_only_admitted_clips_of_the_stage_are_claimed(opened: Open) -> None:
    worker = opened()
    clips = add(worker.catalog, 6)
    worker.catalog.admit(2)
    assert names(worker.claim(9)) == clips[:3]
    worker.catalog.record(STAGE, [Result(name) for name in clips[:3]])
    assert worker.claim(9) == []
    worker.catalog.admit(5)
    assert names(worker.claim(9)) == clips[3:]


def test_clips_that_were_named_are_claimed_if_they_still_wait(opened: Open) -> None:
    """As a topic names them, which may repeat and invent ids."""
    mine, other = opened(), opened()
    clips = add(mine.catalog, 4)
    mine.claim(1)
    other.catalog.record(STAGE, [Result(clips[1])])
    assert names(other.claim(9, [clips[2], clips[0], clips[1], "unknown", clips[2]])) == [clips[2]]


def test_clips_of_a_worker_that_died_are_claimed_again_alone(opened: Open) -> None:
    lost, other = opened(), opened()
    clips = add(lost.catalog, 2)
    assert [claim.delivery for claim in lost.claim(2)] == [1, 1]
    assert other.claim(2) == []
    end_lease(lost)
    again = other.claim(2)
    assert (names(again), [claim.delivery for claim in again]) == (clips, [2, 2])


def test_a_worker_that_stops_leaves_its_clips_at_once(opened: Open) -> None:
    stopping, other = opened(), opened()
    add(other.catalog, 2)
    with stopping.kept():
        assert len(stopping.claim(2)) == 2
        assert other.claim(2) == []
    assert len(other.claim(2)) == 2


def test_a_kept_lease_lasts(opened: Open) -> None:
    worker, other = opened(SHORT_S), opened()
    add(worker.catalog, 1)
    with worker.kept():
        worker.claim(1)
        assert other.wait(1, 4 * SHORT_S) == []


def test_a_worker_that_lost_its_lease_cannot_take_a_clip_from_another(opened: Open) -> None:
    slow, other = opened(), opened()
    add(slow.catalog, 1)
    claimed = slow.claim(1)
    end_lease(slow)
    assert len(other.claim(1)) == 1
    transaction(slow.engine, slow.lease.beat)  # it was suspended, and goes on
    retry(slow, claimed, 0.0)
    assert slow.claim(1) == []


def test_a_result_that_comes_late_counts_and_the_second_one_does_not(opened: Open) -> None:
    slow, other = opened(), opened()
    (name,) = add(slow.catalog, 1)
    slow.claim(1)
    end_lease(slow)
    other.claim(1)
    slow.catalog.record(STAGE, [Result(name, "dropped", "the first")])
    other.catalog.record(STAGE, [Result(name)])
    assert slow.catalog.done(STAGE, [name]) == {name: "dropped"}
    assert other.claim(1) == []


def test_a_clip_comes_again_after_its_delay(opened: Open) -> None:
    worker = opened()
    add(worker.catalog, 1)
    for delivery in (1, 2, 3):
        claimed = worker.claim(1)
        assert [claim.delivery for claim in claimed] == [delivery]
        retry(worker, claimed, 0.0)
    claimed, returned = worker.claim(1), time.monotonic()
    retry(worker, claimed, SHORT_S)
    assert len(worker.wait(1, WAIT_S)) == 1
    assert time.monotonic() - returned >= SHORT_S


def test_a_worker_waits_for_clips(opened: Open) -> None:
    worker, lister = opened(), opened()
    assert worker.wait(1, 0.1) == []
    thread = threading.Timer(0.1, add, (lister.catalog, 1))
    thread.start()
    assert len(worker.wait(1, WAIT_S)) == 1
    thread.join()


def test_a_clock_that_was_set_back_strands_no_clip(opened: Open) -> None:
    lost, worker = opened(), opened()
    clips = add(lost.catalog, 2)
    lost.claim(1)
    retry(worker, worker.claim(1), 60.0)
    ahead = [
        sa.update(lease).values(renewed_at=lease.c.renewed_at + 3600, expires_at=lease.c.expires_at + 3600),
        sa.update(clip).values(
            delayed_since=clip.c.delayed_since + 3600, delayed_until=clip.c.delayed_until + 3600
        ),
    ]
    transaction(worker.engine, lambda db: [db.execute(each) for each in ahead])
    transaction(worker.engine, worker.lease.beat)
    assert names(worker.claim(9)) == clips


def start(url: str, output: Path, lease_s: float, count: int, work_s: float) -> subprocess.Popen:
    arguments = [url, str(output), str(lease_s), str(count), str(work_s)]
    return subprocess.Popen([sys.executable, claim_worker.__file__, *arguments])


def test_threads_share_the_work_without_loss_or_double_delivery(
    database_url: str, opened: Open, tmp_path: Path
) -> None:
    clips = add(opened().catalog, 200)
    outputs = [tmp_path / f"{index}.txt" for index in range(4)]
    threads = [
        threading.Thread(target=claim_worker.work, args=(database_url, output, LONG_S)) for output in outputs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(deliveries(outputs)) == [(clip, 1) for clip in clips]


@pytest.mark.slow
def test_processes_share_the_work_and_one_that_is_killed_loses_nothing(
    database_url: str, opened: Open, tmp_path: Path
) -> None:
    catalog = opened().catalog
    clips = add(catalog, 400)
    outputs = [tmp_path / f"{index}.txt" for index in range(5)]
    victim = start(database_url, outputs[0], 3.0, 8, 1000.0)
    while not deliveries(outputs[:1]):
        assert victim.poll() is None
        time.sleep(0.01)
    workers = [start(database_url, output, 3.0, 8, 0.01) for output in outputs[1:]]
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert [worker.wait(HANGS_S) for worker in workers] == [0] * 4
    held = {name for name, _ in deliveries(outputs[:1])}
    assert held
    done = deliveries(outputs[1:])
    assert {name for name, _ in done} == {*clips}
    assert len({*done}) == len(done)  # a busy machine may end a lease, but no delivery is made twice
    assert held <= {name for name, delivery in done if delivery > 1}
    assert catalog.waiting_for(STAGE, BEGINNING, 1) == []


@pytest.mark.slow
def test_a_database_that_is_killed_under_load_loses_nothing(tmp_path: Path) -> None:
    server = PostgresServer()
    try:
        url = server.database()
        catalog = open_catalog(url)
        clips = add(catalog, 3000)
        outputs = [tmp_path / f"{index}.txt" for index in range(3)]
        workers = [start(url, output, 20.0, 8, 0.0) for output in outputs]
        for kill_at in (500, 1500):
            while len(deliveries(outputs)) < kill_at:
                assert all(worker.poll() is None for worker in workers)
                time.sleep(0.01)
            server.kill()
            server.start()
        assert [worker.wait(HANGS_S) for worker in workers] == [0] * 3
        assert {name for name, _ in deliveries(outputs)} == {*clips}
        assert catalog.waiting_for(STAGE, BEGINNING, 1) == []
        assert catalog.done(STAGE, clips) == dict.fromkeys(clips, "done")
        catalog.close()
    finally:
        server.stop()
