"""Step caching: generator passes saved, and what that costs, against the same saving by fewer steps."""

import argparse
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from worldmodel.diffusion.sampler import Chunk, Denoiser
from worldmodel.diffusion.step_cache import StepCache
from worldmodel.eval.metrics import psnr
from worldmodel.models.conditioning import Condition
from worldmodel.models.generator.base import VideoGenerator
from worldmodel.models.generator.dit import DiT
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout import LocalEngine, WorldState, play_round
from worldmodel.rollout.session import sampling_params
from worldmodel.worlds.shapes.evaluation.cases import chance_cases, judge_frame

THRESHOLDS = (0.05, 0.1, 0.2, 0.4, 0.8)
WAN = {
    "_class_name": "WanTransformer3DModel",
    "num_attention_heads": 4,
    "attention_head_dim": 24,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 192,
    "num_layers": 4,
}
"""A tiny transformer; its weights are random."""


class Passes:
    """Counts the rows that a generator computes."""

    def __init__(self, generator: VideoGenerator) -> None:
        self.rows = 0
        generator.register_forward_hook(lambda _, inputs, __: self._count(inputs[0]))

    def _count(self, latents: Tensor) -> None:
        self.rows += len(latents)

    def of(self, run: Callable[[], np.ndarray]) -> tuple[np.ndarray, int]:
        """Return a result, and the rows that were computed for it."""
        self.rows = 0
        return run(), self.rows


def shapes(name: str, count: int, seed: int) -> None:
    """One round of chance acts: frames against those without caching, and frames that show an outcome."""
    model = WorldModel.from_pretrained(name)
    # Ancestral sampling has other noise with every number of steps, so frames could not be compared.
    assert isinstance(model.generator, DiT), "a model of the shapes world"
    model.generator.config = replace(model.generator.config, stochastic_sampling=False)
    config, engine, passes = model.config, LocalEngine(model.backbone), Passes(model.generator)
    cases = chance_cases(seed, 0, count)
    images, actions = np.stack([each.start for each in cases]), [each.action for each in cases]
    worlds = [WorldState.from_frames(model, images[:, None], tuple(range(count)))]

    def play(steps: int, threshold: float) -> np.ndarray:
        model.config = replace(config, num_inference_steps=steps, cache_threshold=threshold)
        (state,) = play_round(model, engine, worlds, actions, sampling_params(model, None, None))
        return state.frames

    def shown(frames: np.ndarray) -> float:
        right = [
            any(judge_frame(clip[-1], outcome.truths[-1]).strict for outcome in case.outcomes)
            for clip, case in zip(frames, cases, strict=True)
        ]
        return sum(right) / count

    steps = config.num_inference_steps
    whole, most = passes.of(lambda: play(steps, 0.0))
    print(f"{name}, {count} chance acts, {steps} steps: a possible outcome in {shown(whole):.0%}")
    settings = [(steps, threshold) for threshold in THRESHOLDS] + [(fewer, 0.0) for fewer in range(2, steps)]
    for fewer, threshold in settings:
        frames, rows = passes.of(lambda: play(fewer, threshold))  # noqa: B023
        quality = np.mean([psnr(a, b) for a, b in zip(frames, whole, strict=True)])
        label = f"threshold {threshold:g}" if threshold else f"{fewer} steps"
        print(f"{label:14s} {1 - rows / most:6.1%} saved  {quality:5.1f} dB  outcome {shown(frames):.0%}")


@torch.no_grad()
def wan(count: int, seed: int, steps: int = 30) -> None:
    """Chunks of a random transformer: latents against those without caching."""
    from worldmodel.models.generator.diffusers.base import Clip
    from worldmodel.models.generator.diffusers.wan import WanGenerator, WanTransformer3DModel

    torch.manual_seed(seed)
    transformer = WanTransformer3DModel(**{key: x for key, x in WAN.items() if key[0] != "_"}).eval()
    clip = Clip(1, 2, (8, 8), 4, 8, 16)
    generator = WanGenerator(transformer, WanGenerator.read_scheduler({}), clip)
    passes = Passes(generator)
    noise, context = torch.randn(count, 2, 16, 8, 8), torch.randn(count, 1, 16, 8, 8)
    condition = Condition(tokens=torch.randn(count, 8, generator.token_width))

    def denoise(steps: int, threshold: float) -> np.ndarray:
        cache = StepCache(threshold) if threshold else None
        chunk = Chunk(noise, generator.solver(steps), (condition,), context, step_cache=cache)
        denoiser: Denoiser[Condition] = Denoiser(generator)
        while not chunk.finished:
            denoiser.step([chunk])
        return chunk.latents.numpy()

    whole, most = passes.of(lambda: denoise(steps, 0.0))
    spread = float(whole.max() - whole.min())
    print(f"tiny Wan with random weights, {count} chunks, {steps} steps")
    settings = [(steps, threshold) for threshold in THRESHOLDS] + [(fewer, 0.0) for fewer in (24, 15, 10, 6)]
    for fewer, threshold in settings:
        made, rows = passes.of(lambda: denoise(fewer, threshold))  # noqa: B023
        quality = 10 * np.log10(spread**2 / np.square(made - whole).mean())
        label = f"threshold {threshold:g}" if threshold else f"{fewer} steps"
        print(f"{label:14s} {1 - rows / most:6.1%} saved  {quality:5.1f} dB")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="shapes-chance", help="a model of the shapes world, or wan")
    parser.add_argument("--num-samples", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    if args.model == "wan":
        wan(args.num_samples, args.seed)
    else:
        shapes(args.model, args.num_samples, args.seed)


if __name__ == "__main__":
    main()
