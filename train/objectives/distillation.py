"""Distillation: a generator learns to need fewer denoising steps."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from worldmodel.config import StageConfig
from worldmodel.data.loader import Batch
from worldmodel.diffusion.sampler import Chunk
from worldmodel.errors import ConfigError
from worldmodel.models.world_model import WorldModel
from worldmodel.train.objectives.base import Losses, Rounds, SampleRng, StageBatch
from worldmodel.train.objectives.generator import JointObjective
from worldmodel.train.objectives.state import predict_windows


@dataclass(frozen=True, kw_only=True)
class TaughtRounds(Rounds):
    """Rounds whose target is what the teacher makes of a noise, given a context."""

    noise: Float[Tensor, "b r t c h w"]


class DistillationObjective(JointObjective):
    """Flow matching between each noise and what the teacher makes of it ("reflow").

    The teacher is the model as the stage began, denoising in `teacher_steps` steps with
    `teacher_guidance_scale`. What it makes of a noise is certain, so the regression does not average possible
    futures, and paths become straight. The student learns the levels at which its own
    `model.num_inference_steps` steps begin, all of them on every path, since a path costs the teacher more.
    Self-rollouts are those of the student, so both see what the student will see when it is used.

    Sources: rectified flow (arXiv:2209.03003), sec. 2.2; InstaFlow (arXiv:2309.06380) for one step.
    """

    weights: Mapping[str, float] = {"flow": 1.0, "pixel": 0.3}
    tasks = ("rounds", "imagine")
    has_teacher = True

    def __init__(
        self, model: WorldModel, teacher_steps: int = 16, teacher_guidance_scale: float = 1.0
    ) -> None:
        super().__init__(model)
        self.weights = type(self).weights
        self.teacher_steps, self.teacher_guidance_scale = teacher_steps, teacher_guidance_scale
        generator = model.config.generator
        if teacher_guidance_scale != 1.0 and not (generator and generator.takes_guidance):
            raise ConfigError(
                f"teacher_guidance_scale is {teacher_guidance_scale:g}, but the model was trained with "
                "model.generator.condition_dropout 0 and takes no guidance; set it to 1."
            )

    @classmethod
    def of(cls, model: WorldModel, stage: StageConfig) -> "DistillationObjective":
        """Build the objective with the stage's settings of the teacher."""
        return cls(model, stage.teacher_steps, stage.teacher_guidance_scale)

    def check(self, model: WorldModel) -> None:
        """Check that there is a generator that denoises in steps of its own.

        Raises:
            ConfigError: there is none, or its chunks overlap, or no steps are wanted, or steps add noise, or
                the student would use guidance.
        """
        super().check(model)
        if model.config.sampler == "swin":
            raise ConfigError("The objective distill needs sampler: chunk; distil before training with swin.")
        if not model.config.num_inference_steps:
            raise ConfigError("model.num_inference_steps is 0; set the steps that the student will take.")
        if model.config.guidance_scale != 1.0:
            raise ConfigError(
                f"model.guidance_scale is {model.config.guidance_scale:g}, which the student would add to "
                "what it learned; set it to 1, and teacher_guidance_scale of the stage instead."
            )
        if model.generator.solver(model.config.num_inference_steps).adds_noise:
            raise ConfigError(
                "The objective distill learns what the teacher makes of a noise, which must decide it alone; "
                "set model.generator.stochastic_sampling to false, or model.generator.scheduler to one "
                "whose steps add no noise, such as CogVideoXDDIMScheduler."
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
        interval = model.config.guidance_interval
        chunk = Chunk(
            noise.flatten(0, 1), solver, tuple(conditions), past, guidance, guidance_interval=interval
        )
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
        rounds, rng = inputs.content, inputs.rng
        if not isinstance(rounds, TaughtRounds):
            return super().forward(model, inputs)
        actions = [list(episode.actions) for episode in inputs.batch.episodes]
        prediction = predict_windows(model, rounds.context, actions, rounds.frames)
        target, noise = rounds.target.flatten(0, 1), rounds.noise.flatten(0, 1)
        context = rounds.context.flatten(0, 1)
        sigmas = model.generator.step_sigmas(model.config.num_inference_steps)
        losses: Losses = {}
        for sigma in sigmas:
            level = target.new_full(target.shape[:2], sigma)
            output = model.generator.training_loss(target, noise, level, prediction.condition, context)
            for name, loss in self.generator_losses(model, rounds, output, rng).items():
                losses[name] = losses.get(name, 0.0) + loss / len(sigmas)
        return losses
