"""Detection of hangs, slow processes and gradients that are not finite."""

import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)


def test_the_watchdog_ends_a_process_that_hangs() -> None:
    ended = run(
        "import threading\n"
        "from worldmodel.train.diagnostics.watchdog import Watchdog\n"
        "def wait_for_a_peer_that_never_comes():\n"
        "    threading.Event().wait()\n"
        "with Watchdog(0.5) as watchdog:\n"
        "    watchdog.beat('state step 7')\n"
        "    wait_for_a_peer_that_never_comes()\n"
    )
    assert ended.returncode == EXIT_CODE_HUNG
    assert "process 0 has made no progress for 0.5 s (state step 7)" in ended.stderr
    assert "in wait_for_a_peer_that_never_comes" in ended.stderr


def test_the_watchdog_ignores_a_process_that_makes_progress() -> None:
    ended = run(
        "import time\n"
        "from worldmodel.train.diagnostics.watchdog import Watchdog\n"
        "with Watchdog(1.0) as watchdog:\n"
        "    for step in range(8):\n"
        "        time.sleep(0.3)\n"
        "        watchdog.beat()\n"
        "time.sleep(1.5)\n"
        "print('still here')\n"
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "still here\n", "")


def test_the_watchdog_beats_while_parts_of_a_model_run() -> None:
    """Sampling of images takes longer than the limit, but each of its passes is shorter."""
    code = (
        "import time\n"
        "import torch\n"
        "from torch import nn\n"
        "from worldmodel.train.diagnostics.watchdog import Watchdog\n"
        "model = nn.Sequential(nn.Sequential(nn.Linear(1, 1)))\n"
        "with Watchdog(1.0) as watchdog:\n"
        "    with watchdog.during(model, 'sample images'):\n"
        "        for _ in range(8):\n"
        "            time.sleep(0.3)\n"
        "            model[0](torch.zeros(1))\n"
        "    assert not model[0]._forward_pre_hooks\n"
        "    print('sampled', flush=True)\n"
        "    time.sleep(3)\n"
    )
    ended = run(code)
    assert (ended.returncode, ended.stdout) == (EXIT_CODE_HUNG, "sampled\n")
    assert "(sample images)" in ended.stderr


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
