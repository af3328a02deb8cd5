"""One visitor's way through worlds: what was played, where they stand, and how to go back.

A server's world holds the present; what was shown is kept here, so that a film strip can show it.
"""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

import numpy as np

from worldmodel.errors import InputError
from worldmodel.media import Frames
from worldmodel.serving.client import AsyncClient, AsyncRemoteWorld
from worldmodel.serving.client.transport import AnyAction
from worldmodel.types import Action
from worldmodel.worlds.base import StartImage, Target, World

MAX_BRANCHES = 4
MAX_MOMENTS = 200
"""Longest film strip: frames are kept in memory for each visitor."""


@dataclass
class Moment:
    """One entry of the film strip: what was done, what was seen then, and the way back to it."""

    action: Action | None
    """What led here; None for a beginning."""
    clip: Frames
    snapshot: str | None = None
    targets: tuple[Target, ...] = ()
    """Objects that suggested actions name."""

    @property
    def label(self) -> str:
        """What the film strip writes under it."""
        return (
            "Start" if self.action is None else str(self.action) if self.action != Action() else "time passes"
        )


@dataclass
class Branch:
    """A rollout and its world; `at` is the moment that the world is in."""

    name: str
    world: AsyncRemoteWorld
    moments: list[Moment]
    at: int = 0

    @property
    def now(self) -> Moment:
        """The moment that is seen now."""
        return self.moments[self.at]


