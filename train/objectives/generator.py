"""Training of the video generator, alone or together with the parts that condition it."""

from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor

from worldmodel.actions import Action
from worldmodel.data.loader import Batch
from worldmodel.diffusion import swin
from worldmodel.diffusion.sampler import Chunk
from worldmodel.diffusion.schedule import training_sigmas
from worldmodel.errors import ConfigError
from worldmodel.models.conditioning import Prediction, choose
from worldmodel.models.generator.base import LossOutput
from worldmodel.models.state import State
from worldmodel.models.world_model import WorldModel
from worldmodel.train.objectives.base import Losses, Rounds, SampleRng, StageBatch
from worldmodel.train.objectives.codec import pixel_error
from worldmodel.train.objectives.state import StateObjective


class GeneratorObjective(StateObjective):
    """Flow matching on the next observation's latents given the states, beside the regression of states.

    With our own codec one frame of every clip is also decoded and compared in pixels, because an error in
    latents is not equally visible in all directions.
    """

    weights: Mapping[str, float] = {**StateObjective.weights, "flow": 1.0, "pixel": 0.3}

    def check(self, model: WorldModel) -> None:
        """Check that there is a generator; each has a training loss.

        Raises:
            ConfigError: there is none.
        """
        if model.config.generator is None:
            raise ConfigError("model.generator is null; set it, or use the objective state.")

    def prepare(self, model: WorldModel, batch: Batch, rng: SampleRng) -> StageBatch:
        inputs = super().prepare(model, batch, rng)
        if isinstance(inputs.content, Rounds):
            inputs.counts["flow"] = self.cell_weights(inputs.content).sum()
            if not model.codec.causal:
                inputs.counts["pixel"] = inputs.content.scored.double().sum()
        return inputs

    def cell_weights(self, rounds: Rounds) -> Float[Tensor, "b r t h w"]:
        """Weigh changed cells more if the generator corrects a forecast, whose errors are few and local."""
        return rounds.cells * (1 + (3 if self.residual else 0) * rounds.changed.double())

    def forward(self, model: WorldModel, inputs: StageBatch) -> Losses:
        if not isinstance(inputs.content, Rounds):
            return super().forward(model, inputs)
        codes, log_posterior = self.codes(model, inputs)
        prediction = self.predict(model, inputs, codes)
        losses = self.state_losses(model, inputs, prediction, log_posterior)
        output = self.flow_loss(model, inputs, prediction)
        return losses | self.generator_losses(model, inputs.content, output, inputs.rng)

    def generator_losses(
        self, model: WorldModel, rounds: Rounds, output: LossOutput, rng: SampleRng
    ) -> Losses:
        """Weigh the generator's errors, and compare pixels."""
        weight = self.cell_weights(rounds).flatten(0, 1).to(output.error)
        losses = {"flow": (weight * output.error).sum()}
        if not model.codec.causal:
            error = pixel_error(model, rounds.target.flatten(0, 1), output.clean, rng)
            losses["pixel"] = (error * rounds.scored.flatten()).sum()
        return losses

    def flow_loss(self, model: WorldModel, inputs: StageBatch, prediction: Prediction) -> LossOutput:
        """Compute the generator's loss for all rounds, each at random noise levels or in windows of two."""
        rounds = inputs.content
        rng = inputs.rng
        generator = model.config.generator
        assert generator is not None, "checked at the start"
        target = rounds.target.flatten(0, 1)
        context = prediction.context.flatten(0, 1)
        _, num_rounds, frames = rounds.target.shape[:3]
        keep = rng.uniform(num_rounds) >= generator.condition_dropout
        continues_previous = None
        if model.config.sampler == "swin":
            keep = keep[:, :1].expand_as(keep)  # with guidance, both chunks of a window have no condition
            progress, follows = swin.window_places(rng.uniform(num_rounds))
            sigma = model.generator.sigma_at(progress).flatten()[:, None].expand(-1, frames)
            (most,) = model.agreement.most(num_rounds)
            continues_previous = follows.flatten() if most > 1 else None
            if inputs.batch.task == "rounds" and not inputs.batch.self_rollout:
                context = rounds.context.flatten(0, 1)  # gets the sampler's own noise only
        else:
            normal = rng.normal(num_rounds, frames)
            uniform = rng.uniform(num_rounds, 2)
            # The one step that corrects a forecast begins at pure noise; many steps need all noise levels.
            pure, independent = (0.4, 0.25) if self.residual else (0.0, 0.0)
            sigma = training_sigmas(normal.flatten(0, 1), uniform.flatten(0, 1), independent, pure)
        condition = prediction.condition
        if generator.condition_dropout:  # or a text encoder would run for nothing
            condition = choose(keep.flatten(), condition, model.null_condition(context))
        noise = rng.normal(*rounds.target.shape[1:]).flatten(0, 1)
        context = sampler_context(model, context, rng)
        return model.generator.training_loss(target, noise, sigma, condition, context, continues_previous)

    def predicted_latents(
        self, model: WorldModel, prediction: Prediction, inputs: StageBatch
    ) -> Float[Tensor, "b r t c h w"]:
        if not model.config.num_inference_steps:
            return super().predicted_latents(model, prediction, inputs)
        noise = inputs.rng.normal(*inputs.content.target.shape[1:]).flatten(0, 1)
        context = sampler_context(model, prediction.context.flatten(0, 1), inputs.rng)
        solver = model.generator.solver(model.config.num_inference_steps)
        (latents,) = model.denoise([Chunk(noise, solver, (prediction.condition,), context)])
        return latents.unflatten(0, prediction.context.shape[:2])


class JointObjective(GeneratorObjective):
    """Training of all parts together; self-rollouts continue from the generator's output."""

    def is_differentiable(self, model: WorldModel, rounds: Rounds) -> bool:
        return False  # gradients do not flow through the denoising loop

    def next_latents(
        self, model: WorldModel, state: State, context: Tensor, actions: list[Action], rng: SampleRng
    ) -> Float[Tensor, "b t c h w"]:
        condition = model.condition(state, context, actions)
        noise = rng.normal(*model.config.latent_shape)
        context = sampler_context(model, context, rng)
        solver = model.generator.solver(1 if self.residual else model.config.num_inference_steps)
        return model.denoise([Chunk(noise, solver, (condition,), context)])[0]


def sampler_context(
    model: WorldModel, context: Float[Tensor, "b s c h w"], rng: SampleRng
) -> Float[Tensor, "b s c h w"]:
    """Return context frames as the model's sampler passes them to the generator."""
    if model.config.sampler == "chunk":
        return context
    noise = rng.normal(len(context) // len(rng.streams), *context.shape[1:])
    return swin.renoise(context, noise.flatten(0, 1))
