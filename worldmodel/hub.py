"""Model folders: safetensors and JSON, one sub-folder a component, with a model card.

config.json          the WorldModelConfig, the format's version, how it was trained
backbone/            as transformers writes it, tokenizer included
codec/ vision/ …     one safetensors file each
tokens.safetensors   the learned vectors of the sequence: queries, markers, the unseen frame
README.md            the model card
"""

import importlib.resources
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from worldmodel import config as configs
from worldmodel.config import WorldModelConfig, height_width
from worldmodel.errors import ModelError, OutputError
from worldmodel.io import atomic_folder
from worldmodel.models import lora
from worldmodel.models.backbone.causal_lm import Backbone
from worldmodel.models.loading import deferred
from worldmodel.models.loading.pretrained import locate
from worldmodel.models.world_model import WorldModel

FORMAT = 1
COMPONENTS = ("codec", "vision", "action", "condition_adapter", "generator")
WEIGHTS = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def shipped_models() -> list[str]:
    """Return the names of the models inside the package."""
    root = importlib.resources.files("worldmodel").joinpath("pretrained")
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir()) if root.is_dir() else []


def resolve(name: str | Path) -> Path:
    """Find a model by the name of a shipped one or by its folder.

    Raises:
        ModelError: there is no such model, or it is not a model folder.
    """
    folder = Path(name)
    if str(name) in shipped_models():
        folder = Path(str(importlib.resources.files("worldmodel").joinpath("pretrained", str(name))))
    try:
        found = folder.is_dir()
    except OSError:  # a name longer than a path can be
        found = False
    if not found:
        raise ModelError(
            f"There is no model {str(name)!r}; pass a model folder or a shipped name "
            f"({', '.join(shipped_models()) or 'none here'})."
        )
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} has no config.json, so it is no world model; pass the folder save_pretrained made."
        )
    return folder


def from_pretrained(
    name: str | Path, revision: str | None = None, adapters: str | Path | None = None
) -> WorldModel:
    """Load a model in fp32, ready to run.

    Args:
        name: A shipped name, a model folder, or with `revision` (the 40 hex digits of a commit) the name of a
            repository on the Hugging Face Hub that holds one.
        revision: Commit of a repository.
        adapters: A folder of what LoRA learned (`worldmodel export --adapters`), added to the weights.

    Raises:
        ModelError: there is no such model, or its files are damaged, pickled or of another shape.
    """
    folder = resolve(name) if revision is None else resolve(locate(name, revision, "model"))
    pickles = sorted(p.name for p in folder.rglob("*") if p.suffix in PICKLES)
    if pickles:
        raise ModelError(
            f"{folder} holds pickled weights ({pickles[0]}), which can run code; convert to safetensors."
        )
    config = read_config(folder)
    backbone = Backbone.from_pretrained(folder / "backbone", dtype=config.backbone.dtype)
    model = WorldModel(config, backbone, folder)
    for component in COMPONENTS:
        part = getattr(model, component)
        if not hasattr(part, "save_pretrained"):  # parts of other libraries have read their files themselves
            _load(part, folder / component / WEIGHTS)
    _load(model, folder / "tokens.safetensors", own=True)
    if adapters is not None:
        lora.load(model, Path(adapters))
    return model.eval().requires_grad_(False)


def load_weights(model: WorldModel, name: str | Path) -> None:
    """Give `model` the weights of a saved model of the same shape.

    Those of parts of other libraries are left in its files, for `deferred.read`.
    """
    with deferred.weights():
        other = from_pretrained(name)
    own, theirs = model.state_dict(), other.state_dict()
    kept = {key for key, x in theirs.items() if x.is_meta and key in own and own[key].shape == x.shape}
    try:
        model.load_state_dict(theirs | {key: own[key] for key in kept})
    except RuntimeError as error:
        raise ModelError(f"{name} does not fit this config: {str(error).splitlines()[1].strip()}") from None
    for place, module in other.named_modules():
        if slices := deferred.left(module):
            deferred.leave(model.get_submodule(place), slices)


def read_config(folder: Path) -> WorldModelConfig:
    """Read a model folder's configuration."""
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ModelError(f"{folder / 'config.json'} is not readable JSON; fetch the model again.") from None
    if (
        not isinstance(values, dict)
        or values.get("format") != FORMAT
        or not isinstance(values.get("model"), dict)
    ):
        raise ModelError(
            f"{folder / 'config.json'} is not of format {FORMAT}; update worldmodel or the model."
        )
    return configs.build(WorldModelConfig, values["model"])


