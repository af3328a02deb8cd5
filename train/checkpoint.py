"""Checkpoints of a run: safetensors and JSON, written beside and renamed, never over an old one."""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from worldmodel.errors import ModelError

KEEP = 2


def save(
    run: Path,
    stage: str,
    step: int,
    model: nn.Module,
    optimizers: dict[str, torch.optim.Optimizer],
    keep: bool,
) -> Path:
    """Write weights and optimizer state after `step` steps of a stage; returns the folder.

    The folder appears under its name only when it is complete. `keep` marks the end of a stage, which is
    never removed; of the others the newest `KEEP` stay.
    """
    root = run / "checkpoints"
    root.mkdir(parents=True, exist_ok=True)
    serial = 1 + max((int(p.name.split("-")[0]) for p in _complete(root)), default=0)
    final = root / f"{serial:05d}-{stage}-{step}"
    temporary = root / f".{final.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    save_file({k: v.contiguous() for k, v in _tied_once(model).items()}, temporary / "weights.safetensors")
    for name, optimizer in optimizers.items():
        save_file(_flatten(optimizer), temporary / f"{name}.safetensors")
    state = {"stage": stage, "step": step, "end_of_stage": keep}
    (temporary / "state.json").write_text(json.dumps(state), encoding="utf-8")
    for file in temporary.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    os.replace(temporary, final)
    passing = [p for p in _complete(root) if not json.loads((p / "state.json").read_text())["end_of_stage"]]
    for old in passing[:-KEEP]:
        shutil.rmtree(old)
    return final


def latest(run: Path) -> tuple[Path, dict] | None:
    """Return the newest complete checkpoint of a run and its state, or None."""
    found = _complete(run / "checkpoints")
    return (found[-1], json.loads((found[-1] / "state.json").read_text())) if found else None


def restore(folder: Path, model: nn.Module, optimizers: dict[str, torch.optim.Optimizer] | None) -> None:
    """Load weights, and optimizer state where given.

    Raises:
        ModelError: the checkpoint does not fit this model; start a new run_dir.
    """
    missing, unexpected = model.load_state_dict(load_file(folder / "weights.safetensors"), strict=False)
    tied = set(model.state_dict()) - set(_tied_once(model))
    if unexpected or set(missing) - tied:
        raise ModelError(f"The checkpoint {folder} does not fit this model; choose another train.run_dir.")
    for name, optimizer in (optimizers or {}).items():
        _unflatten(optimizer, load_file(folder / f"{name}.safetensors"))


def _complete(root: Path) -> list[Path]:
    return sorted(p for p in root.glob("[0-9]*-*-*") if (p / "state.json").is_file())


def _tied_once(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict with tensors that share storage (tied embeddings) named once."""
    seen: set[int] = set()
    state = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen or not tensor.numel():
            seen.add(tensor.data_ptr())
            state[name] = tensor
    return state


def _flatten(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    states = optimizer.state_dict()["state"]
    return {
        f"{index}.{key}": value.contiguous() if isinstance(value, Tensor) else torch.tensor(value)
        for index, state in states.items()
        for key, value in state.items()
    }


def _unflatten(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
