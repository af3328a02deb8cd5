"""A training step on precomputed latents and text states, against the step that computes them.

Both are steps of one trainer on the same episodes, taken in turns; the time to decode videos is not counted.
"""

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from worldmodel import config as configs
from worldmodel.config import (
    CodecConfig,
    ConditionAdapterConfig,
    GeneratorConfig,
    StageConfig,
    TrainConfig,
    TrainedConfig,
    VisionConfig,
)
from worldmodel.data.latents import ChunkLatents, LatentFormat
from worldmodel.data.loader import Batch
from worldmodel.data.sources import open_sources
from worldmodel.media.tensors import to_tensor
from worldmodel.models.rounds import RoundEncoder
from worldmodel.models.world_model import WorldModel
from worldmodel.train import distributed
from worldmodel.train.trainer import Trainer
from worldmodel.types import Episode

WAN: dict[str, Any] = {
    "_class_name": "WanTransformer3DModel",
    "num_attention_heads": 4,
    "attention_head_dim": 24,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 64,
    "freq_dim": 256,
    "ffn_dim": 256,
    "num_layers": 4,
    "rope_max_seq_len": 32,
    "text_encoder": {
        "model_type": "umt5",
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 4,
        "num_heads": 4,
        "vocab_size": 384,
    },
}
WAN_VAE: dict[str, Any] = {
    "_class_name": "AutoencoderKLWan",
    "base_dim": 8,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
}


def wan(config: TrainConfig) -> TrainConfig:
    """Replace codec and generator of a config by tiny ones of Wan with random weights."""
    model = replace(
        config.model,
        codec=CodecConfig(image_size=64, temporal_factor=4, latent_channels=16, architecture=WAN_VAE),
        vision=VisionConfig(),
        condition_adapter=ConditionAdapterConfig("stream", text=True),
        generator=GeneratorConfig(architecture=WAN),
        num_inference_steps=4,
    )
    train = {name: TrainedConfig() for name in ("adapters", "generator.network")}
    stage = replace(config.stages["joint"], objective="generator", train=train)
    return replace(config, model=model, stages={"joint": stage}, init_from=None)


def encode(model: WorldModel, episode: Episode) -> Episode:
    """Return an episode with bfloat16 latents and text states in place of its frames."""

    def stored(tensor: torch.Tensor) -> np.ndarray:
        return tensor.cpu().bfloat16().contiguous().view(torch.uint16).numpy()

    frames = to_tensor([np.concatenate(episode.observations)], model.device)
    chunks = {name: stored(x[0]) for name, x in RoundEncoder.of(model).chunks(frames).items()}
    latents = ChunkLatents(chunks, LatentFormat.of(model.config))
    states = None
    if model.config.condition_adapter.text:
        texts = dict.fromkeys(["", *(action.text or "" for action in episode.actions)])
        made = model.generator.compute_text_states(list(texts))
        states = {text: stored(state) for text, state in made.items()}
    encoded = latents.observations("rounds", 0, len(episode.actions))
    return replace(episode, observations=(), encoded=encoded, text_states=states)


def measure(config: TrainConfig, steps: int) -> tuple[list[float], list[float]]:
    """Return the seconds of steps that encode, and of those that do not."""
    stage: StageConfig = config.stages["joint"]
    mesh = distributed.init(config)
    try:
        trainer, _ = Trainer.start(config, "joint", mesh, None)
        source = next(iter(open_sources(config.data, config.model).values()))
        indices = tuple(range(stage.batch_size))
        plain = [source.at(index).episode("rounds", 0, index, stage.rounds) for index in indices]
        with torch.no_grad():
            encoded = trainer.root(lambda: [encode(trainer.root.model, each) for each in plain])
        times: tuple[list[float], list[float]] = ([], [])
        for step in range(-2, steps):
            for episodes, found in zip((plain, encoded), times, strict=True):
                began = time.perf_counter()
                trainer.step([Batch(max(step, 0), "rounds", indices, episodes)], stop=False)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                if step >= 0:
                    found.append(time.perf_counter() - began)
        return times
    finally:
        distributed.shutdown()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=4)
    args = parser.parse_args()
    config = configs.load("shapes_tiny")
    stage = replace(config.stages["joint"], batch_size=args.batch_size, microbatch_size=0)
    config = replace(config, stages={"joint": stage})
    for name, each in (("shapes-tiny, joint", config), ("tiny Wan with text", wan(config))):
        encoding, stored = measure(each, args.steps)
        for label, pick in (("median", statistics.median), ("min", min)):
            a, b = pick(encoding), pick(stored)
            print(f"{name}: {label} {a * 1e3:.0f} ms encoding, {b * 1e3:.0f} ms precomputed: {a / b:.2f}x")


if __name__ == "__main__":
    main()