@dataclass
class Journey:
    """All branches of one visitor; its calls wait for each other."""

    client: AsyncClient
    catalog: World
    """The world that suggests actions."""
    branches: list[Branch]
    current: int = 0
    futures: list[tuple[AsyncRemoteWorld, Moment]] = field(default_factory=list)
    """Two worlds that are being compared, each a step ahead of the branch."""
    count: int = 1
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    async def from_image(cls, client: AsyncClient, catalog: World, start: StartImage, seed: int) -> "Journey":
        """Start from one of the world's images."""
        world = await client.worlds.create(start.image, seed=seed)
        return await cls._begin(client, catalog, world, catalog.targets_in(start.image))

    @classmethod
    async def from_upload(cls, client: AsyncClient, catalog: World, data: bytes, seed: int) -> "Journey":
        """Start from a visitor's image or clip."""
        return await cls._begin(client, catalog, await client.worlds.create(data, seed=seed))

    @classmethod
    async def from_text(cls, client: AsyncClient, catalog: World, text: str, seed: int) -> "Journey":
        """Start from a description."""
        world = await client.worlds.create(text=text, seed=seed)
        return await cls._begin(client, catalog, world, catalog.targets_named(text))

    @classmethod
    async def _begin(
        cls, client: AsyncClient, catalog: World, world: AsyncRemoteWorld, targets: tuple[Target, ...] = ()
    ) -> "Journey":
        first = Moment(None, await world.frames(), await world.snapshot())
        first.targets = await _find_targets(catalog, world, first, targets)
        return cls(client, catalog, [Branch("Main", world, [first])])

    @property
    def branch(self) -> Branch:
        """The branch that is on the stage."""
        return self.branches[self.current]

    async def step(self, action: AnyAction) -> None:
        """Play a round from the present moment; what came after it in the film strip is dropped."""
        async with self.lock:
            branch = self.branch
            if branch.at + 1 >= MAX_MOMENTS:
                raise InputError(
                    f"The film strip has {MAX_MOMENTS} moments, the most it holds; start a new world."
                )
            await self._drop_futures()
            act = Action.of(action)
            clip = await branch.world.step(act)
            await self._append(branch, Moment(act, clip))

    async def go(self, index: int) -> None:
        """Go to a moment of the film strip, earlier or later."""
        async with self.lock:
            branch = self.branch
            if not 0 <= index < len(branch.moments) or index == branch.at:
                return
            moment = branch.moments[index]
            try:
                if moment.snapshot is None:
                    raise InputError("no snapshot")
                await branch.world.restore(moment.snapshot)
            # A server keeps the newest moments only, a fork none of its parent's: played again, they come out
            # the same.
            except InputError:
                await branch.world.reset()
                for earlier in branch.moments[1 : index + 1]:
                    await branch.world.step(earlier.action)
                moment.snapshot = await branch.world.snapshot()
            branch.at = index

    async def fork(self) -> None:
        """Continue in a copy; the branch before stays as it is."""
        async with self.lock:
            if len(self.branches) >= MAX_BRANCHES:
                raise InputError(
                    f"There are {MAX_BRANCHES} branches, the most allowed; close one by starting anew."
                )
            branch = self.branch
            world = await branch.world.fork()
            past = [replace(moment, snapshot=None) for moment in branch.moments[: branch.at + 1]]
            self.branches.append(Branch(f"Fork {self.count}", world, past, branch.at))
            self.current, self.count = len(self.branches) - 1, self.count + 1

    async def compare(self, first: AnyAction, second: AnyAction) -> None:
        """Play two actions from the same moment, at once; `choose` goes on with one of them."""
        actions = [Action.of(first), Action.of(second)]
        async with self.lock:
            await self._drop_futures()
            async with AsyncExitStack() as stack:
                worlds = [await stack.enter_async_context(await self.branch.world.fork()) for _ in actions]
                clips = await asyncio.gather(*(w.step(a) for w, a in zip(worlds, actions, strict=True)))
                stack.pop_all()  # all went well: they live on
            moments = [Moment(action, clip) for action, clip in zip(actions, clips, strict=True)]
            self.futures = list(zip(worlds, moments, strict=True))

    async def choose(self, index: int) -> None:
        """Go on with one of two futures."""
        async with self.lock:
            if not 0 <= index < len(self.futures):
                return
            world, moment = self.futures.pop(index)
            await self._drop_futures()
            branch = self.branch
            abandoned, branch.world = branch.world, world
            for earlier in branch.moments:
                earlier.snapshot = None  # they were the other world's
            await abandoned.close()
            await self._append(branch, moment)

    async def forget_futures(self) -> None:
        """End a comparison without a choice."""
        async with self.lock:
            await self._drop_futures()

    async def say(self, question: str | None) -> str:
        """Describe what is seen, or answer a question about it."""
        async with self.lock:
            return await self.branch.world.describe(question)

    async def explain(self) -> str:
        """Say which action the model sees in the last round."""
        async with self.lock:
            return await self.branch.world.infer_action()

    def film(self) -> np.ndarray:
        """Return all frames up to the present moment, uint8 `[t, h, w, 3]`."""
        return np.concatenate([moment.clip for moment in self.branch.moments[: self.branch.at + 1]])

    @property
    def worlds(self) -> list[AsyncRemoteWorld]:
        """All worlds that this visitor holds."""
        return [*(branch.world for branch in self.branches), *(world for world, _ in self.futures)]

    async def close(self) -> None:
        """End all worlds; those that are gone already are fine."""
        await asyncio.gather(*(world.close() for world in self.worlds), return_exceptions=True)

    async def _append(self, branch: Branch, moment: Moment) -> None:
        earlier = branch.now.targets
        branch.moments[branch.at + 1 :] = [moment]
        branch.at += 1
        moment.snapshot = await branch.world.snapshot()
        moment.targets = await _find_targets(self.catalog, branch.world, moment, earlier)

    async def _drop_futures(self) -> None:
        await asyncio.gather(*(world.close() for world, _ in self.futures))
        self.futures = []


async def _find_targets(
    catalog: World, world: AsyncRemoteWorld, moment: Moment, before: tuple[Target, ...]
) -> tuple[Target, ...]:
    """Return the objects that actions can name: from pixels, or the model's description, or as before.

    Earlier ones keep their order, so that buttons do not move.
    """
    found = catalog.targets_in(moment.clip[-1]) or catalog.targets_named(await world.describe()) or before
    return tuple(sorted(found, key=lambda each: before.index(each) if each in before else len(before)))
