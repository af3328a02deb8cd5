"""Optimizers and learning-rate schedule: Muon for matrices of transformer layers, AdamW for the rest."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from worldmodel.config import StageConfig, TrainedConfig
from worldmodel.train.components import settings_of
from worldmodel.train.distributed import to_local
from worldmodel.train.muon import Muon

Optimizers = dict[str, torch.optim.Optimizer]


def lr_factor(step: int, stage: StageConfig) -> float:
    """Return the factor on the peak learning rate: linear warm-up, constant, linear decay to 1 %."""
    if step < stage.warmup_steps:
        return (step + 1) / stage.warmup_steps
    flat = max(stage.warmup_steps, stage.constant_fraction * stage.steps)
    if step <= flat:
        return 1.0
    return 1.0 - 0.99 * (step - flat) / max(stage.steps - flat, 1)


def rates_of(name: str, parameter: nn.Parameter, stage: StageConfig) -> tuple[float, float]:
    """Return the peak learning rates of a parameter of the model for AdamW and for Muon; one of them is 0.

    Muon trains weight matrices of transformer layers, and factors of LoRA where the component has a `muon_lr`
    of its own.
    """
    settings = settings_of(name, stage.train) or TrainedConfig()
    lr = stage.lr if settings.lr is None else settings.lr
    muon_lr = stage.muon_lr if settings.muon_lr is None else settings.muon_lr
    parts = name.split(".")
    matrix = parameter.dim() == 2 and "layers" in parts and "modulation" not in parts
    by_muon = matrix and (settings.muon_lr is not None or not any(part.startswith("lora_") for part in parts))
    return (0.0, muon_lr) if muon_lr and by_muon else (lr, 0.0)


def build_optimizers(
    root: nn.Module, stage: StageConfig, muon_dtype: torch.dtype = torch.bfloat16
) -> Optimizers:
    """Build the optimizers for the parameters of `root` that require gradients.

    Parameters are named `model.COMPONENT.…`; `stage.train` may set the learning rates of a component. Each
    parameter group stores its peak learning rate as `peak`. Muon computes its products in `muon_dtype`.
    """
    adamw: dict[tuple[float, float], list[Tensor]] = {}
    muon: dict[float, list[Tensor]] = {}
    for name, parameter in root.named_parameters():
        if not parameter.requires_grad:
            continue
        lr, muon_lr = rates_of(name.removeprefix("model."), parameter, stage)
        if muon_lr:
            muon.setdefault(muon_lr, []).append(parameter)
        else:
            decay = stage.weight_decay if parameter.dim() > 1 else 0.0
            adamw.setdefault((lr, decay), []).append(parameter)
    optimizers: Optimizers = {}
    if adamw:
        groups = [
            {"params": params, "lr": lr, "peak": lr, "weight_decay": decay}
            for (lr, decay), params in adamw.items()
        ]
        fused = all(parameter.is_cuda for params in adamw.values() for parameter in params)
        optimizers["adamw"] = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=fused, foreach=not fused)
    if muon:
        optimizers["muon"] = Muon(
            [{"params": params, "lr": lr, "peak": lr} for lr, params in muon.items()],
            weight_decay=stage.weight_decay,
            dtype=muon_dtype,
        )
    return optimizers


def set_learning_rates(optimizers: Optimizers, stage: StageConfig, step: int) -> None:
    """Set the learning rate of every parameter group for a step."""
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = lr_factor(step, stage) * group["peak"]


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
