"""Optimizers of a stage: Muon for matrices of transformer layers and AdamW for the rest, or a user's own."""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from worldmodel.config import StageConfig, TrainedConfig
from worldmodel.config.imports import check_arguments, find_extension
from worldmodel.errors import ConfigError
from worldmodel.train.components import settings_of
from worldmodel.train.distributed import STACKS
from worldmodel.train.optim.muon import Muon

Optimizers = dict[str, torch.optim.Optimizer]
Named = tuple[str, nn.Parameter]
"""A parameter with its name in the model or the objective."""


def build_optimizers(
    root: nn.Module, stage: StageConfig, muon_dtype: torch.dtype = torch.bfloat16
) -> Optimizers:
    """Build the optimizers of a stage for the parameters of `root` that require gradients.

    Args:
        root: The model and its objective; `stage.train` may set the learning rates of a component.
        stage: Settings of the stage.
        muon_dtype: Data type of Muon's products.

    Raises:
        ConfigError: a user's optimizer cannot be built.
    """
    return optimizers_for(trained_parameters(root), stage, muon_dtype)


def trained_parameters(root: nn.Module) -> list[Named]:
    """Return the parameters of `root` that require gradients; those of its model without `model.`."""
    return [
        (name.removeprefix("model."), parameter)
        for name, parameter in root.named_parameters()
        if parameter.requires_grad
    ]


def optimizers_for(trained: list[Named], stage: StageConfig, muon_dtype: torch.dtype) -> Optimizers:
    """Build the optimizers of a stage for these parameters.

    Each parameter group stores its peak learning rate as `peak`, which the schedule multiplies.

    Raises:
        ConfigError: a user's optimizer cannot be built.
    """
    build = optimizer_of(stage)
    if build is muon_and_adamw:
        return muon_and_adamw(trained, stage, muon_dtype)
    if isinstance(build, type):
        built: Any = build(groups_by_rate(trained, stage), **stage.optimizer_args)
    else:
        built = build(trained, stage, **stage.optimizer_args)
    optimizers: Optimizers = built if isinstance(built, dict) else {"optimizer": built}
    for optimizer in optimizers.values():
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer is {stage.optimizer!r}, which returns a {type(optimizer).__name__}; let it "
                "return a torch.optim.Optimizer, or a dictionary of several by name."
            )
        for group in optimizer.param_groups:
            group.setdefault("peak", group["lr"])
    return optimizers


def optimizer_of(stage: StageConfig) -> Callable[..., Any]:
    """Return what builds the optimizers of a stage: built in, of an entry point, or of MODULE:NAME.

    A class of torch.optim.Optimizer gets parameter groups with their rates and weight decay; a function gets
    the named parameters and the stage.

    Raises:
        ConfigError: it cannot be imported or called, or does not take `optimizer_args`.
    """
    found = find_extension("optimizer", stage.optimizer, "worldmodel.optimizers", OPTIMIZERS)
    if not callable(found) or (isinstance(found, type) and not issubclass(found, torch.optim.Optimizer)):
        raise ConfigError(
            f"optimizer is {stage.optimizer!r}, which is not a subclass of torch.optim.Optimizer or a "
            "function that builds one; give one of these."
        )
    check_arguments("optimizer_args", found, 1 if isinstance(found, type) else 2, stage.optimizer_args)
    return found


def rates_of(name: str, parameter: nn.Parameter, stage: StageConfig) -> tuple[float, float]:
    """Return the peak learning rates of a parameter of the model for AdamW and for Muon; one of them is 0.

    Muon trains weight matrices of transformer layers, those of diffusers included, and factors of LoRA where
    the component has a `muon_lr` of its own.
    """
    settings = settings_of(name, stage.train) or TrainedConfig()
    muon_lr = stage.muon_lr if settings.muon_lr is None else settings.muon_lr
    parts = name.split(".")
    layer = any(stack in STACKS and index.isdigit() for stack, index in pairwise(parts))
    # Not the tables and matrices by which a generator modulates its norms.
    modulates = any(part == "modulation" or part.startswith("norm") for part in parts)
    matrix = parameter.dim() == 2 and layer and parts[-1] == "weight" and not modulates
    by_muon = matrix and (settings.muon_lr is not None or not any(part.startswith("lora_") for part in parts))
    if muon_lr and by_muon:
        return 0.0, muon_lr
    return stage.lr if settings.lr is None else settings.lr, 0.0


def learning_rates(root: nn.Module, optimizers: Optimizers) -> dict[str, float]:
    """Return the present rates of each part of `root`, by name for metrics: the highest of its groups."""
    parts = {id(parameter): name.split(".")[0] for name, parameter in trained_parameters(root)}
    rates: dict[str, float] = {}
    for kind, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            for part in {parts[id(parameter)] for parameter in group["params"]}:
                name = f"{'muon_lr' if kind == 'muon' else 'lr'}/{part}"
                rates[name] = max(rates.get(name, 0.0), group["lr"])
    return rates


def muon_and_adamw(
    parameters: Iterable[Named], stage: StageConfig, muon_dtype: torch.dtype = torch.bfloat16
) -> Optimizers:
    """Build Muon for matrices of transformer layers, and AdamW for the rest."""
    rest: list[Named] = []
    matrices: dict[float, list[nn.Parameter]] = {}
    for name, parameter in parameters:
        _, muon_lr = rates_of(name, parameter, stage)
        if muon_lr:
            matrices.setdefault(muon_lr, []).append(parameter)
        else:
            rest.append((name, parameter))
    optimizers: Optimizers = {}
    if rest:
        # Fused kernels update all weights in one launch, but only on CUDA; `foreach` is the next best.
        fused = all(parameter.is_cuda for _, parameter in rest)
        optimizers["adamw"] = torch.optim.AdamW(
            groups_by_rate(rest, stage), betas=stage.betas, fused=fused, foreach=not fused
        )
    if matrices:
        optimizers["muon"] = Muon(
            [{"params": params, "lr": lr, "peak": lr} for lr, params in matrices.items()],
            weight_decay=stage.weight_decay,
            dtype=muon_dtype,
        )
    return optimizers


def groups_by_rate(parameters: Iterable[Named], stage: StageConfig) -> list[dict[str, Any]]:
    """Return parameter groups of equal learning rate and weight decay; vectors are not decayed."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in parameters:
        settings = settings_of(name, stage.train)
        lr = stage.lr if settings is None or settings.lr is None else settings.lr
        decay = stage.weight_decay if parameter.dim() > 1 else 0.0
        groups.setdefault((lr, decay), []).append(parameter)
    return [
        {"params": params, "lr": lr, "peak": lr, "weight_decay": decay}
        for (lr, decay), params in groups.items()
    ]


OPTIMIZERS: dict[str, Callable[..., Any]] = {"muon": muon_and_adamw}
