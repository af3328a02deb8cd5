"""Merging of a backbone by reference: the base model's weights with the LoRA factors added.

It is done once, into a folder of transformers in the user's cache. Everything that reads a backbone
(training, vLLM, the model itself) reads that folder like any other.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from transformers import PreTrainedModel

from worldmodel.errors import ConfigError, ModelError
from worldmodel.io import atomic_folder, user_cache
from worldmodel.models import lora
from worldmodel.models.backbone.causal_lm import Backbone
from worldmodel.models.backbone.reference import BASE, Reference, checksums, read
from worldmodel.models.loading import deferred, pretrained


def resolve(folder: Path) -> Path:
    """Return the folder with all weights of a backbone, merging base and factors when it is first needed.

    Raises:
        ModelError: the base model is missing or of another checksum, or the factors do not fit it.
    """
    reference = read(folder)
    if reference is None:
        return folder
    files = [folder / BASE, *([folder / lora.WEIGHTS] if reference.factors else [])]
    key = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    merged = user_cache() / "merged" / key[:16]
    merged.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(merged.with_suffix(".lock")):  # the processes of a training run start together
        if not (merged / "config.json").is_file():
            _check(folder, reference)
            _merge(reference, merged)
    return merged


def _check(folder: Path, reference: Reference) -> None:
    try:
        found = checksums(reference.name, reference.revision)
    except ModelError as error:
        raise ModelError(f"{folder.parent.name} needs its base language model. {error}") from None
    if found != dict(reference.sha256):
        raise ModelError(
            f"{folder.parent.name} was trained on other weights of {reference.name!r} than those here, by "
            "their checksums; get those."
        )


@torch.no_grad()
def _merge(reference: Reference, target: Path) -> None:
    try:
        with deferred.loading(False):
            backbone = Backbone.from_pretrained(
                reference.name, reference.revision, "fp32", reference.num_layers
            )
    except ConfigError as error:
        raise ModelError(f"The base model {reference.name!r} does not fit: {error}") from None
    model: Any = backbone.model
    add(model, reference.factors)
    with atomic_folder(target) as temporary:
        model.to(torch.bfloat16).save_pretrained(temporary)
        backbone.tokenizer.save_pretrained(temporary)


@torch.no_grad()
def add(model: PreTrainedModel, factors: lora.Factors) -> None:
    """Add the products of factors to the weights of a model, in place.

    Raises:
        ModelError: a layer does not exist, or has another shape.
    """
    for name, (up, down) in factors.items():
        try:
            weight: Any = model.get_submodule(name).weight
            weight += (up.float() @ down.float()).to(weight.dtype)
        except (AttributeError, RuntimeError) as error:
            raise ModelError(
                f"The factors of {name} do not fit the base model: {pretrained.first_line(error)}"
            ) from None
