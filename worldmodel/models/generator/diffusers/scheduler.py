"""Schedulers of diffusers, as solvers of single chunks and as noise paths of training."""

import copy
from typing import Any

import torch
from diffusers.schedulers.scheduling_ddim_cogvideox import CogVideoXDDIMScheduler
from diffusers.schedulers.scheduling_dpm_cogvideox import CogVideoXDPMScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from worldmodel.diffusion.solver import row_generators
from worldmodel.errors import ModelError
from worldmodel.models.generator.base import Latents, PerFrame

Scheduler = (
    UniPCMultistepScheduler | FlowMatchEulerDiscreteScheduler | CogVideoXDDIMScheduler | CogVideoXDPMScheduler
)


class DiffusersSolver:
    """A copy of a scheduler for one chunk; it is stateful, so chunks cannot share one.

    If steps add noise, every row draws its own, seeded by its initial latents, so that the result of a row
    does not depend on the rest of the batch.
    """

    def __init__(self, scheduler: Scheduler, **timesteps: Any) -> None:
        """Copy a scheduler; `timesteps` are arguments of its `set_timesteps`."""
        self.scheduler: Any = copy.deepcopy(scheduler)
        if len(timesteps.get("sigmas", ())) == 1:  # stretching a single sigma divides by zero
            self.scheduler.register_to_config(shift_terminal=None)
        self.scheduler.set_timesteps(**timesteps)
        if hasattr(self.scheduler, "set_begin_index"):
            self.scheduler.set_begin_index(0)  # otherwise it searches among rounded timesteps
        self.num_steps = len(self.scheduler.timesteps)
        self._looks_back = isinstance(scheduler, CogVideoXDPMScheduler)
        self.adds_noise = self._looks_back or bool(self.scheduler.config.get("stochastic_sampling"))
        self._clean: Tensor | None = None
        self._generators: list[torch.Generator] | None = None

    def timestep(self, step: int) -> float:
        """Return the timestep at which a step begins."""
        return float(self.scheduler.timesteps[step])

    def step(self, step: int, prediction: Latents, latents: Latents) -> Latents:
        """Return the latents after a step of the scheduler."""
        scheduler, timestep = self.scheduler, self.scheduler.timesteps[step]
        if self._looks_back:
            back = scheduler.timesteps[step - 1] if step else None
            latents, self._clean = scheduler.step(
                prediction,
                self._clean,
                timestep,
                back,
                latents,
                generator=self._noise(latents),
                return_dict=False,
            )
            return latents
        noise = {"generator": self._noise(latents)} if self.adds_noise else {}
        return scheduler.step(prediction, timestep, latents, **noise, return_dict=False)[0]

    def _noise(self, latents: Tensor) -> list[torch.Generator]:
        if self._generators is None:
            self._generators = row_generators(latents)
        return self._generators


def fixed_noise(x: Float[Tensor, "b *shape"]) -> Float[Tensor, "b *shape"]:
    """Return noise like `x`, the same for every row and every call.

    It is added to context frames only, which are known anyway, so it need not be random.
    """
    noise = torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(0x5EED_0F_C0))
    return noise.to(x).expand_as(x)


