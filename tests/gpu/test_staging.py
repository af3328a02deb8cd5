"""Checkpoints of tensors on a GPU: copied to pinned memory while the next step runs."""

from pathlib import Path

import pytest
import torch
from torch import nn

from worldmodel.train.checkpoint.checkpointer import Checkpoints, load, module_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_checkpoint_has_the_weights_of_its_step(tmp_path: Path) -> None:
    net = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).cuda()
    expected = {name: tensor.cpu().clone() for name, tensor in module_state(net).items()}
    with Checkpoints(tmp_path) as checkpoints:
        for number in range(2):  # the second copy goes to the same pinned memory
            saved = checkpoints.save(f"step-{number}", module_state(net), {})
            busy = torch.randn(4096, 4096, device="cuda")
            for _ in range(20):  # on the stream of the step
                busy = busy @ busy * 1e-3
            checkpoints.wait_until_staged()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(1)
            found = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
            load(saved.result(), found)
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
            expected = {name: tensor + 1 for name, tensor in expected.items()}
