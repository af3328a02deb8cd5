"""Copies of frames to a GPU run beside its computation."""

import numpy as np
import pytest
import torch

from worldmodel.actions import Action
from worldmodel.data.staging import FrameStager
from worldmodel.episodes import Episode

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CUDA = torch.device("cuda", 0)


def test_frames_arrive_while_the_device_computes() -> None:
    clip = np.random.default_rng(0).integers(0, 256, (81, 480, 832, 3), dtype=np.uint8)
    staged = FrameStager(CUDA)([Episode("clip", (clip[:1], clip), (Action(),))])
    assert staged is not None
    assert staged.stream is not None
    assert all(each.is_pinned() for each in staged.clips)
    left = torch.randn(8192, 8192, device=CUDA)
    for _ in range(100):
        left @ left
    computed = torch.cuda.current_stream().record_event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        staged.start()
        copied = staged.stream.record_event()
        first, second = staged.take()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    copied.synchronize()
    assert not computed.query()
    np.testing.assert_array_equal(second.cpu().numpy()[0], clip)
    assert first.device == CUDA
