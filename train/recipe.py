"""A training run for a dataset and a time: sizes, stages and steps, with an estimate of time and memory."""

import logging
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.flop_counter import FlopCounterMode

from worldmodel.actions import control_kinds
from worldmodel.config import (
    ActionConfig,
    BackboneConfig,
    CodecConfig,
    DataConfig,
    StageConfig,
    StateConfig,
    TrainConfig,
    TrainedConfig,
    ValidationConfig,
    VisionConfig,
    WorldModelConfig,
    build,
)
from worldmodel.config.model import SMALL_DECODER
from worldmodel.data.facts import DatasetFacts
from worldmodel.errors import InputError
from worldmodel.models.codec.autoencoder import Codec
from worldmodel.models.loading import deferred
from worldmodel.models.world_model import WorldModel
from worldmodel.train import finetune, start
from worldmodel.train.diagnostics.throughput import GIB, faster_precision, measured_tflops, step_flops
from worldmodel.train.distributed import PRECISIONS
from worldmodel.train.memory.estimate import StepEstimator
from worldmodel.train.memory.play import DeviceType
from worldmodel.train.run.log import read_metrics

EFFICIENCY = 0.25
"""Share of the speed of a large matrix product that a training step of a small model reaches."""
SECONDS = 2.0
"""Duration of the measurement: the best product of so long, because other programs slow some of them."""
CODEC = "codec-games"
"""Codec from which training starts, if each frame has latents of its own."""
FROM_SCRATCH = {"codec": (0.25, 900), "state": (0.3, 800), "rollout": (0.45, 450)}
"""Of each stage, its share of the time, and the steps with which a small world was learned: a larger model is
chosen if there is time for twice as many."""
FROM_CODEC = {"codec": (0.2, 300), "state": (0.3, 800), "rollout": (0.5, 450)}
"""The same if the codec starts from the shipped one. What it loses of an actor of a few pixels, nothing can
predict: of the contrast of twin futures of a game it kept 0.65 after 66 steps and 0.94 after 500."""
OVERHEAD = 0.85
"""Share of the time that is left for steps, beside starting, validation and checkpoints."""
MIN_STEPS, MAX_STEPS = 20, 20_000
TRIAL_STEPS = 4
"""Steps of each stage that are timed; the fastest counts, because the first ones also build things."""
CELL = CodecConfig.spatial_factor
"""Pixels along each side of a latent cell."""
WIDTHS = ((256, 4), (512, 8), (768, 12))
"""Width and layers of backbones, the smallest first."""
MAX_QUERIES = 32
"""Latent cells of a larger frame share a query: the backbone's work per round stays the same, and the state
head sees every cell anyway."""
HISTORY_ROUNDS = 6
"""Rounds that a world remembers; the last stage has no more than fit into its longest context."""
OBSERVED_ROUNDS = 3
"""Rounds after which it is known how things move, which one frame does not show."""
CONTEXT_LATENTS = 3
"""Latent frames that the state head reads: where they are, how fast they move, and whether that changes."""
MAX_BLOCKS = 36
"""Most blocks of cells that have a code of their own, in a world whose futures are uncertain. One code for
the whole picture was hardly used after as many steps (docs/reference/games.md)."""
FREE_NATS = {"state": 4.0, "rollout": 0.5}
"""Nats per round that the code may use without a loss, by stage: more at first, so that it does not leave out
what changes few cells."""
MEMORY_SHARE = 0.5
"""Share of the memory of the machine that activations may take."""


