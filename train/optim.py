"""Optimizers and their schedule: Muon for the matrices of transformer blocks, AdamW for everything else."""

import torch
from torch import nn

from worldmodel.config import StageConfig


def schedule(step: int, stage: StageConfig) -> float:
    """Return the factor on the peak rate: linear warm-up, constant, linear decay to 1 %."""
    if step < stage.warmup_steps:
        return (step + 1) / stage.warmup_steps
    flat = max(stage.warmup_steps, stage.constant_fraction * stage.steps)
    if step <= flat:
        return 1.0
    return 1.0 - 0.99 * (step - flat) / max(stage.steps - flat, 1)


def is_block_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Say whether a parameter is a matrix inside a stack of transformer layers."""
    return parameter.dim() == 2 and ".layers." in name and "modulation" not in name


def build(model: nn.Module, stage: StageConfig) -> dict[str, torch.optim.Optimizer]:
    """Make the optimizers for the parameters that require gradients.

    Source: Jordan et al. 2024 for Muon; its scale factor is the original one, sqrt(max(1, rows / columns)).
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in trained if stage.muon_lr and is_block_matrix(name, p)]
    chosen = {id(p) for p in matrices}
    rest = [(name, p) for name, p in trained if id(p) not in chosen]
    decayed = [p for _, p in rest if p.dim() > 1]
    plain = [p for _, p in rest if p.dim() <= 1]
    optimizers: dict[str, torch.optim.Optimizer] = {
        "adamw": torch.optim.AdamW(
            [{"params": decayed, "weight_decay": stage.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=stage.lr,
            betas=(0.9, 0.98),
            foreach=True,
        )
    }
    if matrices:
        optimizers["muon"] = torch.optim.Muon(
            matrices,
            lr=stage.muon_lr,
            weight_decay=stage.weight_decay,
            momentum=0.95,
            adjust_lr_fn="original",
        )
    return optimizers


def set_rates(optimizers: dict[str, torch.optim.Optimizer], stage: StageConfig, step: int) -> float:
    """Set every group's rate for this step; return the factor."""
    factor = schedule(step, stage)
    for name, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            group["lr"] = factor * (stage.muon_lr if name == "muon" else stage.lr)
    return factor
