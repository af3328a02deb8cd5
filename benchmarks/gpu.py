"""Figures of a GPU in one table; all models have random weights, but for shapes-tiny.

    training    a step of our generator with 0.3 and with 1 billion weights, and of a 7 B language model with
                Wan's 1.3 B generator by LoRA: FLOP/s against the peak, memory against `info --plan`
    kernels     attention, forward and backward, against cuDNN's
    inference   frames per second of a session

FLOPs are those of the layers of language model and generator; what is computed twice counts once. Steps take
random latents: the codec does not run. `--tiny --device cpu` runs the same code on small models.
"""

import argparse
import gc
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from worldmodel import config as configs
from worldmodel.actions import Action
from worldmodel.config import CodecConfig, GeneratorConfig, StageConfig, TrainConfig, TrainedConfig
from worldmodel.data.loader import Batch
from worldmodel.episodes import EncodedObservations, Episode
from worldmodel.eval.speed import machine
from worldmodel.eval.table import markdown
from worldmodel.models.layers import attention
from worldmodel.models.world_model import WorldModel
from worldmodel.parallel.layout import Layout
from worldmodel.parallel.mask_rules import Kind
from worldmodel.train import distributed
from worldmodel.train.diagnostics.throughput import GIB, measured_tflops, peak_memory_gib
from worldmodel.train.memory.estimate import StepEstimator
from worldmodel.train.tokenizer import build_tokenizer
from worldmodel.train.trainer import Trainer

DENSE_BF16_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200": 989.5,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.0,
    "H100": 989.5,
    "A100": 312.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
}
"""Peaks of dense products in bf16, from the makers' data sheets, by part of the device's name: the first that
fits."""
LORA_RANK = 16
ACTION = Action(text="walk on")


@dataclass(frozen=True)
class Figure:
    """A row of the table."""

    name: str
    value: float | None
    """None: the device has no such kernel, or too little memory."""
    unit: str
    reference: float | None = None
    against: str = ""
    """Description of the reference."""

    def cells(self) -> tuple[str, ...]:
        """Return the row as text."""
        ratio = self.value / self.reference if self.value and self.reference else None
        compared = f"{self.reference:.3g} ({self.against})" if self.reference else "–"
        return (
            self.name,
            "–" if self.value is None else f"{self.value:.3g} {self.unit}",
            compared,
            "–" if ratio is None else f"{100 * ratio:.0f} %",
        )


def dense_peak(name: str) -> float | None:
    """Return the peak of a device in dense bf16 TFLOP/s; None if it is not known."""
    return next((peak for part, peak in DENSE_BF16_TFLOPS.items() if part in name), None)


# ---- models --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    name: str
    config: TrainConfig


def our_generator(name: str, width: int, num_layers: int, rounds: int, tiny: bool) -> Case:
    """Return our generator beside a small language model, all trained in full on 5 x 1024 tokens a round."""
    model = configs.WorldModelConfig(
        codec=CodecConfig(image_size=32 if tiny else 256),
        generator=GeneratorConfig(
            width=64 if tiny else width,
            num_layers=2 if tiny else num_layers,
            num_heads=2 if tiny else width // 128,
        ),
    )
    return Case(name, training_config(model, "full", rounds))


def pretrained_sizes(tiny: bool) -> Case:
    """Return a model of the sizes of Qwen2.5-VL-7B and Wan2.1-1.3B in PAN's arrangement, trained by LoRA."""
    model = configs.load("pan").model
    backbone, vision, generator = (
        part.architecture for part in (model.backbone, model.vision, model.generator)
    )
    generator = {name: value for name, value in generator.items() if name != "text_encoder"}
    generator |= {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}
    codec = model.codec.architecture
    if tiny:
        layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320}
        backbone = backbone | layers | {"hidden_size": 64, "intermediate_size": 96}
        tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
        vision = vision | tower | {"out_hidden_size": 64, "fullatt_block_indexes": [1]}
        heads = {"num_attention_heads": 2, "attention_head_dim": 24}
        generator |= heads | {"num_layers": 2, "ffn_dim": 64, "freq_dim": 32}
        codec = codec | {"base_dim": 8, "num_res_blocks": 1}
    model = replace(
        model,
        codec=replace(
            model.codec,
            architecture=codec,
            pretrained=None,
            image_size=64 if tiny else model.codec.image_size,
        ),
        backbone=replace(model.backbone, architecture=backbone, pretrained=None, vocab_size=320),
        vision=replace(model.vision, architecture=vision, encoder=None),
        condition_adapter=replace(model.condition_adapter, text=False),
        generator=replace(model.generator, architecture=generator, pretrained=None, dtype="bf16"),
        chunk_frames=8 if tiny else model.chunk_frames,
        queries=8 if tiny else model.queries,
        num_inference_steps=2 if tiny else 20,
    )
    config = replace(training_config(model, "lora", 2), activations="recompute")
    return Case("7 B language model, 1.3 B Wan, LoRA", config)


