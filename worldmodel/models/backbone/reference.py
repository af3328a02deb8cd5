"""A backbone by reference: its folder holds LoRA weights in the format of peft, and names the base model.

adapter_config.json         peft's settings, with the name and the revision of the base model
adapter_model.safetensors   the two factors of every layer
base.json                   how many layers of the base model are used, and the checksums of its files

Of a base model to which nothing was added there is base.json alone.

`merging.py` makes a folder with all weights of it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from worldmodel.config import BackboneConfig
from worldmodel.errors import ModelError
from worldmodel.models import lora
from worldmodel.models.loading import base_models, pretrained

BASE = "base.json"


@dataclass(frozen=True)
class Reference:
    """A base model and what training added to it."""

    name: str
    revision: str | None
    num_layers: int
    sha256: Mapping[str, str]
    """Checksums of the base model's weights, by the names of the files."""
    factors: lora.Factors = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, config: BackboneConfig, factors: lora.Factors) -> "Reference":
        """Refer to the base model of a config.

        Raises:
            ModelError: the base model is missing.
        """
        assert config.pretrained, "a backbone with random weights has no base model"
        return cls(
            config.pretrained,
            config.revision,
            config.num_layers,
            checksums(config.pretrained, config.revision),
            factors,
        )

    def extended(self, factors: lora.Factors) -> "Reference":
        """Return a reference with further factors, for layers that were trained again."""
        both = {**self.factors}
        for name, (up, down) in factors.items():
            before = both.get(name)
            both[name] = (
                (torch.cat([before[0], up], dim=1), torch.cat([before[1], down])) if before else (up, down)
            )
        return Reference(self.name, self.revision, self.num_layers, self.sha256, both)

    def scaled(self, share: float) -> "Reference":
        """Return a reference to which that share of the factors was added."""
        both = {name: (share * up, down) for name, (up, down) in self.factors.items()}
        return Reference(self.name, self.revision, self.num_layers, self.sha256, both)

    def reduced(self, rank: int) -> "Reference":
        """Return the nearest reference of a rank: factors of several stages have the sum of their ranks.

        Source: Eckart and Young 1936: the largest singular values are the best approximation of a rank.
        """
        both = {}
        for name, (up, down) in self.factors.items():
            (left, high), (right, low) = torch.linalg.qr(up.float()), torch.linalg.qr(down.float().T)
            u, s, v = torch.linalg.svd(high @ low.T, full_matrices=False)
            root = s[:rank].sqrt()
            both[name] = left @ u[:, :rank] * root, root[:, None] * (right @ v.T[:, :rank]).T
        return Reference(self.name, self.revision, self.num_layers, self.sha256, both)

    def save(self, folder: Path, dtype: torch.dtype | None) -> None:
        """Write the files of the module's description; the tokenizer is the base model's."""
        folder.mkdir()
        values = {key: value for key, value in asdict(self).items() if key != "factors"}
        (folder / BASE).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        if not self.factors:
            return
        rank = max(down.shape[0] for _, down in self.factors.values())
        layers = sorted({name.rpartition(".")[2] for name in self.factors})
        config = LoraConfig(
            r=rank,
            lora_alpha=rank,  # the scale is in the factors
            target_modules=layers,
            base_model_name_or_path=self.name,
            revision=self.revision,
            inference_mode=True,
            task_type="CAUSAL_LM",
        )
        config.target_modules = layers
        config.save_pretrained(str(folder))
        weights: dict[str, Tensor] = {}
        for name, (up, down) in self.factors.items():
            missing = rank - down.shape[0]  # peft's settings have one rank for all layers
            weights[f"{lora.PREFIX}{name}.lora_A.weight"] = F.pad(down, (0, 0, 0, missing))
            weights[f"{lora.PREFIX}{name}.lora_B.weight"] = F.pad(up, (0, missing))
        save_file(pretrained.cast(weights, dtype), folder / lora.WEIGHTS)


def read(folder: Path) -> Reference | None:
    """Read the reference in a backbone's folder; None where the folder holds all weights.

    Raises:
        ModelError: a file is damaged.
    """
    if not (folder / BASE).is_file():
        return None
    values = pretrained.read_json(folder, BASE)
    try:
        stored = load_file(folder / lora.WEIGHTS) if (folder / lora.CONFIG).is_file() else {}
        names = [name.removesuffix(".lora_A.weight") for name in stored if name.endswith(".lora_A.weight")]
        factors = {
            name.removeprefix(lora.PREFIX): (stored[f"{name}.lora_B.weight"], stored[f"{name}.lora_A.weight"])
            for name in names
        }
        return Reference(
            str(values["name"]),
            values["revision"],
            int(values["num_layers"]),
            dict(values["sha256"]),
            factors,
        )
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{folder} is damaged ({pretrained.first_line(error)}); download the model again."
        ) from None


def checksums(name: str, revision: str | None) -> dict[str, str]:
    """Return the checksums of a base model: of the file that it was converted from, or of its weights.

    Raises:
        ModelError: the base model is missing, or has changed since it was converted.
    """
    converted = base_models.find(name)
    if converted is not None:
        base_models.verify(converted)
        base = base_models.BASE_MODELS.get(name)
        file = Path(base.member if base else name)
        return {file.name: base.file_sha256 if base else base_models.sha256(file)}
    return base_models.checksums(pretrained.resolve_folder(name, revision, "backbone"))
