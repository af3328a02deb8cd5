"""Training of a generator for a few denoising steps: by a teacher, or by the nearest of several samples."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from worldmodel.data.loader import Batch
from worldmodel.diffusion.sampler import Chunk
from worldmodel.errors import ConfigError
from worldmodel.models.conditioning import Condition
from worldmodel.models.world_model import WorldModel
from worldmodel.train.objectives.base import Losses, Rounds, SampleRng, StageBatch
from worldmodel.train.objectives.generator import JointObjective
from worldmodel.train.objectives.state import predict_windows


@dataclass(frozen=True, kw_only=True)
class TaughtRounds(Rounds):
    """Rounds whose target is what the teacher makes of a noise, given a context."""

    noise: Float[Tensor, "b r t c h w"]


class FewStepsObjective(JointObjective):
    """Training of the student's own `model.num_inference_steps` steps, all of them on every path."""

    from_own_steps: ClassVar[bool] = False
    """Whether each step begins where the student's step before it ended, else on the straight path."""
    weights: Mapping[str, float] = {"flow": 1.0, "pixel": 0.3}
    tasks = ("rounds", "imagine")

    def __init__(self, model: WorldModel) -> None:
        super().__init__(model)
        self.weights = type(self).weights

    def check(self, model: WorldModel) -> None:
        """Check that there is a generator that denoises in steps of its own.

        Raises:
            ConfigError: there is none, or its chunks overlap, or no steps are wanted, or steps add noise, or
                the student would use guidance.
        """
        super().check(model)
        if model.config.sampler == "swin":
            raise ConfigError(
                "The objectives distill and imle need sampler: chunk; use them before training with swin."
            )
        if not model.config.num_inference_steps:
            raise ConfigError("model.num_inference_steps is 0; set the steps that the student will take.")
        if model.config.guidance_scale != 1.0:
            raise ConfigError(
                f"model.guidance_scale is {model.config.guidance_scale:g}, which the student would add to "
                "what it learned; set it to 1 (objective distill has teacher_guidance_scale instead)."
            )
        if model.config.has_code:
            raise ConfigError(
                "The objectives distill and imle let noise decide between futures, which the code of this "
                "model's states does; set model.state.code_groups to 0."
            )
        if model.generator.solver(model.config.num_inference_steps).adds_noise:
            raise ConfigError(
                "The objectives distill and imle learn what becomes of a noise, which must decide it alone; "
                "set model.generator.stochastic_sampling to false, or model.generator.scheduler to one "
                "whose steps add no noise, such as CogVideoXDDIMScheduler."
            )

    def step_losses(
        self,
        model: WorldModel,
        rounds: Rounds,
        noise: Float[Tensor, "b t c h w"],
        condition: Condition,
        context: Float[Tensor, "b s c h w"],
        rng: SampleRng,
    ) -> Losses:
        """Sum the losses of the steps that lead from a noise to the target of every round."""
        target = rounds.target.flatten(0, 1)
        sigmas = model.generator.step_sigmas(model.config.num_inference_steps)
        losses: Losses = {}
        for sigma, following in zip(sigmas, [*sigmas[1:], None], strict=True):
            level = target.new_full(target.shape[:2], sigma)
            output = model.generator.training_loss(target, noise, level, condition, context)
            for name, loss in self.generator_losses(model, rounds, output, rng).items():
                losses[name] = losses.get(name, 0.0) + loss / len(sigmas)
            if self.from_own_steps and following:
                # With the target at the next level, this noise mixes to where the student's step ends.
                noise = noise + (1 / following - 1 / sigma) * (output.clean.detach() - target)
        return losses


