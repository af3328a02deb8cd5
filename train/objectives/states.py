"""What each stage learns: the terms of a loss for a batch of episodes, one small class per objective."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from worldmodel.data.loader import Batch
from worldmodel.errors import ConfigError
from worldmodel.media.tensors import to_tensor
from worldmodel.models import text
from worldmodel.models.codec.autoencoder import Codec
from worldmodel.models.layers.norm import upcast
from worldmodel.models.vision.adapter import Observation
from worldmodel.models.world_model import Prediction, WorldModel
from worldmodel.parallel.layout import Layout, pack
from worldmodel.train.episodes import encode, encode_rounds, encode_shown
from worldmodel.train.objectives.base import (
    Asked,
    Losses,
    Prepared,
    Rounds,
    SampleRng,
    drop_actions,
    label,
    noisy,
    reconstruction_error,
)
from worldmodel.types import Action
from worldmodel.worlds import get_world

Reduce = Callable[[Tensor], Tensor]
"""Adds up a tensor over the processes that see different episodes."""


class Objective(nn.Module, ABC):
    """A loss, with heads of its own that are trained along and not shipped.

    The loss is the sum of `weights[name] * sum / count` over the terms of that name; other terms are
    reported only.
    """

    weights: Mapping[str, float]

    def __init__(self, model: WorldModel) -> None:
        super().__init__()

    @abstractmethod
    def prepare(self, model: WorldModel, batch: Batch, chance: SampleRng) -> Prepared:
        """Run what is frozen and count what will be summed; called without gradients."""

    @abstractmethod
    def forward(self, model: WorldModel, prepared: Prepared) -> Losses:
        """Return the sums of the terms; all chance comes from `prepared.chance`."""

    def pictures(self, model: WorldModel, prepared: Prepared) -> tuple[Tensor, Tensor] | None:
        """Return what is true and what the model makes of it, `[b, t, 3, h, w]`, if that can be seen."""
        return None

    def finish(self, model: WorldModel, prepared: Sequence[Prepared], reduce: Reduce) -> None:
        """Run once after the last step of the stage, on that step's microbatches."""