def training_config(
    model: configs.WorldModelConfig, method: Literal["lora", "full"], rounds: int
) -> TrainConfig:
    """Return a run that trains the adapters in full, backbone and generator in full or by LoRA."""
    large = TrainedConfig(lora_rank=LORA_RANK if method == "lora" else 0)
    parts = ("action", "queries", "condition_adapter", *(("state",) if model.has_state else ()))
    train = {name: TrainedConfig() for name in parts}
    train |= {"backbone": large, "generator" if model.generator.is_ours else "generator.network": large}
    stage = StageConfig(
        "joint", batch_size=1, rounds=rounds, tasks={"rounds": 1.0}, train=train, lr=1e-5, muon_lr=0
    )
    return TrainConfig(model=model, stages={"joint": stage})


def cases(tiny: bool) -> list[Case]:
    """Return the models that are trained."""
    return [
        our_generator("our generator, 0.3 B", 1024, 20, 2, tiny),
        our_generator("our generator, 1 B", 2048, 16, 1, tiny),
        pretrained_sizes(tiny),
    ]


def random_episode(model: configs.WorldModelConfig, rounds: int) -> Episode:
    """Draw latents, and frames if a vision encoder reads them."""
    rng, (frames, *cell) = np.random.default_rng(0), model.latent_shape

    def latents(count: int) -> np.ndarray:
        return rng.standard_normal((rounds, count, *cell), np.float32)

    seen: tuple[np.ndarray, ...] = ()
    if not model.vision.sees_latents:
        shape = *configs.height_width(model.codec.image_size), 3
        lengths = [1] + [model.chunk_frames] * rounds
        seen = tuple(rng.integers(0, 256, (length, *shape), np.uint8) for length in lengths)
    encoded = EncodedObservations(latents(model.context_latents), latents(frames))
    return Episode("random", seen, (ACTION,) * rounds, encoded=encoded)


# ---- measurements --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """The device, and how much is measured on it."""

    device: torch.device
    tiny: bool

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def precision(self) -> str:
        """Precision of steps and kernels."""
        return "bf16" if self.cuda else "fp32"

    @property
    def name(self) -> str:
        """Name of the device."""
        return torch.cuda.get_device_name(self.device) if self.cuda else str(machine()["processor"])

    def wait(self) -> None:
        """Wait until the device has computed what it was given."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object], warm_up: int, repeats: int) -> float:
        """Return the mean seconds of a call."""
        for _ in range(warm_up):
            run()
        self.wait()
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        self.wait()
        return (time.perf_counter() - began) / repeats


def training(setting: Setting) -> Iterator[Figure]:
    """Measure steps of every model, of our own also compiled."""
    for case in cases(setting.tiny):
        compiled = (False, True) if setting.cuda and case.config.model.generator.is_ours else (False,)
        for compile_ in compiled:
            config = replace(case.config, precision=setting.precision, compile=compile_)
            name = f"step of {case.name}" + ", compiled" * compile_
            try:
                yield from step_figures(name, replace(case, config=config), setting)
            except torch.OutOfMemoryError:
                yield Figure(f"{name}: out of memory", None, "")
            gc.collect()
            if setting.cuda:
                torch.cuda.empty_cache()


def step_figures(name: str, case: Case, setting: Setting) -> Iterator[Figure]:
    """Measure a step of one sample."""
    config = case.config
    stage = config.stages["joint"]
    batch = Batch(0, "rounds", (0,), [random_episode(config.model, stage.rounds)])
    mesh = distributed.init(config)
    try:
        trainer, _ = Trainer.start(config, "joint", mesh, None)
        flops = trainer.step([batch], stop=False).flops
        if setting.cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds = setting.seconds(lambda: trainer.step([batch], stop=False), 1, 2 if setting.tiny else 10)
        held = peak_memory_gib(mesh.device) if setting.cuda else None
    finally:
        distributed.shutdown()
    yield Figure(f"{name}: time", seconds, "s")
    rate = flops / seconds / 1e12
    (product,) = measured_tflops(setting.device, (distributed.PRECISIONS[setting.precision],))
    for reference, against in ((dense_peak(setting.name), "dense bf16 peak"), (product, "measured product")):
        yield Figure(f"{name}: model FLOP/s", rate, "TFLOP/s", reference, against)
    device = "cuda" if setting.cuda else "cpu"
    planned = StepEstimator(config, "joint", device).estimate(1).total
    yield Figure(f"{name}: peak memory", held, "GiB", planned / GIB, "info --plan")


HEADS, KEY_HEADS, WIDTH = 16, 8, 128
"""Of `kernels`."""


def kernels(setting: Setting) -> Iterator[Figure]:
    """Measure attention with grouped keys; cuDNN's has as many keys as queries, and is causal."""
    names = ["sdpa", "flex" if setting.cuda else "reference"]
    names += ["flash"] * bool(setting.cuda and importlib.util.find_spec("flash_attn"))
    backends = {"flash of torch": SDPBackend.FLASH_ATTENTION}
    if setting.cuda:
        backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION} | backends
    for length in (256,) if setting.tiny else (8192, 32_768):
        baseline: tuple[float | None, str] = (None, "")
        for name, backend in backends.items():
            fused = partial(F.scaled_dot_product_attention, is_causal=True)
            with sdpa_kernel(backend):
                rate = attention_rate(setting, fused, length, HEADS, Layout.causal(length))
            yield Figure(f"attention, causal, {length} tokens, {name}", rate, "TFLOP/s", *baseline)
            baseline = baseline if baseline[0] else (rate, f"{name}, causal")
        for mask, layout in masks(length).items():
            for name in names:
                if name == "flash" and layout.cu_seqlens() is None:
                    continue
                with attention.using(name):
                    run = partial(attention.attend, layout=layout)
                    rate = attention_rate(setting, run, length, KEY_HEADS, layout)
                yield Figure(f"attention, {mask}, {length} tokens, {name}", rate, "TFLOP/s", *baseline)