class DistillationObjective(FewStepsObjective):
    """Flow matching between each noise and what the teacher makes of it ("reflow").

    The teacher is the model as the stage began, denoising in `teacher_steps` steps with
    `teacher_guidance_scale`. What it makes of a noise is certain, so the regression does not average possible
    futures, and paths become straight. Self-rollouts are the student's, so both see what the student
    will see when it is used.

    Sources: rectified flow (arXiv:2209.03003), sec. 2.2; InstaFlow (arXiv:2309.06380) for one step.
    """

    has_teacher = True

    def __init__(
        self, model: WorldModel, teacher_steps: int = 16, teacher_guidance_scale: float = 1.0
    ) -> None:
        super().__init__(model)
        if teacher_steps < 1:
            raise ConfigError(f"A stage has teacher_steps {teacher_steps}; use 1 or more.")
        if not math.isfinite(teacher_guidance_scale):
            raise ConfigError(
                f"A stage has teacher_guidance_scale {teacher_guidance_scale}; use a finite number."
            )
        self.teacher_steps, self.teacher_guidance_scale = teacher_steps, teacher_guidance_scale
        generator = model.config.generator
        if teacher_guidance_scale != 1.0 and not (generator and generator.takes_guidance):
            raise ConfigError(
                f"teacher_guidance_scale is {teacher_guidance_scale:g}, but the model was trained with "
                "model.generator.condition_dropout 0 and takes no guidance; set it to 1."
            )

    def prepare(self, model: WorldModel, batch: Batch, rng: SampleRng) -> StageBatch:
        inputs = super().prepare(model, batch, rng)
        if not isinstance(inputs.content, Rounds):
            return inputs
        context, frames = self.observed(model, inputs)
        return replace(inputs, content=replace(inputs.content, context=context, frames=frames))

    def teach(self, model: WorldModel, inputs: StageBatch) -> StageBatch:
        """Let the teacher denoise."""
        rounds, guidance = inputs.content, self.teacher_guidance_scale
        if not isinstance(rounds, Rounds):
            return inputs
        actions = [list(episode.actions) for episode in inputs.batch.episodes]
        conditions = [predict_windows(model, rounds.context, actions, rounds.frames).condition]
        past = rounds.context.flatten(0, 1)
        if guidance != 1.0:
            conditions.append(model.null_condition(past))
        noise = inputs.rng.normal(*rounds.target.shape[1:])
        solver = model.generator.solver(self.teacher_steps)
        chunk = Chunk(noise.flatten(0, 1), solver, tuple(conditions), past, guidance)
        (made,) = model.denoise([chunk])
        taught = TaughtRounds(
            context=rounds.context,
            target=made.view_as(rounds.target),
            changed=rounds.changed,
            scored=rounds.scored,
            frames=rounds.frames,
            noise=noise,
        )
        return replace(inputs, content=taught)

    def forward(self, model: WorldModel, inputs: StageBatch) -> Losses:
        rounds = inputs.content
        if not isinstance(rounds, TaughtRounds):
            return super().forward(model, inputs)
        actions = [list(episode.actions) for episode in inputs.batch.episodes]
        condition = predict_windows(model, rounds.context, actions, rounds.frames).condition
        noise, context = rounds.noise.flatten(0, 1), rounds.context.flatten(0, 1)
        return self.step_losses(model, rounds, noise, condition, context, inputs.rng)


class ImleObjective(FewStepsObjective):
    """Regression of the target from that of `num_candidates` noises whose sample is nearest to it.

    Different futures of one state are learned by different noises, so nothing is averaged, and every future
    that is seen is made by some noise; noises that are never the nearest learn nothing. There is no teacher,
    whose errors a student would inherit. Later steps correct what earlier ones got wrong.

    Sources: implicit maximum likelihood estimation (arXiv:1809.09087), algorithm 1; IMLE Policy
    (arXiv:2502.12371), which generates actions by it in one step; DMD2 (arXiv:2405.14867), sec. 4.5, for
    steps that begin where the student's ended.
    """

    from_own_steps = True

    def __init__(self, model: WorldModel, num_candidates: int = 8) -> None:
        super().__init__(model)
        if num_candidates < 1:
            raise ConfigError(f"A stage has num_candidates {num_candidates}; use 1 or more.")
        self.num_candidates = num_candidates

    def forward(self, model: WorldModel, inputs: StageBatch) -> Losses:
        rounds = inputs.content
        if not isinstance(rounds, Rounds):
            return super().forward(model, inputs)
        prediction = self.predict(model, inputs)
        condition, context = prediction.condition, prediction.context.flatten(0, 1)
        noise = self.nearest(model, rounds, condition, context, inputs.rng)
        return self.step_losses(model, rounds, noise, condition, context, inputs.rng)

    @torch.no_grad()
    def nearest(
        self,
        model: WorldModel,
        rounds: Rounds,
        condition: Condition,
        context: Float[Tensor, "b s c h w"],
        rng: SampleRng,
    ) -> Float[Tensor, "b t c h w"]:
        """Return the noise of every round, of several, whose first step comes nearest to the target."""
        target = rounds.target.flatten(0, 1)
        sigma = model.generator.step_sigmas(model.config.num_inference_steps)[0]
        level = target.new_full(target.shape[:2], sigma)
        noises, errors = [], []
        for _ in range(self.num_candidates):
            noises.append(rng.normal(*rounds.target.shape[1:]).flatten(0, 1))
            clean = model.generator.training_loss(target, noises[-1], level, condition, context).clean
            errors.append((clean - target).pow(2).flatten(1).sum(dim=1))
        best = torch.stack(errors).argmin(dim=0)
        return torch.stack(noises)[best, torch.arange(len(target), device=target.device)]