class FlowPath:
    """The straight path, where the model predicts noise - data.

    Source: Lipman et al. 2023 (arXiv:2210.02747).
    """

    def __init__(self, scheduler: UniPCMultistepScheduler | FlowMatchEulerDiscreteScheduler) -> None:
        fresh: Any = copy.deepcopy(scheduler)
        count = int(fresh.config.num_train_timesteps)
        if isinstance(scheduler, UniPCMultistepScheduler):
            if not fresh.config.use_flow_sigmas or fresh.config.prediction_type != "flow_prediction":
                raise ModelError(
                    "The generator's scheduler is not one of flow matching; set use_flow_sigmas to true and "
                    "prediction_type to flow_prediction in its scheduler_config.json."
                )
            with torch.device("cpu"):
                fresh.set_timesteps(count)
        self.count, self.sigmas, self.timesteps = count, fresh.sigmas[:count], fresh.timesteps.float()

    def nearest(self, sigma: PerFrame) -> PerFrame:
        """Return the timesteps whose sigma is nearest."""
        return self.timesteps.to(sigma.device)[_nearest(self.sigmas, sigma)]

    def sigma(self, timestep: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the share of noise at timesteps; a rounded one counts, since the model is given that."""
        return timestep / self.count

    def add_noise(self, clean: Latents, noise: Latents, timestep: PerFrame) -> Latents:
        """Mix data and noise."""
        sigma = self.sigma(timestep)[:, :, None, None, None]
        return sigma * noise + (1 - sigma) * clean

    def target(self, clean: Latents, noise: Latents, timestep: PerFrame) -> Latents:
        """Return the velocity."""
        return noise - clean

    def clean(self, noisy: Latents, prediction: Latents, timestep: PerFrame) -> Latents:
        """Return the data that a velocity implies."""
        return noisy - self.sigma(timestep)[:, :, None, None, None] * prediction


class VariancePath:
    """The variance-preserving path, where the model predicts v.

    Source: Salimans & Ho 2022 (arXiv:2202.00512), appendix D.
    """

    def __init__(self, scheduler: CogVideoXDDIMScheduler | CogVideoXDPMScheduler) -> None:
        config: Any = scheduler.config
        if config.prediction_type != "v_prediction":
            raise ModelError(
                f"The generator's scheduler has prediction_type {config.prediction_type!r}; only "
                "v_prediction is supported; correct its scheduler_config.json."
            )
        self.scheduler = copy.deepcopy(scheduler)
        signal, noise = self.scheduler.alphas_cumprod.sqrt(), (1 - self.scheduler.alphas_cumprod).sqrt()
        self.sigmas = (noise / (signal + noise)).float()  # where the straight path has the same ratio

    def nearest(self, sigma: PerFrame) -> PerFrame:
        """Return the timesteps whose ratio of noise to signal is nearest to `sigma` to 1 - `sigma`."""
        return _nearest(self.sigmas, sigma).to(sigma.dtype)

    def sigma(self, timestep: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return noise : (noise + signal) at timesteps."""
        return self.sigmas.to(timestep)[timestep.long()]

    def add_noise(self, clean: Latents, noise: Latents, timestep: PerFrame) -> Latents:
        """Mix data and noise as the scheduler does."""
        return self._by_frame(self.scheduler.add_noise, clean, noise, timestep)

    def target(self, clean: Latents, noise: Latents, timestep: PerFrame) -> Latents:
        """Return the scheduler's velocity."""
        return self._by_frame(self.scheduler.get_velocity, clean, noise, timestep)

    def clean(self, noisy: Latents, prediction: Latents, timestep: PerFrame) -> Latents:
        """Return the data that v implies, by the inverse rotation."""
        # get_velocity(x, y) is a y - b x: with x = v and y = noisy it is a noisy - b v.
        return self._by_frame(self.scheduler.get_velocity, prediction, noisy, timestep)

    def _by_frame(self, make: Any, first: Tensor, second: Tensor, timestep: Tensor) -> Tensor:
        """Call the scheduler with every frame as a separate sample."""
        rows = [rearrange(x, "b t c h w -> (b t) c h w") for x in (first, second)]
        made = make(*rows, timestep.flatten().long())
        return rearrange(made, "(b t) c h w -> b t c h w", b=len(first))


NoisePath = FlowPath | VariancePath
"""The noise process of a model's training; timesteps are those of its scheduler."""


def _nearest(sigmas: Float[Tensor, " n"], sigma: PerFrame) -> Int[Tensor, "b t"]:
    return (sigma[..., None] - sigmas.to(sigma)).abs().argmin(dim=-1)
