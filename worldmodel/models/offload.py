"""Offloading: large parts of a model wait on the CPU while others compute."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from worldmodel.models.world_model import WorldModel

METHODS = {
    "codec": ("encode", "decode"),
    "generator": ("prefill", "prefill_chunk", "forward"),
    "text encoder": ("embed_text",),
}
"""Methods that need the weights of a part."""


class Offload:
    """Keeps the codec, the generator and its text encoder on the CPU, and the one in use on the device.

    A part stays there until another one is needed, so all steps of a chunk move it once. The backbone and the
    adapters stay on the device. Results are the same; a round takes longer by the copies.
    """

    def __init__(self, model: WorldModel, device: torch.device) -> None:
        """Take over the parts of a model on the CPU, and move what else it has to the device."""
        generator: Any = model.generator
        text = getattr(generator, "text_encoder", None)
        self.device, self._current = device, ""
        self.parts: dict[str, list[nn.Module]] = {"codec": [model.codec], "generator": generator.networks}
        """Modules of each part."""
        if text is not None:
            self.parts["text encoder"] = [text]
        waiting = {id(module) for modules in self.parts.values() for module in modules}
        rest = [module for module in model.children() if module is not generator]
        if id(generator) not in waiting:
            rest += generator.children()
        for module in rest:
            if id(module) not in waiting:
                module.to(device)
        for name, parameter in model.named_parameters(recurse=False):
            setattr(model, name, nn.Parameter(parameter.to(device), parameter.requires_grad))
        for name in self.parts:
            owner = model.codec if name == "codec" else generator
            for method in METHODS[name]:
                setattr(owner, method, self._using(name, getattr(owner, method)))

    def use(self, name: str) -> None:
        """Move a part to the device, and the one that is there to the CPU."""
        if name == self._current:
            return
        for module in self.parts.get(self._current, ()):
            module.to("cpu")
        for module in self.parts[name]:
            module.to(self.device)
        self._current = name

    def _using(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.use(name)
            return method(*args, **kwargs)

        return call
