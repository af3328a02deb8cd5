"""Alignment of the states with the text embeddings of a pretrained generator."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from worldmodel.data.loader import Batch
from worldmodel.errors import ConfigError
from worldmodel.models.layers.norm import upcast
from worldmodel.models.world_model import WorldModel
from worldmodel.train.objectives.base import Losses, Rounds, SampleRng, StageBatch
from worldmodel.train.objectives.state import StateObjective


class PromptObjective(StateObjective):
    """Squared distance between the condition tokens and the generator's encoding of the action's text.

    The generator itself does not run. Source: Pandora (arXiv:2406.09455), stage 1; its reimplementation
    Open-Pandora compares softmaxed features by KL divergence (`PromptDivergenceObjective`).
    """

    weights: Mapping[str, float] = {**StateObjective.weights, "prompt": 1.0}

    def check(self, model: WorldModel) -> None:
        """Add the generator's text encoder to the model.

        Raises:
            ConfigError: the condition adapter does not produce a prompt, or there is no text encoder.
        """
        if model.config.condition_adapter.kind != "prompt":
            raise ConfigError(
                "The objective prompt needs condition_adapter.kind prompt, "
                f"not {model.config.condition_adapter.kind}, and a generator with a text "
                "encoder; set generator.pretrained to the folder of a whole pipeline."
            )
        model.generator.add_text_encoder()  # a part of the model, which goes where that goes

    def prepare(self, model: WorldModel, batch: Batch, rng: SampleRng) -> StageBatch:
        inputs = super().prepare(model, batch, rng)
        if isinstance(inputs.content, Rounds):
            inputs.counts["prompt"] = inputs.content.scored.double().sum()
        return inputs

    def forward(self, model: WorldModel, inputs: StageBatch) -> Losses:
        if not isinstance(inputs.content, Rounds):
            return super().forward(model, inputs)
        texts = [action.text or "" for episode in inputs.batch.episodes for action in episode.actions]
        with torch.no_grad():
            truth = model.generator.encode_distinct(texts)
        codes, log_posterior = self.codes(model, inputs)
        prediction = self.predict(model, inputs, codes)
        tokens = prediction.condition.tokens
        assert truth is not None and tokens is not None, "checked at the start"
        truth = upcast(truth[:, : tokens.shape[1]])
        predicted = upcast(tokens[:, : truth.shape[1]])
        error = self.distance(predicted, truth)
        losses = self.state_losses(model, inputs, prediction, log_posterior)
        return losses | {"prompt": (error * inputs.content.scored.flatten()).sum()}

    def distance(
        self, predicted: Float[Tensor, "b n d"], truth: Float[Tensor, "b n d"]
    ) -> Float[Tensor, " b"]:
        """Compare condition tokens with text embeddings."""
        return (predicted - truth).pow(2).mean(dim=(1, 2))


class PromptDivergenceObjective(PromptObjective):
    """The same alignment by the KL divergence of softmaxed features, which is free of their scale."""

    def distance(
        self, predicted: Float[Tensor, "b n d"], truth: Float[Tensor, "b n d"]
    ) -> Float[Tensor, " b"]:
        divergence = F.kl_div(
            predicted.log_softmax(-1), truth.log_softmax(-1), log_target=True, reduction="none"
        )
        return divergence.sum(dim=-1).mean(dim=1)
