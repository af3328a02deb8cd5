"""The generator on several processes: chunks are those of one, and a failed process ends the server."""

import asyncio
import importlib.util
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import pytest
import torch
from architectures import DECODER
from safetensors.torch import save_file
from served import Processes, frames_of, step
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from worldmodel.cli import main
from worldmodel.config import (
    BackboneConfig,
    CodecConfig,
    ConditionAdapterConfig,
    GeneratorConfig,
    StateConfig,
    TrainedConfig,
    VisionConfig,
    WorldModelConfig,
)
from worldmodel.diffusion.sampler import Chunk
from worldmodel.errors import ConfigError
from worldmodel.experiments.step_cache import StepCache
from worldmodel.models import lora
from worldmodel.models.conditioning import Condition
from worldmodel.models.quantization import num_bytes
from worldmodel.models.world_model import WorldModel
from worldmodel.parallel import collectives
from worldmodel.rollout.saved import identify
from worldmodel.serving.engine.batching import Compute
from worldmodel.serving.engine.denoiser import DenoisingLoop
from worldmodel.serving.engine.generator_processes import GeneratorProcesses, check, keep_part
from worldmodel.serving.settings import OPTIONS, Parallelism
from worldmodel.serving.worlds.identity import Identity
from worldmodel.serving.worlds.saved import SavedWorld

SELF = Path(__file__)
STEPS, GUIDANCE, SIZE = 4, 3.0, 2
SIZES = {"sequence": SIZE, "tensor": 3}
"""Processes of servers, whose generator has 3 heads."""
Adapter = Literal["grid", "prompt", "stream"]
CLOSE = 5e-6
"""Largest difference from one process, relative to the largest value."""
OURS = {
    "sequence": GeneratorConfig(width=48, num_layers=2, num_heads=3),
    "tensor": GeneratorConfig(width=64, num_layers=2, num_heads=4),
}
CASES: list[tuple[Parallelism, str, Adapter]] = [
    ("sequence", "swin", "grid"),
    *(("sequence", kind, "prompt") for kind in ("wan", "ltx", "cog-i2v")),
    ("tensor", "swin", "grid"),
    ("tensor", "wan", "prompt"),
    *(("tensor", kind, "stream") for kind in ("ltx", "cog-i2v")),
]


def architectures() -> Any:
    """The tiny models of the tests of diffusers."""
    spec = importlib.util.spec_from_file_location(
        "tiny_diffusers", SELF.parents[1] / "unit" / "diffusers" / "conftest.py"
    )
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def save(
    parallelism: Parallelism, kind: str, adapter: Adapter, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> tuple[Path, WorldModel]:
    """Make a model whose generator has no weights of zero, and read it from its folder as a server does."""
    torch.manual_seed(0)
    config = WorldModelConfig(
        codec=CodecConfig(image_size=32, latent_channels=4, widths=(8, 16), num_blocks=1),
        backbone=BackboneConfig(architecture=DECODER, vocab_size=320),
        vision=VisionConfig(width=32, num_blocks=1),
        state=StateConfig(width=32, num_layers=1, num_heads=2),
        generator=OURS[parallelism],
        num_inference_steps=STEPS,
        sampler="swin" if kind == "swin" else "chunk",
    )
    if kind != "swin":
        tiny = architectures()
        vae, transformer = dict(tiny.VAES[tiny.family(kind)]), dict(tiny.TRANSFORMERS[kind])
        channels = {"wan": 16, "ltx": 8, "cog-i2v": 4}[kind]
        config = replace(
            config,
            codec=CodecConfig(image_size=32, temporal_factor=4, latent_channels=channels, architecture=vae),
            condition_adapter=ConditionAdapterConfig(
                kind=adapter, width=32, num_layers=1, num_heads=2, num_tokens=6
            ),
            generator=GeneratorConfig(architecture=transformer),
            chunk_frames=12,
        )
    made = WorldModel.from_config(config, tokenizer)
    for parameter in made.generator.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.3)
    path = made.save_pretrained(folder / kind, dtype=torch.float32)
    return path, WorldModel.from_pretrained(path)