@dataclass(frozen=True)
class Machine:
    """Facts for which a run is planned."""

    device: str
    tflops: float
    """Measured speed of a matrix product in the faster precision."""
    memory: float
    """Memory in bytes."""
    precision: Literal["bf16", "fp32"] = "fp32"
    """The faster precision."""
    device_type: DeviceType = "cpu"

    @classmethod
    def measure(cls) -> "Machine":
        """Measure this machine."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        precision = faster_precision(device)
        # One thread: several wait for each other on busy cores, and then measure a tenth of the speed.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        (tflops,) = measured_tflops(device, (PRECISIONS[precision],), SECONDS)
        torch.set_num_threads(threads)
        if device.type == "cuda":
            memory = float(torch.cuda.mem_get_info()[1])
            return cls(torch.cuda.get_device_name(), tflops, memory, precision, "cuda")
        memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        return cls(f"{threads} CPU cores", threads * tflops, memory, precision)


@dataclass(frozen=True)
class Recipe:
    """A planned run."""

    config: TrainConfig
    seconds: dict[str, float]
    """Estimated time of each stage."""
    memory: float
    """Estimated memory in bytes."""
    parameters: int


def plan(facts: DatasetFacts, budget_s: float, machine: Machine, run_dir: str, max_side: int = 0) -> Recipe:
    """Choose the largest model, and the steps of its stages, for which the time suffices.

    Frames have at most `max_side` pixels along a side; 0: 64, or 128 on a machine with much memory.

    Raises:
        InputError: the time does not suffice for a few steps of the smallest model.
    """
    speed = machine.tflops * 1e12 * EFFICIENCY
    side = max_side or (64 if machine.memory < 64 * GIB else 128)
    candidates = [
        _candidate(facts, width, layers, side, OVERHEAD * budget_s * speed) for width, layers in WIDTHS
    ]
    model, stages, steps, costs = next(
        (each for each in reversed(candidates) if _suffices(each[0], each[2])), candidates[0]
    )
    # Even a few steps do the shipped codec no harm.
    fewest = min(each for name, each in steps.items() if name != "codec" or not _starts_from_codec(model))
    if fewest < MIN_STEPS:
        raise InputError(
            f"{budget_s:g} s suffice for {int(fewest)} steps of a stage on this machine; allow more "
            f"time, at least {math.floor(budget_s * MIN_STEPS / fewest) + 1} s."
        )
    config = TrainConfig(
        model=model,
        init_from={"codec": CODEC} if _starts_from_codec(model) else None,
        stages={
            name: replace(stage, steps=max(1, min(int(steps[name]), MAX_STEPS)))
            for name, stage in stages.items()
        },
        data=DataConfig(_sources(facts)),
        run_dir=run_dir,
        validation=ValidationConfig("held" if facts.held else ""),
    )
    last = list(stages)[-1]
    estimator = StepEstimator(replace(config, precision=machine.precision), last, machine.device_type)
    estimate = estimator.estimate(1)
    batch = stages[last].batch_size
    per_sample = estimate.activations / batch
    most = max(1, int(MEMORY_SHARE * machine.memory / max(per_sample, 1)))
    stages = {
        name: replace(stage, microbatch_size=most if stage.batch_size > most else 0)
        for name, stage in config.stages.items()
    }
    return Recipe(
        replace(config, stages=stages),
        {name: stage.steps * costs[name] / speed for name, stage in stages.items()},
        estimate.total - estimate.activations + min(most, batch) * per_sample,
        sum(estimator.played[batch].weights.sizes.values()),
    )


def timed(recipe: Recipe, budget_s: float) -> Recipe:
    """Run a few real steps of every stage, and set the steps for which the time suffices by their durations.

    Estimates from FLOPs are wrong by a factor of two or three in either direction, because a small model does
    not reach the speed of a large product, and data have to be decoded.

    Raises:
        WorldModelError: the config cannot be trained.
    """
    config = recipe.config
    trials: dict[str, StageConfig] = {}
    for name, stage in config.stages.items():
        # Steps on the model's own predictions take longer, and come by chance.
        trial = replace(stage, steps=TRIAL_STEPS)
        if min(stage.self_rollout) < 1:
            trials[name] = replace(trial, self_rollout=(0.0, 0.0))
        if any(stage.self_rollout):
            trials[f"{name} rollout"] = replace(trial, self_rollout=(1.0, 1.0))
    with tempfile.TemporaryDirectory(prefix="worldmodel-trial-") as folder, _quiet():
        run = Path(folder, "run")
        finetune.train(
            replace(
                config,
                stages=trials,
                run_dir=str(run),
                validation=ValidationConfig(),
                log_every=1,
                sample_every=0,
            )
        )
        records = read_metrics(run)
    seconds = {
        name: min(each["step_s"] for each in records[name].values() if "step_s" in each) for name in trials
    }
    costs, steps = {}, {}
    for name, stage in config.stages.items():
        share = sum(stage.self_rollout) / 2
        costs[name] = (1 - share) * seconds.get(name, 0.0) + share * seconds.get(f"{name} rollout", 0.0)
        steps[name] = _schedule(config.model)[name][0] * OVERHEAD * budget_s / costs[name]
    stages = {
        name: replace(stage, steps=max(1, min(int(steps[name]), MAX_STEPS)))
        for name, stage in config.stages.items()
    }
    durations = {name: stage.steps * costs[name] for name, stage in stages.items()}
    return replace(recipe, config=replace(config, stages=stages), seconds=durations)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the progress bars and the log of a trial."""
    logging.disable(logging.INFO)
    try:
        with (
            open(os.devnull, "w", encoding="utf-8") as nothing,
            redirect_stderr(nothing),
            redirect_stdout(nothing),
        ):
            yield
    finally:
        logging.disable(logging.NOTSET)


