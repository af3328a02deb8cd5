"""What the stages with a generator learn: to generate under a condition, or to speak as its prompts do."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from worldmodel.data.loader import Batch
from worldmodel.diffusion import swin
from worldmodel.diffusion.sampler import Chunk
from worldmodel.diffusion.schedule import training_sigmas
from worldmodel.errors import ConfigError
from worldmodel.models.conditioning import choose
from worldmodel.models.generator.base import LossOutput
from worldmodel.models.layers.norm import upcast
from worldmodel.models.world_model import Prediction, WorldModel
from worldmodel.train.objectives.base import Losses, Prepared, Rounds, SampleRng, reconstruction_error
from worldmodel.train.objectives.states import StateObjective
from worldmodel.types import Action


class GeneratorObjective(StateObjective):
    """Flow matching on the next observation's latents, given the states; the regression goes on beside it.

    With our own codec one frame of every clip is decoded and compared in pixels, where shapes are: latents
    weigh all directions alike, eyes do not.
    """

    weights: Mapping[str, float] = {**StateObjective.weights, "flow": 1.0, "pixel": 0.3}

    def check(self, model: WorldModel) -> None:
        """Every generator can be taught."""

    def prepare(self, model: WorldModel, batch: Batch, chance: SampleRng) -> Prepared:
        prepared = super().prepare(model, batch, chance)
        if isinstance(prepared.content, Rounds):
            changed = prepared.content.changed
            prepared.counts["flow"] = float(self.emphasis(changed).sum())
            if not model.codec.causal:
                prepared.counts["pixel"] = float(changed.shape[0] * changed.shape[1])
        return prepared

    def emphasis(self, changed: Tensor) -> Tensor:
        """Weigh cells: what changes counts more where there is a forecast, whose errors are few and local."""
        return 1 + (3 if self.forecasts else 0) * changed.double()

    def forward(self, model: WorldModel, prepared: Prepared) -> Losses:
        if not isinstance(prepared.content, Rounds):
            return super().forward(model, prepared)
        prediction = self.predict(model, prepared)
        sums = self.regression(model, prepared, prediction)
        taught = self.flow(model, prepared, prediction)
        weight = self.emphasis(prepared.content.changed.flatten(0, 1)).to(taught.error)
        sums["flow"] = (weight * taught.error).sum()
        if not model.codec.causal:
            target = prepared.content.target.flatten(0, 1)
            sums["pixel"] = pixel_error(model, target, taught.clean, prepared.chance)
        return sums

    def flow(self, model: WorldModel, prepared: Prepared, prediction: Prediction) -> LossOutput:
        """Teach the generator all rounds, each at noise levels of its own, or in windows of two."""
        rounds, chance = prepared.content, prepared.chance
        target, context = rounds.target.flatten(0, 1), prediction.context.flatten(0, 1)
        _, num_rounds, frames = rounds.target.shape[:3]
        keep = chance.uniform(num_rounds) >= model.config.generator.condition_dropout
        continues_previous = None
        if model.config.sampler == "swin":
            keep = keep[:, :1].expand_as(keep)  # guidance, too, follows a trail under the empty condition
            place, after = swin.window_places(chance.uniform(num_rounds))
            sigma = model.generator.sigma_at(place).flatten()[:, None].expand(-1, frames)
            continues_previous = after.flatten() if num_rounds > 1 else None
            if prepared.batch.task == "rounds" and not prepared.batch.own:
                context = rounds.context.flatten(0, 1)  # only the sampler's own noise is on it
        else:
            sigma = training_sigmas(
                chance.normal(num_rounds, frames).flatten(0, 1), chance.uniform(num_rounds, 2).flatten(0, 1)
            )
        condition = choose(keep.flatten(), prediction.condition, model.null_condition(context))
        noise = chance.normal(*rounds.target.shape[1:]).flatten(0, 1)
        context = as_sampled(model, context, chance)
        return model.generator.training_loss(target, noise, sigma, condition, context, continues_previous)


class JointObjective(GeneratorObjective):
    """All parts together, going on from what the generator itself made of earlier rounds."""

    def imagined(
        self,
        model: WorldModel,
        states: Tensor,
        context: Tensor,
        actions: list[Action],
        chance: SampleRng,
    ) -> Float[Tensor, "b t c h w"]:
        condition = model.condition(states, context, actions)
        noise, context = chance.normal(*model.latent_shape), as_sampled(model, context, chance)
        return model.denoise([Chunk(noise, model.generator.solver(1), (condition,), context)])[0]

    def made(
        self, model: WorldModel, prediction: Prediction, prepared: Prepared
    ) -> Float[Tensor, "b r t c h w"]:
        noise = prepared.chance.normal(*prepared.content.target.shape[1:]).flatten(0, 1)
        context = as_sampled(model, prediction.context.flatten(0, 1), prepared.chance)
        solver = model.generator.solver(model.config.num_inference_steps)
        (latents,) = model.denoise([Chunk(noise, solver, (prediction.condition,), context)])
        return latents.unflatten(0, prediction.context.shape[:2])


class PromptObjective(StateObjective):
    """Alignment with a pretrained generator: states become what its text encoder makes of the words.

    The generator is not run. Source: Pandora (arXiv:2406.09455), stage 1, where the distance is squared; its
    reimplementation Open-Pandora compares softmaxed features by KL divergence (`PromptDivergenceObjective`).
    """

    weights: Mapping[str, float] = {"prompt": 1.0, "nll": 0.5}

    def check(self, model: WorldModel) -> None:
        """Refuse a generator without words.

        Raises:
            ConfigError: its adapter does not fill the place of a prompt, or it has no text encoder.
        """
        if model.config.condition.kind != "prompt" or model.generator.encode_text([""]) is None:
            raise ConfigError(
                "The objective prompt wants condition.kind prompt and a generator with its text encoder; set "
                "generator.pretrained to the folder of a whole pipeline."
            )

    def prepare(self, model: WorldModel, batch: Batch, chance: SampleRng) -> Prepared:
        prepared = super().prepare(model, batch, chance)
        if isinstance(prepared.content, Rounds):
            rounds = prepared.content.context.shape[:2]
            prepared.counts["prompt"] = float(rounds[0] * rounds[1])
        return prepared

    def forward(self, model: WorldModel, prepared: Prepared) -> Losses:
        if not isinstance(prepared.content, Rounds):
            return super().forward(model, prepared)
        words = [action.text or "" for episode in prepared.batch.episodes for action in episode.actions]
        with torch.no_grad():
            truth = model.generator.encode_text(words)
        assert truth is not None, "checked at the start"
        made = upcast(self.predict(model, prepared).condition.tokens)
        truth = upcast(truth[:, : made.shape[1]])
        made = made[:, : truth.shape[1]]
        return {"prompt": self.distance(made, truth).sum()}

    def distance(self, made: Float[Tensor, "b n d"], truth: Float[Tensor, "b n d"]) -> Float[Tensor, " b"]:
        """Compare what the states became with what the words are."""
        return (made - truth).pow(2).mean(dim=(1, 2))


class PromptDivergenceObjective(PromptObjective):
    """The same alignment by the KL divergence of softmaxed features, which leaves their scale open."""

    def distance(self, made: Float[Tensor, "b n d"], truth: Float[Tensor, "b n d"]) -> Float[Tensor, " b"]:
        divergence = F.kl_div(made.log_softmax(-1), truth.log_softmax(-1), log_target=True, reduction="none")
        return divergence.sum(dim=-1).mean(dim=1)


def as_sampled(
    model: WorldModel,
    context: Float[Tensor, "b s c h w"],
    chance: SampleRng,
) -> Float[Tensor, "b s c h w"]:
    """Return context frames as the model's sampler shows them to the generator."""
    if model.config.sampler == "chunk":
        return context
    noise = chance.normal(len(context) // len(chance.streams), *context.shape[1:])
    return swin.renoise(context, noise.flatten(0, 1))


def pixel_error(
    model: WorldModel,
    target: Float[Tensor, "b t c h w"],
    clean: Float[Tensor, "b t c h w"],
    chance: SampleRng,
) -> Float[Tensor, ""]:
    """Compare one decoded latent frame of every clip with the decoded truth, as the codec's own loss does."""
    rows = torch.arange(target.shape[0], device=target.device)
    frame = chance.below(target.shape[1], target.shape[0] // len(chance.streams)).flatten()
    with torch.no_grad():
        truth = model.codec.decode(target[rows, frame][:, None])
    return reconstruction_error(model.codec.decode(clean[rows, frame][:, None]), truth).sum()
