"""Identity of a model: whether two servers have the same one."""

import hashlib
import json
from dataclasses import asdict

import torch

from worldmodel.models.world_model import WorldModel

SAMPLED_VALUES = 256
"""Values of every weight that are read."""


def identify(model: WorldModel) -> str:
    """Return a digest of a model's config and weights, equal on every machine.

    It reads 256 values of each weight, spread evenly: training changes nearly all of them. LoRA adapters of
    a server do not count, since a world names its own.
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