def start(model: WorldModel, seed: int, steps: int, previous: Any = None) -> Chunk[Condition]:
    """Return a chunk of drawn states, context and noise."""
    torch.manual_seed(seed)
    shape = model.config.latent_shape
    states = torch.randn(1, model.config.num_queries, model.backbone.width)
    context = torch.randn(1, model.config.context_latents, *shape[1:])
    conditions = (model.condition(model.read_state(states, context), context), model.null_condition(context))
    solver, overlapping = model.generator.solver(steps), model.config.sampler == "swin"
    return Chunk(torch.randn(1, *shape), solver, conditions, context, GUIDANCE, overlapping, previous)


async def play(model: WorldModel, processes: GeneratorProcesses | None) -> list[Tensor]:
    """Denoise chunks that join at different times and of which one is cancelled; then one that follows."""
    compute = Compute()
    loop = DenoisingLoop(model.generator, compute, processes=processes)
    chunks = [start(model, seed, steps) for seed, steps in ((1, 4), (2, 4), (3, 8), (4, 6))]
    chunks[2].step_cache, chunks[3].step_cache = StepCache(0.5), StepCache(0.5)
    cancelled = asyncio.create_task(loop.run(chunks[2], lambda step, _: step >= 2 and cancelled.cancel()))
    later: list[asyncio.Task[None]] = []

    def join(step: int, _: int) -> None:
        if step == 1:
            later.append(asyncio.create_task(loop.run(chunks[3])))

    await asyncio.gather(loop.run(chunks[0], join), loop.run(chunks[1]))
    await asyncio.gather(*later, cancelled, return_exceptions=True)
    after = start(model, 5, 4, chunks[0].trace)
    assert (after.previous is not None) == (model.config.sampler == "swin")
    await loop.run(after)
    compute.close()
    assert cancelled.cancelled() and not chunks[2].finished
    return [chunk.latents for chunk in (chunks[0], chunks[1], chunks[3], after)]


@pytest.mark.slow
@pytest.mark.parametrize(("parallelism", "kind", "adapter"), CASES)
def test_chunks_are_those_of_one_process(
    parallelism: Parallelism, kind: str, adapter: Adapter, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    if kind != "swin":
        pytest.importorskip("diffusers", reason="diffusers is not installed: openworldmodel[diffusers]")
    folder, model = save(parallelism, kind, adapter, tokenizer, tmp_path)
    with torch.no_grad():
        alone = asyncio.run(play(model, None))
        whole = num_bytes(model.generator.layers)
        if parallelism == "tensor":
            keep_part(model, 0, SIZE, model.device)
        processes = GeneratorProcesses.start(folder, model, SIZE, parallelism=parallelism)
        try:
            with collectives.counted() as sent:
                shared = asyncio.run(play(model, processes))
        finally:
            processes.close()
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(shared, alone, strict=True)]
    assert max(errors) <= CLOSE
    assert sent["ulysses" if parallelism == "sequence" else "tensor"] > 0
    share = num_bytes(model.generator.layers) / whole
    assert share == 1 if parallelism == "sequence" else 1 / SIZE < share < 0.65


# ---- the server ------------------------------------------------------------------------------------------