class CodecObjective(Objective):
    """Reconstruct pairs of frames; judged by whether objects survive, not decibels (`worldmodel eval`)."""

    weights: Mapping[str, float] = {"pixel": 1.0, "kl": 3e-4}

    @staticmethod
    def codec(model: WorldModel) -> Codec:
        """Return the codec, if it can be trained.

        Raises:
            ConfigError: it is one of diffusers.
        """
        if not isinstance(model.codec, Codec):
            raise ConfigError(
                "The objective codec trains our own codec; leave the stage out for a pretrained one."
            )
        return model.codec

    def prepare(self, model: WorldModel, batch: Batch, chance: SampleRng) -> Prepared:
        frames = self.groups(batch, model.codec.temporal_factor).to(model.device, model.dtype)
        rows = float(len(frames))
        return Prepared(batch, chance, {"pixel": rows, "kl": rows}, frames)

    def forward(self, model: WorldModel, prepared: Prepared) -> Losses:
        frames, codec = prepared.content, self.codec(model)
        mean, log_variance = codec.posterior(frames)
        noise = prepared.chance.normal(2, *mean.shape[1:]).flatten(0, 1)
        decoded = codec.reconstruct(mean + (0.5 * log_variance).exp() * noise.to(mean))
        kl = 0.5 * (mean.pow(2) + log_variance.exp() - 1 - log_variance)
        return {
            "pixel": reconstruction_error(decoded, frames).sum(),
            "kl": kl.flatten(1).mean(dim=1).sum(),
        }

    @staticmethod
    def groups(batch: Batch, size: int) -> Float[Tensor, "b t 3 h w"]:
        """Take two groups of frames of every episode, sometimes a still image."""
        clips = []
        for index, episode in zip(batch.indices, batch.episodes, strict=True):
            clip = episode.observations[-1]
            rng = np.random.default_rng((index, 11))
            for start in rng.choice(len(clip) // size, size=2, replace=False) * size:
                group = clip[start : start + size]
                clips.append(np.repeat(group[:1], size, axis=0) if rng.random() < 0.15 else group)
        return to_tensor(clips)

    def pictures(self, model: WorldModel, prepared: Prepared) -> tuple[Tensor, Tensor]:
        mean, _ = self.codec(model).posterior(prepared.content)
        return prepared.content, self.codec(model).reconstruct(mean).clamp(-1, 1)

    def finish(self, model: WorldModel, prepared: Sequence[Prepared], reduce: Reduce) -> None:
        """Fix the standardisation of latents by the mean and deviation over the step's clips."""
        codec = self.codec(model)
        moments = torch.zeros(3, codec.latent_channels, dtype=torch.float64)
        for each in prepared:
            clips = to_tensor([episode.observations[-1] for episode in each.batch.episodes])
            mean, _ = codec.posterior(clips.to(model.device, model.dtype))
            values = rearrange(mean, "b t c h w -> c (b t h w)").double().cpu()
            moments += torch.stack(
                [torch.full_like(values[:, 0], values.shape[1]), values.sum(1), values.pow(2).sum(1)]
            )
        count, total, square = reduce(moments)
        average = total / count
        deviation = ((square - total * average) / (count - 1)).sqrt()
        codec.set_scale(average.float(), deviation.float())


class LanguageObjective(Objective):
    """Backbone language modelling on the world's documents."""

    weights: Mapping[str, float] = {"nll": 1.0}

    max_tokens = 160

    def prepare(self, model: WorldModel, batch: Batch, chance: SampleRng) -> Prepared:
        end = model.backbone.end
        rows = [[*model.backbone.token_ids(e.answer or ""), end][: self.max_tokens] for e in batch.episodes]
        ids = [torch.tensor(row, device=model.device) for row in rows]
        tokens = sum(len(row) - 1 for row in rows)
        return Prepared(batch, chance, {"nll": float(tokens)}, ids, tokens)

    def forward(self, model: WorldModel, prepared: Prepared) -> Losses:
        inputs = [model.backbone.embed(ids[:-1]) for ids in prepared.content]
        return {"nll": text_loss(model, inputs, [ids[1:] for ids in prepared.content])}


def text_loss(
    model: WorldModel, embeds: Sequence[Float[Tensor, "_ d"]], labels: Sequence[Tensor]
) -> Float[Tensor, ""]:
    """Sum the negative log-likelihood of labels (-100: none) over rows of any length, packed side by side."""
    bins = pack([len(row) for row in embeds], max(len(row) for row in embeds))
    layout = Layout.packed([[len(embeds[row]) for row in each] for each in bins])

    def packed(rows: Sequence[Tensor], padding: float) -> Tensor:
        joined = [torch.cat([rows[row] for row in each]) for each in bins]
        return nn.utils.rnn.pad_sequence(joined, batch_first=True, padding_value=padding)

    hidden = model.backbone(packed(embeds, 0.0), layout=layout)
    targets = packed(labels, -100)
    said = targets >= 0  # the vocabulary is scored where something is said
    return F.cross_entropy(upcast(model.backbone.logits(hidden[said])), targets[said], reduction="sum")


class AlignmentObjective(Objective):
    """Vision alignment: classify a latent cell's feature by the embeddings of the words that hold there.

    The world of the model names the words by kind (for example colours and shapes); each kind is one
    classification. Embeddings of a kind are centred first: they are nearly parallel, and the logits of tied
    embeddings depend on their differences.
    """

    weights: Mapping[str, float] = {}

    def __init__(self, model: WorldModel) -> None:
        super().__init__(model)
        self.scale = nn.Parameter(torch.full((1,), 8.0))
        kinds = get_world(model.config.world).label_words() if model.config.world else {}
        self.words = {
            kind: [model.backbone.token_ids(word) for word in words] for kind, words in kinds.items()
        }
        self.weights = self.kind_weights(1.0)

    def kind_weights(self, total: float) -> dict[str, float]:
        """Divide a weight equally among the kinds."""
        return {f"words_{kind}": total / len(self.words) for kind in self.words}

    def prepare(self, model: WorldModel, batch: Batch, chance: SampleRng) -> Prepared:
        if not self.words:
            raise ConfigError(
                f"model.world is {model.config.world}, which has no words for cells; set it to one that has "
                "(shapes), or leave out the objective alignment."
            )
        latents = encode(model, to_tensor([episode.observations[0] for episode in batch.episodes]))
        return Prepared(batch, chance, self.counts(model, batch), latents)

    def counts(self, model: WorldModel, batch: Batch) -> dict[str, float]:
        """Count the labelled cells of every kind."""
        counts = {}
        for name, truth in self.truths(model, batch).items():
            counts[f"words_{name}"] = counts[f"right_{name}"] = float((truth.sum(dim=-1) > 0).sum())
        return counts

    def truths(self, model: WorldModel, batch: Batch) -> dict[str, Tensor]:
        """Return for each kind which of its words hold on each cell, `[b, cells, words]`."""
        if not self.words:
            return {}
        sizes = [len(words) for words in self.words.values()]
        truth, _ = label(batch, "words", (*model.config.codec.grid, sum(sizes)), model.device)
        return dict(zip(self.words, truth.flatten(1, 2).split(sizes, dim=-1), strict=True))

    def forward(self, model: WorldModel, prepared: Prepared) -> Losses:
        return self.alignment(model, prepared.content, prepared.batch)

    def alignment(self, model: WorldModel, latents: Float[Tensor, "b 1 c h w"], batch: Batch) -> Losses:
        """Score the features of first frames against the words that hold there."""
        if not self.words:
            return {}
        cells = model.encode_observation(Observation(latents)).cells
        assert cells is not None, "only the latents' own adapter makes cells"
        cells = upcast(cells[:, 0])
        sums: Losses = {}
        for name, truth in self.truths(model, batch).items():
            with torch.no_grad():
                words = torch.stack(
                    [
                        model.backbone.embed(torch.tensor(ids, device=cells.device)).mean(dim=0)
                        for ids in self.words[name]
                    ]
                )
            labelled = truth.sum(dim=-1) > 0
            logits = self.scale * cells[labelled] @ upcast(words - words.mean(dim=0)).T.to(cells)
            target = truth[labelled]
            share = target / target.sum(dim=-1, keepdim=True)
            sums[f"words_{name}"] = F.cross_entropy(logits, share.to(logits.dtype), reduction="sum")
            sums[f"right_{name}"] = target.gather(1, logits.argmax(dim=-1, keepdim=True)).sum()
        return sums


class StateObjective(Objective):
    """State alignment, with the texts that keep the backbone speaking.

    The states regress the next observation's latents, with no generator in the loop; a linear probe finds
    the things that the action names, and vision alignment goes on. Tasks without actions ask for text and
    score its tokens.
    """

    context_noise = 0.15
    weights: Mapping[str, float] = {
        "changed": 0.5,
        "unchanged": 1.0,
        "nll": 0.5,
        "named": 0.2,
    }

    def __init__(self, model: WorldModel) -> None:
        super().__init__(model)
        self.forecasts = model.config.condition.kind == "forecast"
        self.named = nn.Linear(model.backbone.width, 1)
        self.alignment = AlignmentObjective(model)
        self.weights = {**type(self).weights, **self.alignment.kind_weights(0.5)}
        self.language = LanguageObjective(model)
        self.check(model)

    def check(self, model: WorldModel) -> None:
        """Refuse a model that has nothing to align.

        Raises:
            ConfigError: its adapter forecasts no latents.
        """
        if not self.forecasts:
            raise ConfigError(
                f"State alignment wants a forecast, which condition.kind {model.config.condition.kind} does "
                "not make; use the objective prompt, generator or joint."
            )

    def prepare(self, model: WorldModel, batch: Batch, chance: SampleRng) -> Prepared:
        if batch.task == "document":
            return self.language.prepare(model, batch, chance)
        if batch.episodes[0].prompt is not None:
            return self.prepare_text(model, batch, chance)
        batch = drop_actions(batch, chance, model.config.action.dropout)
        rounds = encode_rounds(model, batch)
        counts = rounds.counts() if self.forecasts else {}
        if self.forecasts and batch.task == "rounds":
            codec = model.config.codec
            known = label(batch, "named", codec.grid, model.device)[1]
            counts["named"] = float(known.sum() * codec.cells)
            if model.config.vision.sees_latents:
                counts |= self.alignment.counts(model, batch)
        tokens = rounds.context.shape[0] * rounds.context.shape[1] * model.round_tokens
        return Prepared(batch, chance, counts, rounds, tokens)

    def prepare_text(self, model: WorldModel, batch: Batch, chance: SampleRng) -> Prepared:
        """Encode observations, shown to the adapter one after the other, and count what should be said."""
        seen = encode_shown(model, batch)
        answers = [episode.answer or "" for episode in batch.episodes]
        tokens = sum(len(model.backbone.token_ids(answer)) + 1 for answer in answers)
        asked = Asked(seen, [episode.prompt for episode in batch.episodes], answers)
        per_latent = model.vision.round_tokens // model.config.context_latents
        looked = sum(
            model.vision.round_tokens if model.vision.needs_frames else each.shape[0] * per_latent
            for each in seen
        )
        return Prepared(batch, chance, {"nll": float(tokens)}, asked, tokens + looked)

    def forward(self, model: WorldModel, prepared: Prepared) -> Losses:
        if prepared.batch.task == "document":
            return self.language(model, prepared)
        if isinstance(prepared.content, Asked):
            return self.text(model, prepared.content, prepared.chance)
        return self.regression(model, prepared, self.predict(model, prepared))

    def text(self, model: WorldModel, asked: Asked, chance: SampleRng) -> Losses:
        """Score the answers about the observations."""
        strength = chance.uniform()
        longest = max(each.shape[0] for each in asked.seen)
        noise = chance.normal(longest, *asked.seen[0].latents.shape[2:])
        seen = [
            Observation(
                noisy(each.latents, self.context_noise, strength[row], noise[row, None, : each.shape[0]]),
                each.frames,
            )
            for row, each in enumerate(asked.seen)
        ]
        rows = text.sequences(model, seen, asked.prompts, asked.answers)
        return {"nll": text_loss(model, [row for row, _ in rows], [labels for _, labels in rows])}

    def predict(self, model: WorldModel, prepared: Prepared) -> Prediction:
        """Predict every round, from noisy true observations (teacher forcing) or from the model's own.

        In a share of the steps (`Batch.own`) the observation of every round after the first is what
        the model made of the round before, while the targets stay true: it learns to undo its own drift.
        """
        rounds, chance = prepared.content, prepared.chance
        actions = [list(episode.actions) for episode in prepared.batch.episodes]
        if prepared.batch.task == "imagine":
            nothing = model.blank_observation(len(actions))
            return model(nothing.latents[:, None], actions, rounds.frames)
        shape = rounds.context.shape
        seen = noisy(
            rounds.context.flatten(0, 1),
            self.context_noise,
            chance.uniform(shape[1]).flatten(),
            chance.normal(*shape[1:]).flatten(0, 1),
        ).view(shape)
        if prepared.batch.own:
            return model(*self.own(model, seen, rounds.frames, actions, chance))
        return model(seen, actions, rounds.frames)

    @torch.no_grad()
    def own(
        self,
        model: WorldModel,
        context: Float[Tensor, "b r s c h w"],
        frames: Tensor | None,
        actions: list[list[Action]],
        chance: SampleRng,
    ) -> tuple[Tensor, list[list[Action]], Tensor | None]:
        """Return what `WorldModel.forward` takes, all but the first round as the model itself made it."""
        made, pixels = context[:, :1], frames if frames is None else frames[:, :1]
        for index in range(1, context.shape[1]):
            now = [episode[index - 1] for episode in actions]
            states = model(made, [episode[:index] for episode in actions], pixels).states[:, -1]
            latents = self.imagined(model, states, made[:, -1], now, chance)
            clip = None
            if model.codec.causal or pixels is not None:
                clip = model.decode(latents, made[:, -1])
            seen = model.codec.context(latents, clip, model.config.context_latents)
            made = torch.cat([made, seen[:, None]], dim=1)
            looked = None if clip is None else model.vision.select_frames(clip)
            if looked is not None and pixels is not None:
                pixels = torch.cat([pixels, looked[:, None]], dim=1)
        return made, actions, pixels

    def imagined(
        self, model: WorldModel, states: Tensor, context: Tensor, actions: list[Action], chance: SampleRng
    ) -> Float[Tensor, "b t c h w"]:
        """Return the latents that the model makes of a round."""
        forecast = model.condition(states, context, actions).forecast
        assert forecast is not None, "state alignment wants an adapter that forecasts"
        return forecast

    def regression(self, model: WorldModel, prepared: Prepared, prediction: Prediction) -> Losses:
        """Compare the forecast with what came, and the probe with what was named."""
        rounds, batch, forecast = prepared.content, prepared.batch, prediction.condition.forecast
        if forecast is None:
            return {}
        sums = rounds.errors(forecast.view_as(rounds.target))
        if batch.task == "rounds":
            truth, known = label(batch, "named", model.config.codec.grid, model.device)
            logits = upcast(self.named(prediction.states[known, 0])).squeeze(-1)
            rare = logits.new_tensor(3.0)
            sums["named"] = F.binary_cross_entropy_with_logits(
                logits, truth[known].flatten(1).to(logits), pos_weight=rare, reduction="sum"
            )
            if model.config.vision.sees_latents:
                sums |= self.alignment.alignment(model, rounds.context[:, 0], batch)
        return sums

    def pictures(self, model: WorldModel, prepared: Prepared) -> tuple[Tensor, Tensor] | None:
        """Show the last round: what came, and the forecast (or what the generator makes of it)."""
        if not isinstance(prepared.content, Rounds):
            return None
        rounds, prediction = prepared.content, self.predict(model, prepared)
        made, context = self.made(model, prediction, prepared)[:, -1], rounds.context[:, -1]
        return model.decode(rounds.target[:, -1], context), model.decode(made, context)

    def made(
        self, model: WorldModel, prediction: Prediction, prepared: Prepared
    ) -> Float[Tensor, "b r t c h w"]:
        """Return the latents that a person would see."""
        assert prediction.condition.forecast is not None, "state alignment wants an adapter that forecasts"
        return prediction.condition.forecast.unflatten(0, prediction.context.shape[:2])
