"""Identity of what a server plays worlds with: whether another one plays on with the same frames."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import torch

from worldmodel.models.world_model import WorldModel

SAMPLED_VALUES = 256
"""Values of every weight that are read."""


@dataclass(frozen=True)
class Identity:
    """Digests of a model and of its adapters."""

    model: str
    adapters: Mapping[str, str] = field(default_factory=dict)
    """By name."""

    def of(self, adapter: str | None) -> str:
        """Return the digest of the model together with one of its adapters."""
        return self.model if adapter is None else f"{self.model} {self.adapters.get(adapter)}"


def identify(model: WorldModel) -> str:
    """Return a digest of a model's config and weights, equal on every machine.

    It reads 256 values of each weight, spread evenly: training changes nearly all of them. LoRA adapters of
    a server do not count, see `Adapters.digests`.
    """
    digest = hashlib.sha256(json.dumps(asdict(model.config), sort_keys=True, default=str).encode())
    for name, tensor in sorted(
        (name.replace(".base_layer", ""), tensor)
        for name, tensor in model.state_dict().items()
        if ".lora_" not in name
    ):
        values = tensor.detach().flatten()
        chosen = torch.linspace(0, len(values) - 1, min(SAMPLED_VALUES, len(values)), dtype=torch.float64)
        taken = values[chosen.round().long().to(values.device)].cpu().view(torch.uint8)
        digest.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode() + taken.numpy().tobytes())
    return digest.hexdigest()
