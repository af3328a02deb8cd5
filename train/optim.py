"""Optimizers and their schedule: Muon for the matrices of transformer layers, AdamW for everything else."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from worldmodel.config import StageConfig, TrainedConfig
from worldmodel.train.muon import Muon

Optimizers = dict[str, torch.optim.Optimizer]


def schedule(step: int, stage: StageConfig) -> float:
    """Return the factor on the peak rate: linear warm-up, constant, linear decay to 1 %."""
    if step < stage.warmup_steps:
        return (step + 1) / stage.warmup_steps
    flat = max(stage.warmup_steps, stage.constant_fraction * stage.steps)
    if step <= flat:
        return 1.0
    return 1.0 - 0.99 * (step - flat) / max(stage.steps - flat, 1)


def is_layer_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Say whether a parameter is a matrix inside a stack of transformer layers; LoRA's factors are not."""
    others = any(part == "modulation" or part.startswith("lora_") for part in name.split("."))
    return parameter.dim() == 2 and ".layers." in name and not others


def build(root: nn.Module, stage: StageConfig) -> Optimizers:
    """Make the optimizers for the parameters of `root` that require gradients.

    Parameters are named `model.COMPONENT.…`; each component may have rates of its own (`stage.train`). A
    group keeps its peak rate as `peak`.
    """
    adamw: dict[tuple[float, float], list[Tensor]] = {}
    muon: dict[float, list[Tensor]] = {}
    for name, parameter in root.named_parameters():
        if not parameter.requires_grad:
            continue
        own = component(name.removeprefix("model."), stage.train) or TrainedConfig()
        lr, muon_lr = _either(own.lr, stage.lr), _either(own.muon_lr, stage.muon_lr)
        if muon_lr and is_layer_matrix(name, parameter):
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
        optimizers["adamw"] = torch.optim.AdamW(groups, betas=(0.9, 0.98), foreach=True)
    if muon:
        optimizers["muon"] = Muon(
            [{"params": params, "lr": lr, "peak": lr} for lr, params in muon.items()],
            weight_decay=stage.weight_decay,
        )
    return optimizers


def component(name: str, train: Mapping[str, TrainedConfig]) -> TrainedConfig | None:
    """Return how the component of a parameter learns; None if it does not."""
    fitting = [given for given in train if f"{name}.".startswith(f"{given}.")]
    return train[max(fitting, key=len)] if fitting else None


def set_rates(optimizers: Optimizers, stage: StageConfig, step: int) -> None:
    """Set every group's rate for this step."""
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = schedule(step, stage) * group["peak"]


class Average:
    """An exponential moving average of the trained weights.

    After `n` updates it forgets at the rate min(decay, (1 + n) / (10 + n)), so that a short stage is not
    held back by its start.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], decay: float) -> None:
        self.decay = decay
        self.live = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        self.weights = {name: parameter.detach().clone() for name, parameter in self.live.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move towards the weights after step `step` (counted from 0)."""
        rate = 1 - min(self.decay, (1 + step) / (10 + step))
        for name, average in self.weights.items():
            average.lerp_(self.live[name].detach(), rate)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights and their average."""
        for name, average in self.weights.items():
            kept = self.live[name].detach().clone()
            self.live[name].copy_(average)
            average.copy_(kept)


def _either(own: float | None, common: float) -> float:
    return common if own is None else own
