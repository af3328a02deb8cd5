"""Models prepared for exact comparisons of gradients."""

from typing import Any

from torch import nn

from worldmodel.models.layers.norm import RMSNorm


def fill_zeros(model: nn.Module, std: float = 0.1) -> None:
    """Draw the parameters that are zero before training, which would hide errors behind them."""
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=std)


def in_fp64(model: nn.Module) -> None:
    """Convert to fp64, also the norms of transformers, which compute in fp32."""
    for parent in list(model.modules()):
        named: list[tuple[str, Any]] = list(parent.named_children())
        for name, child in named:
            if type(child).__module__.startswith("transformers") and type(child).__name__.endswith("RMSNorm"):
                norm: Any = RMSNorm(len(child.weight))
                norm.weight, norm.eps = child.weight, child.variance_epsilon
                setattr(parent, name, norm)
    model.double()
