"""The error of a device without enough memory: what ran, and which setting to change."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from worldmodel.errors import ConfigError
from worldmodel.train.diagnostics.timing import Phases


@contextmanager
def explain_out_of_memory(
    stage: str, root: nn.Module | None = None, phases: Phases | None = None
) -> Iterator[None]:
    """Turn an out-of-memory error within the block into one sentence.

    Args:
        stage: Name of the stage.
        root: Its modules; None while they are built.
        phases: The phases of its steps.

    Raises:
        ConfigError: the device has too little memory; the message names the module or the phase.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        phase = phases.current if phases else "loading of the weights"
        module = _innermost(root, error) if root else None
        place = f"{module} ({phase})" if module else f"the {phase}"
        if phase in ("prepare", "forward", "backward"):
            remedy = (
                f"lower stages.{stage}.microbatch_size, set activations to recompute or offload, or share "
                "sequences by mesh.sp"
            )
        else:
            remedy = "share the weights over more GPUs (mesh.dp_shard), or train fewer of them (lora_rank)"
        raise ConfigError(
            f"The device ran out of memory in {place} of stage {stage!r}; {remedy}; "
            "`worldmodel info --plan CONFIG` estimates what a step needs."
        ) from None


def _innermost(root: nn.Module, error: BaseException) -> str | None:
    """Return the name of the innermost module of `root` that was called when the error was raised."""
    names = {id(module): name.removeprefix("model.") for name, module in root.named_modules()}
    found = None
    trace = error.__traceback__
    while trace is not None:
        found = names.get(id(trace.tb_frame.f_locals.get("self"))) or found
        trace = trace.tb_next
    return found
