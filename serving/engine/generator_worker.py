"""A worker of `generator_processes`: loads the generator alone, and takes the steps that the server sends."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any, NoReturn

import torch

from worldmodel.batch import map_tensors
from worldmodel.diffusion.sampler import Chunk, Denoiser
from worldmodel.errors import WorldModelError
from worldmodel.models.adapters import Adapters
from worldmodel.models.conditioning import Condition
from worldmodel.models.generator.base import VideoGenerator
from worldmodel.models.loading import deferred
from worldmodel.models.quantization import quantize
from worldmodel.models.world_model import WorldModel
from worldmodel.processes import Connection
from worldmodel.serving.engine.generator_processes import LOADED, Setup, Step, connect, keep_part


def work(server: Connection, setup: Setup) -> None:
    """Take the server's steps until it ends; a generator that cannot be loaded is reported to it."""

    def exit_with_server() -> None:
        shutil.rmtree(Path(setup.store).parent, ignore_errors=True)  # a killed server has left it
        os._exit(0)

    server.on_close = exit_with_server
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # for the server, which finishes its work first
    device = torch.device(setup.device)
    torch.set_num_threads(setup.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    generator, adapters = load(setup, device)
    server.send(LOADED)
    connect(device, setup.store, setup.rank, setup.size)
    generator.sequence = setup.sequence
    with torch.no_grad():
        follow(server, generator, adapters, device)


def load(setup: Setup, device: torch.device) -> tuple[VideoGenerator, Adapters]:
    """Load the generator with its adapters; other parts of other libraries keep their weights in the files.

    Raises:
        ConfigError: heads or channels of the generator, or an adapter, cannot be divided.
        ModelError: the files are damaged, or an adapter does not fit.
    """
    with deferred.loading():
        model = WorldModel.from_pretrained(setup.folder)
    generator: Any = model.generator
    if hasattr(generator, "text_encoder"):
        generator.text_encoder = None  # conditions come with their texts embedded
    whole = device if setup.parallelism == "sequence" else torch.device("cpu")
    # Image-to-video models encode pixels of their context.
    for part, place in ((generator, whole), (model.codec, device)):
        deferred.materialize(part, place)
        deferred.load_shards(part)
        part.to(place)
    adapters = Adapters(model, setup.adapters)
    if setup.parallelism == "tensor":
        keep_part(model, setup.rank, setup.size, device)
    if setup.quantization is not None:
        quantize([generator], setup.quantization)
    if setup.compile:
        generator.compile_layers()
    return generator.eval().requires_grad_(False), adapters


def follow(
    server: Connection, generator: VideoGenerator, adapters: Adapters, device: torch.device
) -> NoReturn:
    """Take every step that the server takes."""
    denoiser: Denoiser[Condition] = Denoiser(generator)
    chunks: dict[int, Chunk[Condition]] = {}
    while True:
        step: Step = server.receive()
        for serial in step.left:
            del chunks[serial]
        chunks |= {chunk.serial: map_tensors(lambda x: x.to(device), chunk) for chunk in step.joined}
        try:
            with adapters.using(step.adapter):
                denoiser.step([chunks[serial] for serial in step.serials])
        except WorldModelError:  # the server has refused the same inputs
            continue