def save_pretrained(
    model: WorldModel,
    folder: str | Path,
    training: dict[str, Any] | None = None,
    card: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write a model folder; it appears under its name only when complete.

    Raises:
        OutputError: the place cannot be written, or holds something that is no model.
    """
    folder = Path(folder).resolve()
    if folder.is_file():
        raise OutputError(f"{folder} is a file, which saving would remove; choose a new folder.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "config.json").is_file():
        raise OutputError(
            f"{folder} holds other files than a model, which saving would remove; choose a new folder."
        )
    try:
        with atomic_folder(folder) as temporary:
            model.backbone.model.save_pretrained(
                temporary / "backbone", state_dict=_cast(model.backbone.model.state_dict(), dtype)
            )
            model.backbone.tokenizer.save_pretrained(temporary / "backbone")
            for component in COMPONENTS:
                part = getattr(model, component)
                if hasattr(part, "save_pretrained"):
                    part.save_pretrained(temporary / component, dtype)
                    continue
                (temporary / component).mkdir()
                save_file(_cast(part.state_dict(), dtype), temporary / component / WEIGHTS)
            save_file(
                _cast(dict(model.named_parameters(recurse=False)), dtype), temporary / "tokens.safetensors"
            )
            values = {"format": FORMAT, "model": configs.to_dict(model.config), "training": training}
            (temporary / "config.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
            (temporary / "README.md").write_text(
                card or plain_card(model, folder.name, training), encoding="utf-8"
            )
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OutputError(
            f"The model cannot be written to {folder}: {reason}; choose another folder."
        ) from None
    return folder


def plain_card(model: WorldModel, name: str, training: dict[str, Any] | None) -> str:
    """Write the card of a model that nobody has measured: its parts, what steers it, how it was made."""
    config = model.config
    parts = {part: getattr(model, part) for part in ("backbone", *COMPONENTS)}
    kinds = {part: type(module).__name__ for part, module in parts.items()}
    kinds["backbone"] = model.backbone.model.config.model_type
    lines = [
        "---\nlibrary_name: worldmodel\npipeline_tag: image-to-video",
        "tags:\n- world-model\n- any-to-any\n---",
        f"\n# {name}\n",
        "An any-to-any world model: text, images, video and actions in; video, images and text out.\n",
        "```python\nfrom worldmodel import WorldModel\n",
        f'session = WorldModel.from_pretrained("{name}").session(seed=0)',
        'session.reset("first_frame.png")\nframes = session.step("...")\n```\n',
        "| Part | Kind | Parameters |\n|---|---|---:|",
    ]
    for part, module in parts.items():
        count = sum(parameter.numel() for parameter in module.parameters())
        lines.append(f"| {part} | {kinds[part]} | {count / 1e6:,.1f} M |")
    height, width = height_width(config.codec.image_size)
    taken = [kind for kind, takes in config.action.takes.items() if takes]
    lines += [
        f"\nIt makes {config.chunk_frames} frames of {width} x {height} pixels a round, {config.fps} a "
        f"second, and takes {', '.join(taken) or 'no actions'}.\n",
        "## Training\n",
    ]
    stages = (training or {}).get("stages") or {}
    if stages:
        lines += ["| Stage | Objective | Steps |\n|---|---|---:|"]
        lines += [f"| {key} | {stage['objective']} | {stage['steps']} |" for key, stage in stages.items()]
        lines.append("\n`worldmodel train CONFIG`, where `training` in config.json is the resolved config.\n")
    else:
        lines.append("Not recorded.\n")
    lines.append("## Figures\n\nNone measured.\n")
    return "\n".join(lines)


def _cast(state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.detach().to(dtype).contiguous() for name, tensor in state.items()}


def _load(module: nn.Module, file: Path, own: bool = False) -> None:
    """Fill a module (or only its own parameters) from a file whose names and shapes must all fit."""
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError):
        raise ModelError(f"{file} is missing or damaged; fetch the model again.") from None
    wanted = dict(module.named_parameters(recurse=False)) if own else module.state_dict()
    for name in wanted.keys() | tensors.keys():
        if name not in tensors or name not in wanted or tensors[name].shape != wanted[name].shape:
            raise ModelError(f"{file} does not fit its config.json at {name!r}; fetch the model again.")
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(tensors[name])
