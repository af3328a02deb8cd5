"""Detection of hangs, slow processes and gradients that are not finite."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from worldmodel.data.loader import Batch
from worldmodel.errors import ConfigError
from worldmodel.parallel.mesh import Mesh
from worldmodel.train.diagnostics.timing import computing
from worldmodel.train.diagnostics.watchdog import (
    EXIT_CODE_HUNG,
    StragglerDetector,
    Watchdog,
    check_finite,
    slowdowns,
)


def run(function: Callable[[], None], folder: Path) -> tuple[int, str, str]:
    """Call a function in a fork of this process; returns its exit status and what it wrote.

    A process of its own would first import torch.
    """
    out, err = folder / "out", folder / "err"
    child = os.fork()
    if not child:
        signal.alarm(120)
        for path, descriptor in ((out, 1), (err, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
        try:
            function()
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), out.read_text(), err.read_text()


def wait_for_a_peer_that_never_comes() -> None:
    threading.Event().wait()


def test_the_watchdog_ends_a_process_that_hangs(tmp_path: Path) -> None:
    def hang() -> None:
        with Watchdog(0.5) as watchdog:
            watchdog.beat("state step 7")
            wait_for_a_peer_that_never_comes()

    status, _, err = run(hang, tmp_path)
    assert status == EXIT_CODE_HUNG
    assert "process 0 has made no progress for 0.5 s (state step 7)" in err
    assert "in wait_for_a_peer_that_never_comes" in err


def test_the_watchdog_ignores_a_process_that_makes_progress(tmp_path: Path) -> None:
    def work() -> None:
        with Watchdog(1.0) as watchdog:
            for _ in range(8):
                time.sleep(0.3)
                watchdog.beat()
        time.sleep(1.5)
        os.write(1, b"still here")

    assert run(work, tmp_path) == (0, "still here", "")


def test_the_watchdog_beats_while_parts_of_a_model_run(tmp_path: Path) -> None:
    """Sampling of images takes longer than the limit, but each of its passes is shorter."""

    def sample() -> None:
        model = nn.Sequential(nn.Sequential(nn.Linear(1, 1)))
        with Watchdog(1.0) as watchdog:
            with watchdog.during(model, "sample images"):
                for _ in range(8):
                    time.sleep(0.3)
                    model[0](torch.zeros(1))
            assert not model[0]._forward_pre_hooks
            os.write(1, b"sampled")
            time.sleep(3)

    status, out, err = run(sample, tmp_path)
    assert (status, out) == (EXIT_CODE_HUNG, "sampled")
    assert "(sample images)" in err


def test_the_watchdog_stops_with_its_block() -> None:
    began = time.perf_counter()
    with pytest.raises(KeyError), Watchdog(60) as watchdog:
        raise KeyError
    assert not watchdog.thread.is_alive()
    assert time.perf_counter() - began < 5


@given(st.lists(st.floats(0.5, 2.0), min_size=3, max_size=64), st.data())
def test_a_slow_process_has_the_largest_slowdown(seconds: list[float], data: st.DataObject) -> None:
    scores = slowdowns(seconds)
    assert min(scores) <= 1 <= max(scores)
    slow = data.draw(st.integers(0, len(seconds) - 1))
    seconds[slow] = 1000.0
    scores = slowdowns(seconds)
    assert max(scores) == scores[slow] > 100
    assert sorted(scores[:slow] + scores[slow + 1 :])[len(scores) // 3] <= 1


def test_a_single_process_is_never_slow() -> None:
    stragglers = StragglerDetector(Mesh(), window=2, patience=1)
    for _ in range(4):
        with computing(torch.device("cpu")) as computed:
            pass
        assert stragglers.step(computed) == {}


def batch(*indices: int) -> Batch:
    return Batch(step=12, task="rounds", indices=indices, episodes=[])


def test_a_gradient_that_is_not_finite_is_reported_with_its_samples() -> None:
    norm = torch.tensor(1.5)
    check_finite(norm, "state", 12, [batch(96, 97)], Mesh())
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ConfigError) as caught:
            check_finite(torch.tensor(bad), "state", 12, [batch(96, 97), batch(98)], Mesh())
        message = str(caught.value)
        assert "'state'" in message and "step 12" in message
        assert "samples 96, 97, 98" in message
        assert "stages.state.lr" in message
        assert "\n" not in message


def test_long_lists_of_samples_are_shortened() -> None:
    many = [batch(*range(start, start + 5)) for start in range(0, 40, 5)]
    with pytest.raises(ConfigError, match=r"0, 1, 2, 3, 4, 5, 6, 7 and 32 more"):
        check_finite(torch.tensor(float("nan")), "state", 0, many, Mesh())
