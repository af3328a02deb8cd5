"""Adapters of a model that can be removed while a server runs."""

from collections.abc import Iterator
from contextlib import contextmanager

from worldmodel.errors import InputError
from worldmodel.models.adapters import Adapters


class ServedAdapters(Adapters):
    """Adapters of a model; every call to the model is inside of `using`."""

    model_removed = False
    """Whether the model itself was removed, so that no call begins any more."""

    @contextmanager
    def using(self, name: str | None) -> Iterator[None]:
        """Compute with an adapter inside the block; None is the model itself.

        Raises:
            InputError: the adapter or the model was removed.
        """
        if self.model_removed:
            raise InputError("The model was unloaded; choose another one.")
        with super().using(name):
            yield
