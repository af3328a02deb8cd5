"""Times on a GPU are those of its stream, not those of the process."""

import time

import pytest
import torch

from worldmodel.train.diagnostics.timing import Phases, computing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CUDA = torch.device("cuda", 0)


def busy(seconds: float) -> None:
    """Keep the stream busy; returns at once."""
    size = 4096
    left = torch.randn(size, size, device=CUDA)
    phases = Phases(CUDA)
    phases.begin("product")
    left @ left
    phases.begin("end")
    for _ in range(int(seconds / phases.take()["product"])):
        left @ left


def test_computation_is_that_of_the_stream() -> None:
    busy(0.1)
    torch.cuda.synchronize()
    began = time.process_time()
    with computing(CUDA) as computed:
        busy(0.3)
    assert 0.2 < computed.seconds() < 0.6
    with computing(CUDA) as computed:
        while time.process_time() - began < 0.5:  # a process that waits for others spins
            pass
    assert computed.seconds() < 0.6


def test_phases_do_not_wait_for_the_device() -> None:
    phases = Phases(CUDA)
    torch.cuda.set_sync_debug_mode("error")
    try:
        phases.begin("forward")
        phases.begin("backward")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert set(phases.take()) == {"forward"}
