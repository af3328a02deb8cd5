"""A backbone by reference: its folder holds LoRA weights in the format of peft, and names the base model.

adapter_config.json         peft's settings, with the name and the revision of the base model
adapter_model.safetensors   the two factors of every layer
base.json                   where the base model is, how many layers are used, the checksums of its files

Of a base model to which nothing was added there is base.json alone.

`merging.py` makes a folder with all weights of it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
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
from worldmodel.models.loading.location import is_folder

BASE = "base.json"


@dataclass(frozen=True)
class Reference:
    """A base model and what training added to it."""

    name: str = field(compare=False)
    """Repository on the Hub, or else the name of `worldmodel download`, or an absolute path."""
    revision: str | None = field(compare=False)
    """Commit of the repository, if it is known."""
    num_layers: int
    sha256: Mapping[str, str]
    """Checksums of the base model's weights, by the names of the files."""
    factors: lora.Factors = field(default_factory=dict, repr=False, compare=False)
    folder: str | None = field(default=None, compare=False)
    """Absolute path that the base model had where the model was trained, if it was in a folder."""

    @classmethod
    def of(cls, config: BackboneConfig, factors: lora.Factors) -> "Reference":
        """Refer to the base model of a config.

        Raises:
            ModelError: the base model is missing.
        """
        assert config.pretrained, "a backbone with random weights has no base model"
        sha256 = checksums(config.pretrained, config.revision)
        name, revision, folder = _origin(config)
        return cls(name, revision, config.num_layers, sha256, factors, folder)

    @property
    def title(self) -> str:
        """The base model's name, with its commit if that is known."""
        return f"{self.name} at commit {self.revision}" if self.revision else self.name

    @property
    def places(self) -> list[tuple[str, str | None]]:
        """Names and revisions under which the base model may be found, in the order of the search."""
        found = [(self.name, self.revision)]
        return found if self.folder is None else [(self.folder, None), *found]

    def extended(self, factors: lora.Factors) -> "Reference":
        """Return a reference with further factors, for layers that were trained again."""
        both = {**self.factors}
        for name, (up, down) in factors.items():
            before = both.get(name)
            both[name] = (
                (torch.cat([before[0], up], dim=1), torch.cat([before[1], down])) if before else (up, down)
            )
        return replace(self, factors=both)

    def scaled(self, share: float) -> "Reference":
        """Return a reference to which that share of the factors was added."""
        both = {name: (share * up, down) for name, (up, down) in self.factors.items()}
        return replace(self, factors=both)

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
        return replace(self, factors=both)

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
            values.get("folder"),
        )
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{folder} is damaged ({pretrained.first_line(error)}); download the model again."
        ) from None


def _origin(config: BackboneConfig) -> tuple[str, str | None, str | None]:
    """Return the name and the commit by which others find the base model of a config, and its folder here."""
    name = str(config.pretrained)
    path = Path(name)
    if name in base_models.BASE_MODELS or not is_folder(path):
        return (str(path.resolve()) if path.is_file() else name), config.revision, None
    folder = path.resolve()
    repository, revision = config.repository, config.revision
    if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):
        # A snapshot of the Hub's cache: models--USER--NAME/snapshots/COMMIT.
        repository = repository or folder.parents[1].name.removeprefix("models--").replace("--", "/")
        revision = revision or folder.name
    elif repository and not revision:
        revision = _downloaded_commit(folder)
    return repository or str(folder), revision if repository else None, str(folder)


def _downloaded_commit(folder: Path) -> str | None:
    """Return the commit that `hf download --local-dir` wrote beside what it downloaded; None without one."""
    for file in sorted((folder / ".cache" / "huggingface" / "download").glob("*.safetensors.metadata")):
        first = file.read_text(encoding="utf-8").partition("\n")[0].strip()
        if re.fullmatch("[0-9a-f]{40}", first):
            return first
    return None


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
