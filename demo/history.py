"""The history of one visitor: branches of rollouts, with undo, fork and comparison.

The server has only the current state of a world; the frames of earlier moments are kept here. A world that
the server no longer has is made again by playing its actions: equal seeds and actions give equal frames.
"""

import asyncio
import io
import secrets
import tempfile
import zipfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from worldmodel.actions import Action, AnyAction
from worldmodel.actions.words import say
from worldmodel.config import ActionConfig
from worldmodel.episodes import Outcome
from worldmodel.errors import InputError
from worldmodel.media import Frames
from worldmodel.recording.played import PlayedEpisode, PlayedRound, write_played
from worldmodel.serving.client import AsyncClient, AsyncRemoteWorld, RemoteFuture
from worldmodel.serving.client.payloads import Observation
from worldmodel.serving.errors import NotFoundError
from worldmodel.serving.protocol import ModelObject
from worldmodel.worlds.base import Target, World

WAIT = "wait"
"""Label of a round without an action."""
MAX_BRANCHES = 4
MAX_MOMENTS = 200
"""Maximum number of moments of a branch, whose frames are kept in memory."""
MAX_POSSIBLE = 8
"""Maximum number of possible futures that are shown."""
NUM_SEEDS = 4
"""Number of seeds that are shown of a model that cannot list its futures."""


@dataclass(frozen=True)
class SeededFuture:
    """What follows with a seed, of a model that cannot list its futures."""

    seed: int
    frames: Frames
    """uint8 `[t, h, w, 3]`."""


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
    doubtful: bool = False
    """Whether the model has probably not understood the words of the action."""
    unlike: bool = False
    """Whether the model does not know such pictures; only of a start."""
    code: tuple[int, ...] | None = None
    """Names the future that the visitor chose among several; None if one was drawn."""
    seed: int | None = None
    """Seed of the round that the visitor chose among several; None for the world's."""

    @property
    def label(self) -> str:
        """Label in the timeline."""
        return "Start" if self.action is None else str(self.action) if self.action != Action() else WAIT


@dataclass
class Branch:
    """A rollout and its world; `at` is the index of the current moment."""

    name: str
    world: AsyncRemoteWorld
    moments: list[Moment]
    at: int = 0
    origin: "Origin | None" = None
    """From which it can be made again; None if it was found on the server."""
    first_round: int = 0
    """Round of the world at the first moment."""

    @property
    def now(self) -> Moment:
        """The current moment."""
        return self.moments[self.at]

    def append(self, moment: Moment) -> None:
        """Put a moment after the current one, in the place of the moments after it, and go to it."""
        self.moments[self.at + 1 :] = [moment]
        self.at += 1


@dataclass(frozen=True)
class Origin:
    """The origin of a world."""

    seed: int
    observation: Observation | None = None
    text: str | None = None

    async def start(self, client: AsyncClient) -> AsyncRemoteWorld:
        """Start a world on a server."""
        return await client.worlds.create(self.observation, text=self.text, seed=self.seed)


