"""Identity of what a server plays worlds with: whether another one plays on with the same frames."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Identity:
    """Digests of a model and of its adapters."""

    model: str
    adapters: Mapping[str, str] = field(default_factory=dict)
    """By name."""

    def of(self, adapter: str | None) -> str:
        """Return the digest of the model together with one of its adapters."""
        return self.model if adapter is None else f"{self.model} {self.adapters.get(adapter)}"