def _candidate(
    facts: DatasetFacts, width: int, layers: int, max_side: int, flops: float
) -> tuple[WorldModelConfig, dict[str, StageConfig], dict[str, float], dict[str, float]]:
    """Return a model of a size, its stages, the steps of each that some FLOPs allow, and FLOPs of a step.

    Steps are not rounded: the message about too little time is made of them.
    """
    model = _model(facts, width, layers, max_side)
    stages = _stages(facts, model)
    costs = {name: stage_flops(model, stage) for name, stage in stages.items()}
    steps = {name: _schedule(model)[name][0] * flops / cost for name, cost in costs.items()}
    return model, stages, steps, costs


def _starts_from_codec(model: WorldModelConfig) -> bool:
    return model.codec.temporal_factor == 1


def _schedule(model: WorldModelConfig) -> dict[str, tuple[float, int]]:
    return FROM_CODEC if _starts_from_codec(model) else FROM_SCRATCH


def _suffices(model: WorldModelConfig, steps: dict[str, float]) -> bool:
    return all(steps[name] >= 2 * least for name, (_, least) in _schedule(model).items())


def stage_flops(config: WorldModelConfig, stage: StageConfig) -> float:
    """Estimate the FLOPs of a step: of the codec, or of the frozen codec, the adapters and the backbone."""
    frame = codec_flops(config)
    if stage.objective == "codec":
        return 3 * stage.batch_size * 2 * config.codec.temporal_factor * frame
    model = _without_memory(config)
    backbone, _ = step_flops(model, stage)
    matrices = sum(
        parameter.numel()
        for part in (model.state, model.vision)
        if part is not None
        for parameter in part.parameters()
        if parameter.dim() > 1
    )
    rounds = stage.batch_size * stage.rounds
    trained = backbone + 6.0 * matrices * config.codec.cells * rounds
    return trained + rounds * config.chunk_frames * frame / 2


def _without_memory(config: WorldModelConfig) -> WorldModel:
    with deferred.empty_parameters():
        return start.build_model(TrainConfig(model=config))


def codec_flops(config: WorldModelConfig) -> float:
    """Return the FLOPs of encoding and decoding a frame."""
    codec = config.codec
    height, width = (side * codec.spatial_factor for side in codec.grid)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        mean, _ = Codec(codec).posterior(torch.empty(1, codec.temporal_factor, 3, height, width))
        Codec(codec).reconstruct(mean)
    return counter.get_total_flops() / codec.temporal_factor


