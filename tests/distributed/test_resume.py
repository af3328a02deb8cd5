"""A training run whose processes are killed gives exactly the results of an undisturbed run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "resume.py"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes to kill in /proc")
def test_killed_processes_do_not_change_results() -> None:
    """Two kills of the benchmark's twenty: one while a checkpoint is written, one at any time."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--kills", "2"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "processes killed        2 (" in done.stdout
    assert "differences             0" in done.stdout
