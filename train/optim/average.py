"""Copies and moving averages of the trained weights."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from worldmodel.train.distributed import to_local


class WeightCopy:
    """A copy of the trained weights, which can take their place."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.trained = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        self.weights = {name: parameter.detach().clone() for name, parameter in self.trained.items()}

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights and their copy."""
        for name, copied in self.weights.items():
            kept = self.trained[name].detach().clone()
            self.trained[name].copy_(copied)
            copied.copy_(kept)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Compute with the copy in a block."""
        self.swap()
        try:
            yield
        finally:
            self.swap()


class EMA(WeightCopy):
    """An exponential moving average of the trained weights.

    After `n` updates the decay is min(decay, (1 + n) / (10 + n)), so that early weights do not dominate the
    average of a short stage.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], decay: float) -> None:
        super().__init__(parameters)
        self.decay = decay

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the weights after step `step` (counted from 0)."""
        average = get_ema_multi_avg_fn(min(self.decay, (1 + step) / (10 + step)))
        averages = [to_local(weight) for weight in self.weights.values()]
        average(averages, [to_local(self.trained[name].detach()) for name in self.weights], None)