@pytest.fixture
def launch(servers: Processes, model_folder: Path, tmp_path: Path) -> Callable[..., Any]:
    """Starts a server with a shared generator; returns its process, that of the worker, and a client."""
    config = tmp_path / "serve.yaml"
    config.write_text("engine: in-process\n", encoding="utf-8")

    def run(parallelism: Parallelism, *options: str) -> Any:
        divided = [OPTIONS[parallelism], str(SIZES[parallelism])]
        server, client = servers.start(model_folder, "--config", str(config), *divided, *options)
        *rest, worker = psutil.Process(server.pid).children()
        assert len(rest) == SIZES[parallelism] - 2
        return server, worker, client

    return run


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", list(OPTIONS))
def test_server_with_a_shared_generator(
    parallelism: Parallelism, launch: Callable[..., Any], model_folder: Path, tmp_path: Path
) -> None:
    """Worlds, adapters and identity are those of one process; without the worker the server exits with 1."""
    trained = WorldModel.from_pretrained(model_folder)
    parts = {"backbone": TrainedConfig(lora_rank=2), "generator": TrainedConfig(lora_rank=2)}
    lora.add(trained, parts)
    for name, parameter in trained.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(std=0.3)
    lora.save(trained, parts, tmp_path / "look")
    server, worker, client = launch(parallelism, "--adapter", f"look={tmp_path / 'look'}")
    for name, folder in (("tiny", None), ("look", tmp_path / "look")):
        body = {"text": "a ball", "seed": 3, "num_inference_steps": 2, "guidance_scale": 2.0, "model": name}
        world = client.post("/v1/worlds", json=body).json()["id"]
        session = WorldModel.from_pretrained(model_folder, adapters=folder).session(3, 2, 2.0)
        session.reset(text="a ball")
        for index in (1, 2):
            there, here = frames_of(step(client, world, index)), session.step(f"action {index}").frames
            assert np.abs(there.astype(int) - here.astype(int)).max() <= 1
    stored = client.get(f"/v1/worlds/{world}/snapshot").content
    identity = Identity(identify(WorldModel.from_pretrained(model_folder)))
    SavedWorld.from_bytes(stored, trained, identity)  # refuses a world of other weights
    worker.kill()
    answer = client.post(f"/v1/worlds/{world}/step", json={"step_id": 3, "action": {"text": "wait"}})
    assert answer.status_code == 503
    assert server.wait(timeout=60) == 1


@pytest.mark.slow
def test_workers_end_with_a_killed_server(launch: Callable[..., Any]) -> None:
    server, worker, client = launch("sequence")
    body = {"prompt": "a ball", "num_frames": 64, "num_inference_steps": 64}
    video = client.post("/v1/videos", json=body).json()["id"]
    while client.get(f"/v1/videos/{video}").json()["status"] == "queued":
        time.sleep(0.05)
    server.send_signal(signal.SIGKILL)  # in the middle of a chunk
    worker.wait(timeout=10)


# ---- refusals --------------------------------------------------------------------------------------------


def test_what_cannot_be_divided_is_refused_with_the_numbers(
    model: WorldModel, make_model: Callable[..., WorldModel]
) -> None:
    heads = model.generator.num_heads
    for parallelism, advice in (("sequence", f"up to {heads}"), ("tensor", "a number that does")):
        check(model, heads, parallelism)
        with pytest.raises(
            ConfigError, match=rf"{OPTIONS[parallelism]} is {heads + 1}.* {heads} .* {advice}\."
        ):
            check(model, heads + 1, parallelism)
    many = make_model(generator=replace(model.config.generator, width=20 * 32, num_heads=20))
    (rows, columns), frames = model.config.codec.grid, model.config.context_latents
    with pytest.raises(ConfigError, match=rf" {frames * rows * columns} tokens"):
        check(many, frames * rows * columns + 1, "sequence")
    none = make_model(generator=None, num_inference_steps=0)
    with pytest.raises(ConfigError, match="no generator"):
        check(none, 2, "tensor")


def test_adapter_with_whole_weights_of_a_divided_generator_is_refused(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = WorldModel.from_pretrained(model_folder)
    lora.add(trained, parts := {"backbone": TrainedConfig(lora_rank=2)})
    lora.save(trained, parts, tmp_path / "look")
    name = "generator.project.weight"
    save_file({name: trained.get_parameter(name).data}, tmp_path / "look" / lora.WHOLE)
    options = ["--adapter", f"look={tmp_path / 'look'}", OPTIONS["tensor"], "3", "--engine", "in-process"]
    assert main(["serve", str(model_folder), "--port", "0", *options]) == 2
    assert name in capsys.readouterr().err