@dataclass
class RolloutHistory:
    """All branches of one visitor; a caller holds `lock` during a call, so that there is one at a time.

    A call that fails or is cancelled changes nothing here; the next one brings the world back to the current
    moment.
    """

    client: AsyncClient
    catalog: World
    """The world that suggests actions."""
    model: ModelObject
    branches: list[Branch]
    current: int = 0
    futures: list[tuple[AsyncRemoteWorld, Moment]] = field(default_factory=list)
    """Two compared worlds, each one step ahead of the branch."""
    possible: list[RemoteFuture] | list[SeededFuture] = field(default_factory=list)
    """What may follow from the current moment by `foreseen_action`, the most probable first."""
    foreseen_action: Action = field(default_factory=Action)
    count: int = 1
    key: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    """By which only the visitor can find it again."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Pages of one visitor share the history: after a reload, or in a copy of the tab."""

    @classmethod
    async def start(
        cls,
        client: AsyncClient,
        catalog: World,
        model: ModelObject,
        origin: Origin,
        targets: tuple[Target, ...] = (),
    ) -> "RolloutHistory":
        """Start a world; `targets` are its known objects."""
        self = cls(client, catalog, model, [])
        world = await origin.start(client)
        try:
            self.branches = [await self._branch("Main", world, targets, origin)]
        except BaseException:
            await world.close()
            raise
        return self

    @classmethod
    async def reopen(
        cls, client: AsyncClient, catalog: World, model: ModelObject, worlds: Sequence[str]
    ) -> "RolloutHistory":
        """Continue worlds that are live on the server, whose earlier moments are not known.

        Raises:
            NotFoundError: the server has none of them.
        """
        self = cls(client, catalog, model, [])
        for identity in worlds[:MAX_BRANCHES]:
            with suppress(NotFoundError):
                world = await client.worlds.open(identity)
                name = f"Fork {len(self.branches)}" if self.branches else "Main"
                self.branches.append(await self._branch(name, world))
        if not self.branches:
            raise NotFoundError("The earlier world was closed after a time without use; start a new one.")
        self.count = len(self.branches)
        return self

    @property
    def branch(self) -> Branch:
        """The current branch."""
        return self.branches[self.current]

    @property
    def address(self) -> str:
        """Values stored in the visitor's browser: the key, and the worlds of the branches."""
        return " ".join((self.key, *(branch.world.id for branch in self.branches)))

    def _branch_with_room(self) -> Branch:
        """Return the current branch, if another moment fits on it."""
        if self.branch.at + 1 >= MAX_MOMENTS:
            raise InputError(
                f"The branch has {MAX_MOMENTS} moments, which is the maximum; start a new world."
            )
        return self.branch

    async def step(
        self, action: AnyAction, code: tuple[int, ...] | None = None, seed: int | None = None
    ) -> None:
        """Run a round from the current moment, and drop the moments after it.

        With the `code` or `seed` of a possible future, that future happens.
        """
        branch, threshold = self._branch_with_room(), self.model.confidence_threshold
        await self.drop_futures()
        parsed, world = Action.of(action), await self.synchronised()
        result = await world.step(parsed, confidence=threshold is not None, code=code, seed=seed)
        doubtful = threshold is not None and world.confidence is not None and world.confidence < threshold
        moment = Moment(
            parsed, result.frames, outcome=result.outcome, doubtful=doubtful, code=code, seed=seed
        )
        branch.append(await self._complete(world, moment, branch.now))

    async def foresee(self, action: AnyAction) -> None:
        """List what may follow from the current moment; nothing happens yet."""
        parsed, world = Action.of(action), await self.synchronised()
        if self.model.has_futures:
            found = await world.futures(parsed, max_futures=MAX_POSSIBLE)
        else:
            found = await self._seeded(world, parsed)
        self.possible, self.foreseen_action = found, parsed

    async def _seeded(self, parent: AsyncRemoteWorld, action: Action) -> list[SeededFuture]:
        """Play an action with several seeds in forks, the world's own first."""
        seeds = range(parent.info.seed, parent.info.seed + NUM_SEEDS)

        async def play(seed: int) -> SeededFuture:
            async with await parent.fork() as world:
                return SeededFuture(seed, (await world.step(action, seed=seed)).frames)

        return list(await asyncio.gather(*map(play, seeds)))

    async def happen(self, index: int) -> None:
        """Let one of the possible futures happen."""
        future = self.possible[index]
        if isinstance(future, SeededFuture):
            await self.step(self.foreseen_action, seed=future.seed)
        else:
            await self.step(self.foreseen_action, future.code)

    async def undo(self) -> None:
        """Go back by one moment."""
        if self.branch.at == 0:
            raise InputError("There is nothing to undo.")
        await self.go(self.branch.at - 1)

    async def go(self, index: int) -> None:
        """Go to an earlier or later moment of the branch."""
        branch = self.branch
        if 0 <= index < len(branch.moments) and index != branch.at:
            await self.synchronised()
            await self._return_to(branch, index)
            branch.at, self.possible = index, []

    async def synchronised(self) -> AsyncRemoteWorld:
        """Return the world of the branch, in the state of the current moment.

        It is in another one if a call was cancelled after the server had played the round.
        """
        branch = self.branch
        try:
            await branch.world.refresh()
        except NotFoundError:
            if branch.origin is None:
                raise
            branch.world = await branch.origin.start(self.client)
            for moment in branch.moments:
                moment.snapshot = None  # snapshots belong to a world
        if branch.world.round != branch.first_round + branch.at:
            await self._return_to(branch, branch.at)
        return branch.world

    async def _return_to(self, branch: Branch, index: int) -> None:
        moment = branch.moments[index]
        try:
            if moment.snapshot is None:
                raise InputError("This moment was not saved; go to another one, or start a new world.")
            await branch.world.restore(moment.snapshot)
        # Servers keep only the newest snapshots, and forks none of their parent: replaying gives the same
        # frames.
        except (InputError, NotFoundError):
            if branch.first_round:
                raise
            await branch.world.reset()
            for earlier in branch.moments[1 : index + 1]:
                await branch.world.step(earlier.action, code=earlier.code, seed=earlier.seed)
            moment.snapshot = await branch.world.snapshot()

    def _check_branches(self) -> None:
        if len(self.branches) >= MAX_BRANCHES:
            raise InputError(f"There are {MAX_BRANCHES} branches, which is the maximum; start a new world.")

    async def adopt(self, identity: str) -> None:
        """Continue in a branch for a world of the server, whose earlier moments are not known.

        Raises:
            InputError: there are too many branches; the world is closed.
            NotFoundError: the server does not have it.
        """
        world = await self.client.worlds.open(identity)
        try:
            self._check_branches()
            self.branches.append(await self._branch(f"Live {self.count}", world))
        except BaseException:
            await world.close()
            raise
        self.current, self.count = len(self.branches) - 1, self.count + 1

    async def fork(self) -> None:
        """Continue in a copy of the current branch."""
        self._check_branches()
        branch, world = self.branch, await (await self.synchronised()).fork()
        moments = [replace(moment, snapshot=None) for moment in branch.moments[: branch.at + 1]]
        self.branches.append(
            Branch(f"Fork {self.count}", world, moments, branch.at, branch.origin, branch.first_round)
        )
        self.current, self.count = len(self.branches) - 1, self.count + 1

    async def compare(self, first: AnyAction, second: AnyAction) -> None:
        """Run two actions from the same moment concurrently; `choose` continues with one of them."""
        actions = [Action.of(first), Action.of(second)]
        self._branch_with_room()
        await self.drop_futures()
        parent = await self.synchronised()
        async with AsyncExitStack() as stack:
            worlds = [await stack.enter_async_context(await parent.fork()) for _ in actions]
            results = await asyncio.gather(*(w.step(a) for w, a in zip(worlds, actions, strict=True)))
            stack.pop_all()  # keep the worlds open
        moments = [
            Moment(action, result.frames, outcome=result.outcome)
            for action, result in zip(actions, results, strict=True)
        ]
        self.futures = list(zip(worlds, moments, strict=True))

    async def choose(self, index: int) -> None:
        """Continue with one of the two compared worlds."""
        if not 0 <= index < len(self.futures):
            return
        (world, moment), branch = self.futures[index], self._branch_with_room()
        moment = await self._complete(world, moment, branch.now)
        previous, branch.world = branch.world, world
        for earlier in branch.moments:
            earlier.snapshot = None  # snapshots belong to a world
        branch.append(moment)
        del self.futures[index]
        await asyncio.gather(previous.close(), self.drop_futures())

    async def describe(self, question: str | None) -> str:
        """Describe the current frame, or answer a question about it."""
        return await (await self.synchronised()).describe(question)

    async def explain(self) -> str:
        """Return the action that the model infers from the last round, in words."""
        return say(await (await self.synchronised()).infer_action())

    def frames(self) -> np.ndarray:
        """Return all frames up to the current moment, uint8 `[t, h, w, 3]`."""
        return np.concatenate([moment.clip for moment in self.branch.moments[: self.branch.at + 1]])

    def dataset(self) -> bytes:
        """Return the branches up to their current moments as a zipped LeRobot dataset.

        Raises:
            InputError: nothing was played, or the actions have no numbers.
            OutputError: pyarrow is not installed.
        """
        info = self.branch.world.info
        schema = info.action_schema
        episodes = [
            PlayedEpisode(
                branch.moments[0].clip[-1],
                [
                    PlayedRound(moment.action or Action(), moment.clip, moment.outcome)
                    for moment in branch.moments[1 : branch.at + 1]
                ],
                info.seed,
            )
            for branch in self.branches
        ]
        takes = ActionConfig.of({**schema.kinds, "per_round": schema.per_round})
        with tempfile.TemporaryDirectory() as folder:
            write_played(Path(folder), episodes, info.fps, takes)
            packed = io.BytesIO()
            with zipfile.ZipFile(packed, "w") as archive:  # videos and tables are compressed already
                for file in sorted(Path(folder).rglob("*")):
                    if file.is_file():
                        archive.write(file, Path("played") / file.relative_to(folder))
        return packed.getvalue()

    @property
    def worlds(self) -> list[AsyncRemoteWorld]:
        """All open worlds of this visitor."""
        return [*(branch.world for branch in self.branches), *(world for world, _ in self.futures)]

    async def close(self) -> None:
        """Close all worlds; ones that no longer exist are ignored."""
        await asyncio.gather(*(world.close() for world in self.worlds), return_exceptions=True)

    async def _branch(
        self,
        name: str,
        world: AsyncRemoteWorld,
        targets: tuple[Target, ...] = (),
        origin: Origin | None = None,
    ) -> Branch:
        clip = await world.frames()
        unlike = (world.info.observation_score or 0) > 1
        start = Moment(None, clip, unlike=unlike)
        first = await self._complete(world, start, Moment(None, clip, targets=targets))
        return Branch(name, world, [first], origin=origin, first_round=world.round)

    async def drop_futures(self) -> None:
        """End a comparison without choosing."""
        futures, self.futures, self.possible = self.futures, [], []
        await asyncio.gather(*(world.close() for world, _ in futures))

    async def _complete(self, world: AsyncRemoteWorld, moment: Moment, earlier: Moment) -> Moment:
        """Save the current state of a world as a moment, and find the objects that actions can name in it.

        They are found in the pixels, or by the model's description, or are as before; earlier ones keep their
        order, so that buttons do not move.
        """
        before, moment.snapshot = earlier.targets, await world.snapshot()
        found = self.catalog.targets_in(moment.clip[-1])
        if not found and "describe" in self.model.tasks:
            found = self.catalog.targets_named(await world.describe())
        found = found or before
        moment.targets = tuple(
            sorted(found, key=lambda each: before.index(each) if each in before else len(before))
        )
        return moment
