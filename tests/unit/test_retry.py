"""Pauses between attempts."""

import time
from email.utils import formatdate

import pytest

from worldmodel.retry import Backoff, retry_after


def test_pauses_double_up_to_the_longest_and_are_random() -> None:
    assert len({Backoff(1.0, 8.0).pause_s() for _ in range(50)}) > 10
    backoff = Backoff(1.0, 8.0)
    for longest in (1.0, 2.0, 4.0, 8.0, *[8.0] * 2000):
        pause_s = backoff.pause_s()
        assert pause_s is not None and longest / 2 <= pause_s <= longest


def test_the_number_of_retries_is_kept() -> None:
    backoff = Backoff(0.0, 1.0, retries=2)
    assert [backoff.pause_s() for _ in range(4)] == [0.0, 0.0, None, None]
    assert Backoff(0.0, 1.0, retries=0).pause_s() is None


def test_no_attempt_follows_one_that_fails_after_the_time() -> None:
    backoff = Backoff(0.0, 1.0, timeout_s=0.2)
    assert backoff.pause_s() == 0.0
    time.sleep(0.3)
    assert backoff.pause_s() is None


def test_a_longer_wait_that_is_asked_for_is_kept_up_to_the_longest() -> None:
    assert Backoff(1.0, 60.0).pause_s(30.0) == 30.0
    assert Backoff(1.0, 60.0).pause_s(1e18) == 60.0
    pause_s = Backoff(1.0, 60.0).pause_s(0.1)
    assert pause_s is not None and pause_s >= 0.5


def test_the_header_has_seconds_or_a_date() -> None:
    later = formatdate(time.time() + 100, usegmt=True)
    assert retry_after(later) == pytest.approx(100, abs=2)
    assert retry_after(formatdate(0, usegmt=True), default=7.0) == 0.0
    for wrong in ("", "soon", "-5", "1" * 5000, "Mon, 99 Jan 2024 00:00:00 GMT"):
        assert retry_after(wrong) == 0.0
        assert retry_after(wrong, default=7.0) == 7.0
    assert [retry_after(each) for each in ("30", " 0.5 ", "0")] == [30.0, 0.5, 0.0]
