"""Child processes: whatever happens to one, its parent hears of it in time, and nothing is left behind."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from worldmodel.errors import ConfigError
from worldmodel.processes import Child, ChildError

Start = Callable[..., Child]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts children of `tests/shared/children.py`, which end with the test and leave no zombie."""
    children: list[Child] = []

    def start(name: str, *arguments: object, **options: object) -> Child:
        children.append(Child(f"children:{name}", *arguments, **options))
        return children[-1]

    yield start
    for child in children:
        child.close()
        assert not psutil.pid_exists(child.pid)


def await_end(pid: int, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"{pid} still runs"
        time.sleep(0.02)


def test_messages_arrive_in_order_and_as_they_were(start: Start) -> None:
    child = start("echo", "first", {"second": 2})
    assert child.receive(30) == ("first", {"second": 2})
    for message in (None, [1.5, "ü"], ConfigError("size is 0"), Path("a"), b""):
        child.send(message)
        back = child.receive(30)
        assert repr(back) == repr(message) and type(back) is type(message)


def test_large_arrays_are_bit_equal_in_both_directions(start: Start) -> None:
    child = start("echo")
    assert child.receive(30) == ()
    arrays = {
        "frames": np.random.default_rng(0).integers(0, 256, (64, 512, 512, 3), np.uint8),  # 48 MiB
        "empty": np.empty((0, 3), np.float32),
        "scalar": np.float64(1 / 3),
        "strided": np.arange(1000, dtype=np.int16)[::-3],
    }
    sender = threading.Thread(target=child.send, args=(arrays,))  # the child reads it all before it answers
    sender.start()
    back = child.receive(60)
    sender.join()
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)
        assert back[name].dtype == array.dtype
    assert back["frames"].flags.writeable  # received into memory of its own


def test_large_arguments(start: Start) -> None:
    array = np.ones(2**23, np.uint8)
    assert start("count", array).receive(30) == 2**23


def test_a_killed_child_is_named_with_its_signal(start: Start) -> None:
    with pytest.raises(ChildError, match=r"^was killed by SIGKILL$"):
        start("kill_itself").receive(30)


def test_a_child_that_leaves_is_named_with_its_code(start: Start) -> None:
    child = start("leave", 7)
    with pytest.raises(ChildError, match=r"^exited with code 7$"):
        child.receive(30)
    with pytest.raises(ChildError, match=r"^exited with code 7$"):
        child.send("anybody there?")
    assert not child.alive


def test_a_child_that_cannot_start_is_an_error(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ChildError, match=r"^exited with code 1$"):
        start("not_a_function").receive(30)
    assert "not_a_function" in capfd.readouterr().err


def test_a_bug_in_a_child_is_on_standard_error(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ChildError, match=r"^exited with code 1$"):
        start("fail").receive(30)
    assert "ZeroDivisionError: a bug" in capfd.readouterr().err


def test_an_error_of_the_user_is_raised_by_the_parent(start: Start) -> None:
    child = start("refuse")
    with pytest.raises(ConfigError, match=r"^size is 0; use 1 or more\.$"):
        child.receive(30)
    assert child.process.wait(10) == 2


def test_a_child_that_hangs_is_given_up_at_the_deadline(start: Start) -> None:
    child = start("hang")
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        child.receive(0.5)
    assert 0.4 < time.monotonic() - began < 5
    assert child.alive
    child.close()
    assert not child.alive


def test_bytes_now_and_then_do_not_extend_the_deadline(start: Start) -> None:
    child = start("begin_a_message", 0.1)
    began = time.monotonic()
    with pytest.raises((TimeoutError, ChildError)):
        child.receive(1.0)
    assert time.monotonic() - began < 5


def test_a_child_that_does_not_read_is_given_up_at_the_deadline(start: Start) -> None:
    child = start("hang")
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        child.send(bytes(2**24), 0.5)
    assert time.monotonic() - began < 5


def test_garbage_ends_a_child(start: Start) -> None:
    child = start("write_garbage")
    with pytest.raises(ChildError, match=r"^sent something else than a message$"):
        child.receive(30)
    assert not child.alive


def test_a_child_that_closes_its_end_is_ended(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worldmodel.processes.EXIT_S", 0.5)
    child = start("close_its_end")
    with pytest.raises(ChildError, match=r"^closed its connection$"):
        child.receive(30)
    assert not child.alive


@pytest.mark.parametrize("target", ["echo", "hang", "busy", "ignore_sigterm"])
def test_a_child_ends_with_a_parent_that_is_killed(start: Start, target: str) -> None:
    parent = start("start_another", target)
    pid = parent.receive(30)
    assert psutil.pid_exists(pid)
    os.kill(parent.pid, signal.SIGKILL)
    await_end(pid)


def test_ctrl_c_is_left_to_the_parent(start: Start) -> None:
    child = start("echo")
    child.receive(30)
    os.kill(child.pid, signal.SIGINT)
    child.send("still there")
    assert child.receive(30) == "still there"


def test_ctrl_c_does_not_end_a_child_that_is_starting(start: Start) -> None:
    children = [start("echo") for _ in range(4)]
    for child in children:  # they have not imported anything yet
        os.kill(child.pid, signal.SIGINT)
    for child in children:
        assert child.receive(60) == ()  # its arguments
        child.send("still here")
        assert child.receive(60) == "still here"


def test_a_child_may_finish_before_it_is_ended(start: Start, tmp_path: Path) -> None:
    child = start("stop_on_sigterm", str(tmp_path / "done"))
    assert child.receive(30) == "ready"
    child.close(timeout_s=20)
    assert (tmp_path / "done").read_text() == "stopped"
    assert child.process.returncode == 3


def test_a_child_that_does_not_finish_is_killed(start: Start) -> None:
    child = start("ignore_sigterm")
    assert child.receive(30) == "ready"
    began = time.monotonic()
    child.close(timeout_s=0.5)
    assert 0.4 < time.monotonic() - began < 5
    assert child.process.returncode == -signal.SIGKILL


def test_closing_wakes_a_thread_that_waits_for_the_child(start: Start) -> None:
    child, raised = start("hang"), []

    def wait() -> None:
        try:
            child.receive()
        except ChildError as error:
            raised.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.2)
    child.close()
    waiting.join(10)
    assert raised == ["was killed by SIGKILL"]


def test_the_environment_is_extended(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "1")
    child = start("variables", "KEPT", "ADDED", environment={"ADDED": "2"})
    assert child.receive(30) == ["1", "2"]


def await_text(path: Path, text: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists() or path.read_text() != text:
        assert time.monotonic() < deadline, text
        time.sleep(0.02)


def test_a_program_keeps_its_exit_code_and_is_asked_to_stop(tmp_path: Path) -> None:
    child = Child("worldmodel.processes:run_main", "children:program", [str(tmp_path / "state"), "3"])
    await_text(tmp_path / "state", "ready")
    child.process.terminate()
    assert child.process.wait(30) == 3
    assert (tmp_path / "state").read_text() == "stopped by SIGTERM"
    child.close()


def test_a_program_stops_when_its_parent_is_killed(start: Start, tmp_path: Path) -> None:
    parent = start("start_program", str(tmp_path / "state"))
    pid = parent.receive(30)
    await_text(tmp_path / "state", "ready")
    os.kill(parent.pid, signal.SIGKILL)
    await_end(pid)
    assert (tmp_path / "state").read_text() == "stopped by SIGTERM"
