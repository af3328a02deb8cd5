"""Adapters of a model, of which every request chooses one."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from worldmodel.models import lora


class Adapters:
    """Adapters beside the weights of a model: LoRA of any of its components, and weights trained whole.

    Outside of `using` the model is as it was. Calls with different adapters cannot share a pass.
    """

    def __init__(
        self, model: nn.Module, folders: Mapping[str, Path] | None = None, elsewhere: Collection[str] = ()
    ) -> None:
        """Attach adapters, unmerged.

        Args:
            model: The model, whose layers are replaced by peft's.
            folders: Folders of `worldmodel export --adapters`, or of peft for the backbone alone, by name.
            elsewhere: Components that do not run in this process, and get no adapters here.

        Raises:
            ModelError: a folder has no adapter, or it does not fit the model.
        """
        folders = dict(folders or {})
        self.names = tuple(folders)
        """Names by which requests choose."""
        self.digests: dict[str, str] = {}
        """Digests of their files by name."""
        self.folders: dict[str, dict[str, Path]] = {}
        """Folders of peft by component and name."""
        self._names: dict[str, tuple[str, ...]] = {}
        self._whole: dict[str, list[tuple[nn.Module, str, nn.Parameter]]] = {}
        for name, folder in folders.items():
            weights = lora.read_whole(model, folder, elsewhere)  # before the layers get other names
            self._names[name] = tuple(weights)
            self._whole[name] = [_place(model, key, parameter) for key, parameter in weights.items()]
            found = lora.parts(model, folder)
            self.digests[name] = lora.digest(folder, found)
            for component, path in found.items():
                self.folders.setdefault(component, {})[name] = path
        self._lora: list[Any] = []
        for component, paths in self.folders.items():
            if component in elsewhere:
                continue
            layers = lora.attach(lora.root_of(model, component), paths).eval()
            layers.disable_adapter_layers()
            self._lora.append(layers)

    def replaces(self, *components: str) -> str | None:
        """Return a weight of these components that an adapter replaces as a whole, if there is one."""
        found = (key for weights in self._names.values() for key in weights)
        return next((key for key in found if key.partition(".")[0] in components), None)

    @contextmanager
    def using(self, name: str | None) -> Iterator[None]:
        """Compute with an adapter inside the block; None is the model itself. Blocks do not overlap."""
        if name is None:
            yield
            return
        layers = [each for each in self._lora if name in each.peft_config]
        before = [(module, key, module._parameters[key]) for module, key, _ in self._whole[name]]
        try:
            for each in layers:
                each.enable_adapter_layers()
                each.set_adapter(name)
            for module, key, parameter in self._whole[name]:
                module._parameters[key] = parameter
            yield
        finally:
            for module, key, parameter in before:
                module._parameters[key] = parameter
            for each in layers:
                each.disable_adapter_layers()


def _place(model: nn.Module, name: str, parameter: nn.Parameter) -> tuple[nn.Module, str, nn.Parameter]:
    """Return the module that holds a parameter, and its name there."""
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key, parameter