def _model(facts: DatasetFacts, width: int, layers: int, max_side: int) -> WorldModelConfig:
    size = _frame_size(facts, max_side)
    decoder = SMALL_DECODER | {
        "hidden_size": width,
        "intermediate_size": width * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "num_key_value_heads": max(1, width // 128),
    }
    takes_text = facts.action["text"]
    action = build(ActionConfig, dict(facts.action))
    # Frames with an action each keep latents of their own.
    pairs = not facts.chunk_frames % 2 and action.per_round < facts.chunk_frames
    codec = CodecConfig(image_size=size, temporal_factor=2 if pairs else 1)
    queries, vision = _merges(codec.grid)
    return WorldModelConfig(
        codec=codec,
        vision=VisionConfig(merge=vision),
        query_merge=queries,
        backbone=BackboneConfig(architecture=decoder, vocab_size=512 if takes_text else 258),
        action=action,
        query_actions=any(action.takes[kind.name] for kind in control_kinds()),
        state=StateConfig(
            width=width, num_heads=width // 64, **(_code(codec.grid) if facts.uncertain else {})
        ),
        generator=None,
        fps=facts.fps,
        history_rounds=HISTORY_ROUNDS,
        context_latents=CONTEXT_LATENTS,
        chunk_frames=facts.chunk_frames,
        num_inference_steps=0,
        pace=facts.pace,
        outcomes=facts.outcomes,
    )


def _frame_size(facts: DatasetFacts, max_side: int) -> tuple[int, int]:
    """Return the size of frames in pixels: the data's, or the nearest whose cells can be merged.

    Tiles of a game that are latent cells of the data's frames are none of frames of another size.
    """
    height = facts.height
    width = facts.width
    if max(height, width) <= max_side and not (height % CELL or width % CELL):
        queries, vision = _merges((height // CELL, width // CELL))
        if min(height, width) >= 2 * CELL and max(queries, vision) <= 4:
            return height, width
    scale = min(1.0, max_side / max(height, width))
    most = max(1, max_side // (2 * CELL))
    rows, columns = (min(max(1, round(side * scale / (2 * CELL))), most) for side in (height, width))
    return 2 * CELL * rows, 2 * CELL * columns


def _merges(grid: tuple[int, int]) -> tuple[int, int]:
    """Return how many latent cells along each side share a query, and how many a vision token."""
    common = math.gcd(*grid)
    cells = math.prod(grid)
    divisors = [each for each in range(1, common + 1) if common % each == 0]
    queries = next((each for each in divisors if cells <= MAX_QUERIES * each**2), divisors[-1])
    return queries, next((each for each in divisors if each >= max(queries, 2)), 1)


def _code(grid: tuple[int, int]) -> dict[str, int]:
    """Return the settings of a code: blocks of cells choose for themselves, single cells if there are few."""
    common = math.gcd(*grid)
    sides = [side for side in range(1, common + 1) if common % side == 0]
    block = next((side for side in sides if math.prod(grid) <= MAX_BLOCKS * side**2), common)
    return {"code_groups": 1 if block == 1 else 2, "code_classes": 8, "code_block": block}


def _sources(facts: DatasetFacts) -> dict[str, Any]:
    return {"mine": facts.train} | ({"held": facts.held} if facts.held else {})


def _stages(facts: DatasetFacts, model: WorldModelConfig) -> dict[str, StageConfig]:
    """Return the codec, state alignment over a few recorded rounds, and over many that the model predicts."""
    learned = {"backbone": TrainedConfig(), "adapters": TrainedConfig()}
    tasks = {"rounds": 1.0}
    batch = 48 if facts.num_episodes >= 48 else 16
    width = StateConfig.width if model.state is None else model.state.width
    lr = 2e-3 * math.sqrt(256 / width)
    free_nats = {name: {"free_nats": nats} if facts.uncertain else {} for name, nats in FREE_NATS.items()}
    return {
        "codec": StageConfig(
            "codec", batch_size=32, lr=2e-3, muon_lr=0, weight_decay=0, rounds=1, tasks=tasks,
            train={"codec": TrainedConfig()},
        ),
        "state": StageConfig(
            "state", objective_args=free_nats["state"], batch_size=batch // 4, lr=lr, constant_fraction=0.9,
            rounds=4, tasks=tasks, train=learned,
        ),
        "rollout": StageConfig(
            "state", objective_args={"observed_rounds": OBSERVED_ROUNDS, **free_nats["rollout"]},
            batch_size=batch // 6, lr=lr / 2, muon_lr=StageConfig.muon_lr / 2, constant_fraction=0.0,
            rounds=max(HISTORY_ROUNDS + 2, 2 * HISTORY_ROUNDS // model.action.per_round),
            self_rollout=(1.0, 1.0), tasks=tasks, train=learned,
        ),
    }  # fmt: skip
