"""The history of one visitor: branches of rollouts, with undo, fork and comparison.

The server has only the current state of a world; the frames of earlier moments are kept here.
"""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

import numpy as np

from worldmodel.errors import InputError
from worldmodel.media import Frames
from worldmodel.serving.client import AsyncClient, AsyncRemoteWorld
from worldmodel.serving.client.payloads import Observation
from worldmodel.types import Action, AnyAction, Outcome
from worldmodel.worlds.base import Target, World

MAX_BRANCHES = 4
MAX_MOMENTS = 200
"""Maximum number of moments of a branch, whose frames are kept in memory."""


@dataclass
class Moment:
    """One round of a branch: the action, its frames, and a snapshot to return to."""

    action: Action | None
    """The action of the round; None for the start."""
    clip: Frames
    snapshot: str | None = None
    targets: tuple[Target, ...] = ()
    """Objects for suggested actions."""
    outcome: Outcome | None = None
    """Reward and end that the model predicts for the round, if it predicts them."""

    @property
    def label(self) -> str:
        """Label in the timeline."""
        return (
            "Start" if self.action is None else str(self.action) if self.action != Action() else "time passes"
        )


@dataclass
class Branch:
    """A rollout and its world; `at` is the index of the current moment."""

    name: str
    world: AsyncRemoteWorld
    moments: list[Moment]
    at: int = 0

    @property
    def now(self) -> Moment:
        """The current moment."""
        return self.moments[self.at]


@dataclass
class RolloutHistory:
    """All branches of one visitor; calls are serialised by a lock."""

    client: AsyncClient
    catalog: World
    """The world that suggests actions."""
    branches: list[Branch]
    current: int = 0
    futures: list[tuple[AsyncRemoteWorld, Moment]] = field(default_factory=list)
    """Two compared worlds, each one step ahead of the branch."""
    count: int = 1
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    async def start(
        cls,
        client: AsyncClient,
        catalog: World,
        seed: int,
        observation: Observation | None = None,
        *,
        text: str | None = None,
        targets: tuple[Target, ...] = (),
    ) -> "RolloutHistory":
        """Start from an image or a video, or from a description; `targets` are its known objects."""
        world = await client.worlds.create(observation, text=text, seed=seed)
        first = Moment(None, await world.frames(), await world.snapshot())
        first.targets = await _find_targets(catalog, world, first, targets)
        return cls(client, catalog, [Branch("Main", world, [first])])

    @property
    def branch(self) -> Branch:
        """The current branch."""
        return self.branches[self.current]

    async def step(self, action: AnyAction) -> None:
        """Run a round from the current moment, and drop the moments after it."""
        async with self.lock:
            branch = self.branch
            if branch.at + 1 >= MAX_MOMENTS:
                raise InputError(
                    f"The branch has {MAX_MOMENTS} moments, which is the maximum; start a new world."
                )
            await self._drop_futures()
            parsed = Action.of(action)
            clip = await branch.world.step(parsed)
            await self._append(branch, Moment(parsed, clip, outcome=branch.world.outcome))

    async def go(self, index: int) -> None:
        """Go to an earlier or later moment of the branch."""
        async with self.lock:
            branch = self.branch
            if not 0 <= index < len(branch.moments) or index == branch.at:
                return
            moment = branch.moments[index]
            try:
                if moment.snapshot is None:
                    raise InputError("no snapshot")
                await branch.world.restore(moment.snapshot)
            # Servers keep only the newest snapshots, and forks none of their parent: replaying gives the same
            # frames.
            except InputError:
                await branch.world.reset()
                for earlier in branch.moments[1 : index + 1]:
                    await branch.world.step(earlier.action)
                moment.snapshot = await branch.world.snapshot()
            branch.at = index

    async def fork(self) -> None:
        """Continue in a copy of the current branch."""
        async with self.lock:
            if len(self.branches) >= MAX_BRANCHES:
                raise InputError(
                    f"There are {MAX_BRANCHES} branches, which is the maximum; start a new world."
                )
            branch = self.branch
            world = await branch.world.fork()
            moments = [replace(moment, snapshot=None) for moment in branch.moments[: branch.at + 1]]
            self.branches.append(Branch(f"Fork {self.count}", world, moments, branch.at))
            self.current, self.count = len(self.branches) - 1, self.count + 1

    async def compare(self, first: AnyAction, second: AnyAction) -> None:
        """Run two actions from the same moment concurrently; `choose` continues with one of them."""
        actions = [Action.of(first), Action.of(second)]
        async with self.lock:
            await self._drop_futures()
            async with AsyncExitStack() as stack:
                worlds = [await stack.enter_async_context(await self.branch.world.fork()) for _ in actions]
                clips = await asyncio.gather(*(w.step(a) for w, a in zip(worlds, actions, strict=True)))
                stack.pop_all()  # keep the worlds open
            moments = [
                Moment(action, clip, outcome=world.outcome)
                for action, clip, world in zip(actions, clips, worlds, strict=True)
            ]
            self.futures = list(zip(worlds, moments, strict=True))

    async def choose(self, index: int) -> None:
        """Continue with one of the two compared worlds."""
        async with self.lock:
            if not 0 <= index < len(self.futures):
                return
            world, moment = self.futures.pop(index)
            await self._drop_futures()
            branch = self.branch
            previous, branch.world = branch.world, world
            for earlier in branch.moments:
                earlier.snapshot = None  # snapshots belong to a world
            await previous.close()
            await self._append(branch, moment)

    async def forget_futures(self) -> None:
        """End a comparison without choosing."""
        async with self.lock:
            await self._drop_futures()

    async def describe(self, question: str | None) -> str:
        """Describe the current frame, or answer a question about it."""
        async with self.lock:
            return await self.branch.world.describe(question)

    async def explain(self) -> str:
        """Return the action that the model infers from the last round."""
        async with self.lock:
            return await self.branch.world.infer_action()

    def frames(self) -> np.ndarray:
        """Return all frames up to the current moment, uint8 `[t, h, w, 3]`."""
        return np.concatenate([moment.clip for moment in self.branch.moments[: self.branch.at + 1]])

    @property
    def worlds(self) -> list[AsyncRemoteWorld]:
        """All open worlds of this visitor."""
        return [*(branch.world for branch in self.branches), *(world for world, _ in self.futures)]

    async def close(self) -> None:
        """Close all worlds; ones that no longer exist are ignored."""
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