def attention_rate(
    setting: Setting, run: Callable[..., torch.Tensor], length: int, key_heads: int, layout: Layout
) -> float | None:
    """Return TFLOP/s forward and backward: 14 x area x heads x width FLOPs, masked pairs count nothing."""
    dtype = distributed.PRECISIONS[setting.precision]
    shapes = [(1, heads, length, WIDTH) for heads in (HEADS, key_heads, key_heads)]
    parts = [torch.randn(s, device=setting.device, dtype=dtype, requires_grad=True) for s in shapes]
    try:
        seconds = setting.seconds(lambda: run(*parts).sum().backward(), 2, 2 if setting.tiny else 10)
    except RuntimeError as error:  # out of memory, or no such kernel on this device
        print(f"{type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None
    return 14 * int(layout.area().sum()) * HEADS * WIDTH / seconds / 1e12


def masks(length: int) -> dict[str, Layout]:
    """Return the masks of text, of frames, and of both packed into one row."""
    frame = min(256, length // 8)
    quarter, frames = length // 4, length // 2 // frame
    packed = [[(Kind.TEXT, quarter)], [(Kind.FRAME, frame)] * frames, [(Kind.FULL, quarter)]]
    return {
        "causal": Layout.causal(length),
        "frames": Layout.rows([[[(Kind.FRAME, frame)] * (length // frame)]]),
        "packed": Layout.rows([packed]),
    }


def inference(setting: Setting) -> Iterator[Figure]:
    """Measure the frames per second of sessions."""
    yield frames_per_second("shapes-tiny", WorldModel.from_pretrained("shapes-tiny"), setting)
    config = pretrained_sizes(setting.tiny).config
    model = WorldModel.from_config(config.model, build_tokenizer(config))
    name = f"7 B language model, 1.3 B Wan, {config.model.num_inference_steps} steps"
    yield frames_per_second(name, model, setting)


def frames_per_second(name: str, model: WorldModel, setting: Setting) -> Figure:
    """Play rounds of a session."""
    try:
        session = model.eval().requires_grad_(False).to(setting.device).session(0)
        session.reset(np.full((*configs.height_width(model.config.codec.image_size), 3), 128, np.uint8))
        repeats = 2 if setting.tiny or not model.config.generator.is_ours else 50
        seconds = setting.seconds(lambda: session.step(ACTION), 1 if setting.tiny else 2, repeats)
    except torch.OutOfMemoryError:
        return Figure(f"session of {name}: out of memory", None, "")
    return Figure(f"session of {name}", model.config.chunk_frames / seconds, "frames/s")


# ---- the table -----------------------------------------------------------------------------------------

PARTS = {"training": training, "kernels": kernels, "inference": inference}


def write(folder: Path, setting: Setting, figures: list[Figure]) -> None:
    """Write the table and the same as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    head = ("Figure", "Measured", "Reference", "Of the reference")
    where = f"{setting.name}, torch {torch.__version__}"
    where += "; tiny models, which say nothing about the device" * setting.tiny
    text = f"{where}\n\n{markdown([head, *(figure.cells() for figure in figures)])}\n"
    (folder / "gpu.md").write_text(text, encoding="utf-8")
    found = {"device": setting.name, "tiny": setting.tiny, "machine": machine()}
    found["figures"] = [asdict(figure) for figure in figures]
    (folder / "gpu.json").write_text(json.dumps(found, indent=2), encoding="utf-8")


def main() -> None:
    """Measure, and write the table after every figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script itself")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu"), help="folder of gpu.md and gpu.json")
    args = parser.parse_args()
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the trainer takes a GPU where it finds one
    elif not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device; --tiny --device cpu tries the script without one.")
    setting, figures = Setting(torch.device(args.device), args.tiny), []
    for name in args.parts:
        for figure in PARTS[name](setting):
            figures.append(figure)
            print(" | ".join(figure.cells()), flush=True)
            write(args.out, setting, figures)


if __name__ == "__main__":
    main()
