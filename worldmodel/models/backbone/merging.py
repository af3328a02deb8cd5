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
from worldmodel.models.loading import base_models, deferred, pretrained


def resolve(folder: Path, base: str | Path | None = None) -> Path:
    """Return the folder with all weights of a backbone, merging base and factors when it is first needed.

    Args:
        folder: The backbone's folder of a model.
        base: The base model's folder; None searches where the reference says.

    Raises:
        ModelError: the base model is missing or of another checksum, or the factors do not fit it.
    """
    reference = read(folder)
    if reference is None:
        if base is not None:
            raise ModelError(
                f"{folder.parent.name} has all weights of its backbone; leave out the base {base}."
            )
        return folder
    files = [folder / BASE, *([folder / lora.WEIGHTS] if reference.factors else [])]
    key = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    merged = user_cache() / "merged" / key[:16]
    merged.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(merged.with_suffix(".lock")):  # the processes of a training run start together
        if not (merged / "config.json").is_file():
            _merge(reference, *_find(folder.parent.name, reference, base), merged)
    return merged


def _find(model: str, reference: Reference, base: str | Path | None) -> tuple[str, str | None]:
    """Return the name and revision of the base model, whose weights have the right checksums.

    Raises:
        ModelError: it is missing, or of another checksum; the message says how to get it.
    """
    missing, others = "", ""
    for name, revision in reference.places if base is None else [(str(base), None)]:
        try:
            found = checksums(name, revision)
        except ModelError as error:
            missing = str(error)
            continue
        if found == dict(reference.sha256):
            return name, revision
        others = name
    if others:
        raise ModelError(
            f"{model} was trained on other weights of {reference.title} than those in {others!r}, by their "
            f"checksums; {_remedy(reference)}."
        )
    remedy = _remedy(reference)
    more = "" if remedy in missing else f" Or {remedy}."
    raise ModelError(f"{model} needs its base language model {reference.title}. {missing}{more}")


def _remedy(reference: Reference) -> str:
    """Return how to get the base model, and how to say where it is."""
    if reference.name in base_models.BASE_MODELS:
        return f"run `worldmodel download {reference.name}`"
    here = "pass --base FOLDER (in Python base=FOLDER), which has the same weights"
    if not reference.revision:
        return here
    return (
        f"run `hf download {reference.name} --revision {reference.revision} --local-dir FOLDER`, and {here}"
    )


@torch.no_grad()
def _merge(reference: Reference, name: str, revision: str | None, target: Path) -> None:
    try:
        with deferred.loading(False):
            backbone = Backbone.from_pretrained(name, revision, "fp32", reference.num_layers)
    except ConfigError as error:
        raise ModelError(f"The base model {name!r} does not fit: {error}") from None
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
