"""Adapters of a model, of which every request chooses one."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from worldmodel.errors import InputError, ModelError
from worldmodel.models import lora


class Adapters:
    """Adapters beside the weights of a model: LoRA of any of its components, and weights trained whole.

    Outside of `using` the model is as it was. Calls with different adapters cannot share a pass, and adapters
    are added and removed between passes.
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
            ModelError: as `add`.
        """
        self.names: tuple[str, ...] = ()
        """Names by which requests choose; replaced as a whole, as other threads read it."""
        self.digests: dict[str, str] = {}
        """Digests of their files by name."""
        self.folders: dict[str, dict[str, Path]] = {}
        """Folders of peft by component and name."""
        self._model, self._elsewhere = model, elsewhere
        # The module of each weight and its name there, by names of the model, which peft's layers change.
        self._places = {
            name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name, _ in model.named_parameters()
        }
        self._whole: dict[str, dict[str, nn.Parameter]] = {}
        self._lora: dict[str, Any] = {}
        for name, folder in (folders or {}).items():
            self.add(name, folder)

    def add(self, name: str, folder: Path) -> None:
        """Attach an adapter; an error changes nothing.

        Raises:
            ModelError: there is one of this name, the folder has no adapter, or it does not fit the model.
        """
        if name in self._whole:
            raise ModelError(f"There is an adapter {name!r}; remove it first, or choose another name.")
        known = {key: module.get_parameter(own) for key, (module, own) in self._places.items()}
        whole = lora.read_whole(known, folder, self._elsewhere)
        found = lora.parts(self._model, folder)
        digest = lora.digest(folder, found)
        self._whole[name] = whole
        try:
            for component, path in found.items():
                self.folders.setdefault(component, {})[name] = path
                if component not in self._elsewhere:
                    root = lora.root_of(self._model, component)
                    layers = lora.attach(root, name, path, self._lora.get(component)).eval()
                    layers.disable_adapter_layers()
                    self._lora[component] = layers
        except ModelError:
            self.remove(name)
            raise
        self.digests[name] = digest
        self.names = (*self.names, name)

    def withdraw(self, name: str) -> None:
        """Let requests choose an adapter no longer; those that have begun go on with it until `remove`."""
        self.names = tuple(each for each in self.names if each != name)

    def remove(self, name: str) -> None:
        """Remove an adapter, and free its memory."""
        self.withdraw(name)
        self.digests.pop(name, None)
        self._whole.pop(name, None)
        for component, folders in list(self.folders.items()):
            if folders.pop(name, None) is None or component in self._elsewhere:
                continue
            if not lora.detach(lora.root_of(self._model, component), name):
                self._lora.pop(component, None)

    def replaces(self, *components: str) -> str | None:
        """Return a weight of these components that an adapter replaces as a whole, if there is one."""
        found = (key for weights in self._whole.values() for key in weights)
        return next((key for key in found if key.partition(".")[0] in components), None)

    @contextmanager
    def using(self, name: str | None) -> Iterator[None]:
        """Compute with an adapter inside the block; None is the model itself. Blocks do not overlap.

        Raises:
            InputError: the adapter was removed.
        """
        if name is None:
            yield
            return
        if name not in self._whole:
            raise InputError(f"The adapter {name!r} was removed; choose another model.")
        layers = [each for each in self._lora.values() if name in each.peft_config]
        whole = [(*self._places[key], parameter) for key, parameter in self._whole[name].items()]
        before = [(module, key, module._parameters[key]) for module, key, _ in whole]
        try:
            for each in layers:
                each.enable_adapter_layers()
                each.set_adapter(name)
            for module, key, parameter in whole:
                module._parameters[key] = parameter
            yield
        finally:
            for module, key, parameter in before:
                module._parameters[key] = parameter
            for each in layers:
                each.disable_adapter_layers()
