"""Worlds of sockets that were dropped, to which their clients may come back within a minute."""

import asyncio
import secrets
from dataclasses import dataclass

from worldmodel.serving.errors import NotFoundError
from worldmodel.serving.worlds.owned import Slot
from worldmodel.serving.worlds.registry import WorldRegistry
from worldmodel.serving.worlds.service import World

KEEP_S = 60.0


@dataclass(frozen=True)
class _Dropped:
    world: World
    slot: Slot
    end: asyncio.TimerHandle


class DroppedWorlds:
    """Keeps worlds, with their places among the live ones, until they are taken or their time is over."""

    def __init__(self, registry: WorldRegistry, keep_s: float = KEEP_S) -> None:
        self.keep_s = keep_s
        self._registry = registry
        self._kept: dict[str, _Dropped] = {}

    def keep(self, name: str, world: World, slot: Slot) -> None:
        """Keep a world under a name that only its client knows."""
        end = asyncio.get_running_loop().call_later(self.keep_s, self._end, name)
        self._kept[name] = _Dropped(world, slot, end)

    def take(self, caller: str, name: str) -> tuple[World, Slot]:
        """Return a world and its place to the key that had it.

        Raises:
            NotFoundError: there is none of this name, or it belonged to another key.
        """
        kept = self._kept.get(name)
        if kept is None or kept.slot.owner != caller:
            raise NotFoundError(
                f"There is no world to come back to: it is kept for {self.keep_s:g} s after its socket was "
                "dropped, by the server that it was on; start another."
            )
        del self._kept[name]
        kept.end.cancel()
        return kept.world, kept.slot

    def close(self) -> None:
        """End all worlds that are kept."""
        for name in list(self._kept):
            self._end(name)

    def _end(self, name: str) -> None:
        kept = self._kept.pop(name)
        kept.end.cancel()
        kept.world.close()
        self._registry.release(kept.slot)


def new_name() -> str:
    """Return a name that nobody can guess."""
    return secrets.token_urlsafe(24)
