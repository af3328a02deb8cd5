"""The generator on several processes: workers share every denoising step with the server.

Each process runs the same denoising loop. With sequence parallelism it holds the whole generator and some
tokens, and self-attention exchanges tokens for heads (Ulysses), as in training. With tensor parallelism it
holds a part of the weights of every block and all tokens.

A worker gets a chunk once, when it joins the loop, and then only the numbers of the chunks of each step. It
keeps their latents and caches, whose heads differ by process.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from worldmodel.batch import map_tensors
from worldmodel.diffusion.sampler import Chunk
from worldmodel.errors import ConfigError, ModelError, WorldModelError
from worldmodel.models.conditioning import Condition
from worldmodel.models.generator.base import VideoGenerator
from worldmodel.models.world_model import WorldModel
from worldmodel.parallel.mesh import SequenceGroup
from worldmodel.parallel.tensor_parallel import Part
from worldmodel.processes import Child, ChildError
from worldmodel.serving.errors import UnavailableError
from worldmodel.serving.settings import OPTIONS, Parallelism

FAILED = "A process of the generator has failed; start the server again."
LOADED = "loaded"
"""Message of a worker that has loaded the weights."""
WORK = "worldmodel.serving.engine.generator_worker:work"
QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}


@dataclass(frozen=True)
class Setup:
    """Arguments with which a worker loads the generator and joins the others."""

    folder: Path
    adapters: Mapping[str, Path]
    quantization: str | None
    compile: bool
    device: str
    threads: int
    """Threads of PyTorch; the server has as many, so that all processes round alike."""
    store: str
    """File in which the processes meet."""
    rank: int
    size: int
    parallelism: Parallelism

    @property
    def sequence(self) -> SequenceGroup:
        """The processes that share the tokens."""
        if self.parallelism == "tensor":
            return SequenceGroup()
        world = dist.group.WORLD
        return SequenceGroup(sp=self.size, sp_rank=self.rank, cp_group=world, sp_group=world, group=world)


@dataclass(frozen=True)
class Step:
    """One denoising step of some chunks."""

    adapter: str | None
    serials: tuple[int, ...]
    """The chunks of this step, in order."""
    joined: tuple[Chunk[Condition], ...]
    """Those of them that the worker does not have yet, on the CPU."""
    left: tuple[int, ...]
    """Chunks that were finished or cancelled."""


class GeneratorProcesses:
    """The worker processes with which a server shares the steps of its generator; created by `start`.

    They end with the server, also when it is killed.
    """

    def __init__(
        self,
        workers: Sequence[Child],
        generator: VideoGenerator,
        sequence: SequenceGroup,
        folder: "tempfile.TemporaryDirectory[str]",
    ) -> None:
        self._workers, self._generator, self._sequence, self._folder = workers, generator, sequence, folder
        self._serials: set[int] = set()  # of the chunks that the workers have
        self._failed = False

    @classmethod
    def start(
        cls,
        folder: Path,
        model: WorldModel,
        size: int,
        adapters: Mapping[str, Path] | None = None,
        quantization: str | None = None,
        compile: bool = False,
        parallelism: Parallelism = "sequence",
    ) -> "GeneratorProcesses":
        """Start workers, which load the generator, and form a process group with them.

        Args:
            folder: Folder of the model.
            model: The model of this process; for tensor parallelism after `keep_part`.
            size: Processes, with this one. On CUDA each has a device of its own, from that of the model on.
            adapters: Folders of adapters by name, as of `Adapters`.
            quantization: int8 or fp8, as of `models.inference.optimize`.
            compile: Whether the generator's transformer blocks are compiled.
            parallelism: What is divided.

        Raises:
            ConfigError: the generator cannot be divided by so many processes, or there are too few devices.
            ModelError: a worker cannot load the generator.
        """
        check(model, size, parallelism)
        # Everything stays on this machine; read when a process group is made.
        os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
        threads = max(1, torch.get_num_threads() // size) if model.device.type == "cpu" else 1
        workers: list[Child] = []
        # It can be read by this user alone, and NCCL reads the store later, too.
        private = tempfile.TemporaryDirectory(prefix="worldmodel-")
        device, store = str(model.device), str(Path(private.name) / "store")
        own = (quantization, compile, device, threads, store, 0, size, parallelism)
        setup = Setup(folder.resolve(), dict(adapters or {}), *own)
        try:
            for rank in range(1, size):
                on_cuda = model.device.type == "cuda"
                if on_cuda:
                    device = f"cuda:{(model.device.index or 0) + rank}"
                workers.append(Child(WORK, replace(setup, rank=rank, device=device), environment=QUIET))
            for worker in workers:
                worker.receive()  # `LOADED`
            if model.device.type == "cpu":
                torch.set_num_threads(threads)
            connect(model.device, setup.store, 0, size)
        except BaseException as error:
            for worker in workers:
                worker.close()
            private.cleanup()
            if isinstance(error, ChildError):
                raise ModelError(
                    f"A process of the generator {error} while it loaded the weights; if memory ran out, "
                    f"change {OPTIONS[parallelism]}."
                ) from None
            raise
        return cls(workers, model.generator, setup.sequence, private)

    @property
    def alive(self) -> bool:
        """Whether all workers run, and none has missed a step."""
        return not self._failed and all(worker.alive for worker in self._workers)

    @contextmanager
    def step(
        self, chunks: Sequence[Chunk[Condition]], adapter: str | None, live: Sequence[Chunk[Condition]]
    ) -> Iterator[None]:
        """Have the workers denoise chunks by one step, while this process does inside the block.

        Args:
            chunks: The chunks of this step.
            adapter: The adapter with which it is computed.
            live: All chunks that may take steps later.

        Raises:
            UnavailableError: a worker has failed, before or in the step. No further step is possible.
        """
        if not self.alive:
            raise UnavailableError(FAILED)
        joined = tuple(
            map_tensors(lambda x: x.cpu(), each) for each in chunks if each.serial not in self._serials
        )
        left = self._serials - {each.serial for each in live}
        step = Step(adapter, tuple(each.serial for each in chunks), joined, tuple(left))
        self._serials = (self._serials - left) | {each.serial for each in joined}
        try:
            for worker in self._workers:
                worker.send(step)
            self._generator.sequence = self._sequence
            yield
        except WorldModelError:  # all processes refuse the same inputs, before they exchange anything
            raise
        except Exception as error:
            self._failed = True
            raise UnavailableError(FAILED) from error
        finally:
            self._generator.sequence = SequenceGroup()

    def close(self) -> None:
        """End the workers and leave the process group."""
        for worker in self._workers:
            worker.close()
        dist.destroy_process_group()
        self._folder.cleanup()


def keep_part(model: WorldModel, rank: int, size: int, device: torch.device) -> None:
    """Keep the part of the generator's weights that a process has, and move the generator to its device.

    Adapters are attached before.

    Raises:
        ConfigError: the generator or an adapter cannot be divided by so many processes.
    """
    check(model, size, "tensor")
    model.generator.divide(Part(rank, size))
    model.generator.to(device)


def check(model: WorldModel, size: int, parallelism: Parallelism) -> None:
    """Raise `ConfigError` if a model's generator cannot be divided so, or there are too few devices."""
    name, generator, config = OPTIONS[parallelism], model.generator, model.config
    if config.generator is None:
        raise ConfigError(f"{name} is {size}, and this model has no generator; leave it out.")
    rows, columns = config.codec.grid
    frames = config.unseen_latents
    tokens = frames * rows * columns // generator.cells_per_token
    if parallelism == "tensor":
        Part(0, size).share(generator.num_heads, "attention heads")
    elif size > min(generator.num_heads, tokens):
        raise ConfigError(
            f"{name} is {size}, but the generator has {generator.num_heads} attention heads and its shortest "
            f"sequence {tokens} tokens; use up to {min(generator.num_heads, tokens)}."
        )
    if model.device.type == "cuda":
        first, found = model.device.index or 0, torch.cuda.device_count()
        if first + size > found:
            raise ConfigError(
                f"{name} is {size}, but from cuda:{first} on there are {found - first} GPUs; lower it."
            )


def connect(device: torch.device, store: str, rank: int, size: int) -> None:
    """Initialise the process group; all processes must call it."""
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(store, size),  # pyright: ignore[reportPrivateImportUsage]
        rank=rank,
        world_size=size,
    )
