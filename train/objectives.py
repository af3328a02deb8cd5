"""What each stage learns: the terms of a loss for a batch of episodes, one small class per objective."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from worldmodel.data.loader import Batch
from worldmodel.data.sources import KINDS, WORDS
from worldmodel.data.transforms import to_tensor
from worldmodel.diffusion.loss import add_noise, velocity_error
from worldmodel.diffusion.schedule import training_sigmas
from worldmodel.models.condition import choose
from worldmodel.models.norm import widened
from worldmodel.models.world_model import Prediction, WorldModel
from worldmodel.parallel.layout import Layout, pack
from worldmodel.train.terms import Asked, Chance, Prepared, Rounds, Sums, label, noisy, reconstruction_error

Reduce = Callable[[Tensor], Tensor]
"""Adds up a tensor over the processes that see different episodes."""


class Objective(nn.Module, ABC):
    """A loss, with heads of its own that are trained along and not shipped.

    The loss is the sum of `weights[name] * sum / count` over the terms of that name; other terms are
    reported only.
    """

    weights: ClassVar[Mapping[str, float]]

    def __init__(self, model: WorldModel) -> None:
        super().__init__()

    @abstractmethod
    def prepare(self, model: WorldModel, batch: Batch, chance: Chance) -> Prepared:
        """Run what is frozen and count what will be summed; called without gradients."""

    @abstractmethod
    def forward(self, model: WorldModel, prepared: Prepared) -> Sums:
        """Return the sums of the terms; all chance comes from `prepared.chance`."""

    def pictures(self, model: WorldModel, prepared: Prepared) -> tuple[Tensor, Tensor] | None:
        """Return what is true and what the model makes of it, `[b, t, 3, h, w]`, if that can be seen."""
        return None

    def finish(self, model: WorldModel, prepared: Sequence[Prepared], reduce: Reduce) -> None:
        """Run once after the last step of the stage, on that step's microbatches."""


class CodecObjective(Objective):
    """Reconstruct pairs of frames; judged by whether objects survive, not decibels (benchmarks/codec.py)."""

    weights: ClassVar[Mapping[str, float]] = {"pixel": 1.0, "kl": 3e-4}

    def prepare(self, model: WorldModel, batch: Batch, chance: Chance) -> Prepared:
        frames = self.groups(batch, model.codec.config.temporal_factor).to(model.unseen)
        rows = float(len(frames))
        return Prepared(batch, chance, {"pixel": rows, "kl": rows}, frames)

    def forward(self, model: WorldModel, prepared: Prepared) -> Sums:
        frames = prepared.content
        mean, log_variance = model.codec.posterior(frames)
        noise = prepared.chance.normal(2, *mean.shape[1:]).flatten(0, 1)
        decoded = model.codec.reconstruct(mean + (0.5 * log_variance).exp() * noise.to(mean))
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
        mean, _ = model.codec.posterior(prepared.content)
        return prepared.content, model.codec.reconstruct(mean).clamp(-1, 1)

    def finish(self, model: WorldModel, prepared: Sequence[Prepared], reduce: Reduce) -> None:
        """Fix the standardisation of latents by the mean and deviation over the step's clips."""
        moments = torch.zeros(3, model.codec.config.latent_channels, dtype=torch.float64)
        for each in prepared:
            clips = to_tensor([episode.observations[-1] for episode in each.batch.episodes])
            mean, _ = model.codec.posterior(clips.to(model.unseen))
            values = rearrange(mean, "b t c h w -> c (b t h w)").double().cpu()
            moments += torch.stack(
                [torch.full_like(values[:, 0], values.shape[1]), values.sum(1), values.pow(2).sum(1)]
            )
        count, total, square = reduce(moments)
        average = total / count
        deviation = ((square - total * average) / (count - 1)).sqrt()
        model.codec.set_scale(average.float(), deviation.float())


class LanguageObjective(Objective):
    """Backbone language modelling on the world's documents."""

    weights: ClassVar[Mapping[str, float]] = {"nll": 1.0}

    max_tokens = 160

    def prepare(self, model: WorldModel, batch: Batch, chance: Chance) -> Prepared:
        end = model.backbone.end
        rows = [[*model.backbone.token_ids(e.answer or ""), end][: self.max_tokens] for e in batch.episodes]
        ids = [torch.tensor(row, device=model.unseen.device) for row in rows]
        tokens = sum(len(row) - 1 for row in rows)
        return Prepared(batch, chance, {"nll": float(tokens)}, ids, tokens)

    def forward(self, model: WorldModel, prepared: Prepared) -> Sums:
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
    return F.cross_entropy(widened(model.backbone.logits(hidden[said])), targets[said], reduction="sum")


class AlignmentObjective(Objective):
    """Vision alignment: a cell's feature points at the words for what lies on it.

    Of every kind of word (colours, shapes, …) the right one must score best. Words are told by what sets
    their embeddings apart from the others of their kind: those are nearly parallel, and by their differences
    the logits of tied embeddings tell them apart.
    """

    kinds = ("colour", "shape", "size", "background")
    weights: ClassVar[Mapping[str, float]] = {f"words_{kind}": 0.25 for kind in kinds}

    def __init__(self, model: WorldModel) -> None:
        super().__init__(model)
        self.scale = nn.Parameter(torch.full((1,), 8.0))
        self.words = [[model.backbone.token_ids(word) for word in kind] for kind in KINDS]

    def prepare(self, model: WorldModel, batch: Batch, chance: Chance) -> Prepared:
        latents = encode(model, to_tensor([episode.observations[0] for episode in batch.episodes]))
        return Prepared(batch, chance, self.counts(model, batch), latents)

    def counts(self, model: WorldModel, batch: Batch) -> dict[str, float]:
        """Count the labelled cells of every kind."""
        counts = {}
        for name, truth in zip(self.kinds, self.truths(model, batch), strict=True):
            counts[f"words_{name}"] = counts[f"right_{name}"] = float((truth.sum(dim=-1) > 0).sum())
        return counts

    def truths(self, model: WorldModel, batch: Batch) -> tuple[Tensor, ...]:
        """Say which words of each kind hold on each cell."""
        grid = model.config.codec.grid
        truth, _ = label(batch, "words", (grid, grid, len(WORDS)), model.unseen.device)
        return truth.flatten(1, 2).split([len(kind) for kind in KINDS], dim=-1)

    def forward(self, model: WorldModel, prepared: Prepared) -> Sums:
        return self.alignment(model, prepared.content, prepared.batch)

    def alignment(self, model: WorldModel, latents: Float[Tensor, "b 1 c h w"], batch: Batch) -> Sums:
        """Score the features of first frames against the words that hold there."""
        cells = widened(model.encode_observation(latents).cells[:, 0])
        sums: Sums = {}
        for name, kind, truth in zip(self.kinds, self.words, self.truths(model, batch), strict=True):
            with torch.no_grad():
                words = torch.stack(
                    [model.backbone.embed(torch.tensor(ids, device=cells.device)).mean(dim=0) for ids in kind]
                )
            labelled = truth.sum(dim=-1) > 0
            logits = self.scale * cells[labelled] @ widened(words - words.mean(dim=0)).T.to(cells)
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
    weights: ClassVar[Mapping[str, float]] = {
        "changed": 0.5,
        "unchanged": 1.0,
        "nll": 0.5,
        "named": 0.2,
        **{f"words_{kind}": 0.125 for kind in AlignmentObjective.kinds},
    }

    def __init__(self, model: WorldModel) -> None:
        super().__init__(model)
        self.named = nn.Linear(model.backbone.width, 1)
        self.alignment = AlignmentObjective(model)
        self.language = LanguageObjective(model)

    def prepare(self, model: WorldModel, batch: Batch, chance: Chance) -> Prepared:
        if batch.task == "document":
            return self.language.prepare(model, batch, chance)
        if batch.episodes[0].prompt is not None:
            return self.prepare_text(model, batch, chance)
        rounds = encode_rounds(model, batch)
        counts = rounds.counts()
        if batch.task == "rounds":
            grid = model.config.codec.grid
            counts["named"] = float(
                label(batch, "named", (grid, grid), model.unseen.device)[1].sum() * grid**2
            )
            counts |= self.alignment.counts(model, batch)
        tokens = rounds.context.shape[0] * rounds.context.shape[1] * model.round_tokens
        return Prepared(batch, chance, counts, rounds, tokens)

    def prepare_text(self, model: WorldModel, batch: Batch, chance: Chance) -> Prepared:
        """Encode observations, shown to the adapter one after the other, and count what should be said."""
        columns = zip(*(episode.observations for episode in batch.episodes), strict=True)
        parts = [encode_clips(model, list(column)) for column in columns]
        latents = [torch.cat(row) for row in zip(*parts, strict=True)]
        answers = [episode.answer or "" for episode in batch.episodes]
        tokens = sum(len(model.backbone.token_ids(answer)) + 1 for answer in answers)
        asked = Asked(latents, [episode.prompt for episode in batch.episodes], answers)
        seen = sum(
            len(clip) * (model.config.codec.grid // model.config.vision.merge) ** 2 for clip in latents
        )
        return Prepared(batch, chance, {"nll": float(tokens)}, asked, tokens + seen)

    def forward(self, model: WorldModel, prepared: Prepared) -> Sums:
        if prepared.batch.task == "document":
            return self.language(model, prepared)
        if isinstance(prepared.content, Asked):
            return self.text(model, prepared.content, prepared.chance)
        return self.regression(model, prepared, self.predict(model, prepared))

    def text(self, model: WorldModel, asked: Asked, chance: Chance) -> Sums:
        """Score the answers about the observations."""
        strength = chance.uniform()
        longest = max(len(latents) for latents in asked.latents)
        noise = chance.normal(longest, *asked.latents[0].shape[1:])
        seen = [
            noisy(latents[None], self.context_noise, strength[row], noise[row, None, : len(latents)])[0]
            for row, latents in enumerate(asked.latents)
        ]
        rows = model.read_rows(seen, asked.prompts, asked.answers)
        return {"nll": text_loss(model, [row for row, _ in rows], [labels for _, labels in rows])}

    def predict(self, model: WorldModel, prepared: Prepared) -> Prediction:
        """Predict every round, from noisy true observations (teacher forcing) or from the model's own.

        In a share of the steps (`Batch.own`) the observation of every round after the first is what
        the model made of the round before, while the targets stay true: it learns to undo its own drift.
        """
        rounds, chance = prepared.content, prepared.chance
        actions = [list(episode.actions) for episode in prepared.batch.episodes]
        if prepared.batch.task == "imagine":
            return model(model.unseen.expand_as(rounds.context[:, 0])[:, None], actions)
        shape = rounds.context.shape
        seen = noisy(
            rounds.context.flatten(0, 1),
            self.context_noise,
            chance.uniform(shape[1]).flatten(),
            chance.normal(*shape[1:]).flatten(0, 1),
        ).view(shape)
        if prepared.batch.own:
            made = seen[:, :1]
            with torch.no_grad():
                for index in range(1, shape[1]):
                    states = model(made, [episode[:index] for episode in actions]).states[:, -1]
                    last = self.imagined(model, states, made[:, -1], chance)
                    made = torch.cat([made, last[:, None]], dim=1)
            seen = made
        return model(seen, actions)

    def imagined(self, model: WorldModel, states: Tensor, context: Tensor, chance: Chance) -> Tensor:
        """Return the last latent frame of what the model makes of a round."""
        return model.condition(states, context).forecast[:, -1]

    def regression(self, model: WorldModel, prepared: Prepared, prediction: Prediction) -> Sums:
        """Compare the forecast with what came, and the probe with what was named."""
        rounds, batch = prepared.content, prepared.batch
        sums = rounds.errors(prediction.condition.forecast.view_as(rounds.target))
        if batch.task == "rounds":
            grid = model.config.codec.grid
            truth, known = label(batch, "named", (grid, grid), model.unseen.device)
            logits = widened(self.named(prediction.states[known, 0])).squeeze(-1)
            rare = logits.new_tensor(3.0)
            sums["named"] = F.binary_cross_entropy_with_logits(
                logits, truth[known].flatten(1).to(logits), pos_weight=rare, reduction="sum"
            )
            sums |= self.alignment.alignment(model, rounds.context[:, :1], batch)
        return sums

    def pictures(self, model: WorldModel, prepared: Prepared) -> tuple[Tensor, Tensor] | None:
        """Show the last round: what came, and the forecast (or what the generator makes of it)."""
        if not isinstance(prepared.content, Rounds):
            return None
        rounds, prediction = prepared.content, self.predict(model, prepared)
        made = self.made(model, prediction, prepared.chance)[:, -1]
        return model.decode(rounds.target[:, -1]), model.decode(made)

    def made(self, model: WorldModel, prediction: Prediction, chance: Chance) -> Float[Tensor, "b r t c h w"]:
        """Return the latents that a person would see."""
        return prediction.condition.forecast.unflatten(0, prediction.context.shape[:2])


class GeneratorObjective(StateObjective):
    """Flow matching on the next observation's latents, given the states; the regression goes on beside it.

    One frame of every clip is decoded and compared in pixels, where shapes are: latents weigh all directions
    alike, eyes do not.
    """

    weights: ClassVar[Mapping[str, float]] = {**StateObjective.weights, "flow": 1.0, "pixel": 0.3}

    def prepare(self, model: WorldModel, batch: Batch, chance: Chance) -> Prepared:
        prepared = super().prepare(model, batch, chance)
        if isinstance(prepared.content, Rounds):
            changed = prepared.content.changed
            prepared.counts["flow"] = float((1 + 3 * changed.double()).sum())
            prepared.counts["pixel"] = float(changed.shape[0] * changed.shape[1])
        return prepared

    def forward(self, model: WorldModel, prepared: Prepared) -> Sums:
        if not isinstance(prepared.content, Rounds):
            return super().forward(model, prepared)
        prediction = self.predict(model, prepared)
        sums = self.regression(model, prepared, prediction)
        sums["flow"], clean = self.flow(model, prepared, prediction)
        sums["pixel"] = pixel_error(model, prepared.content.target.flatten(0, 1), clean, prepared.chance)
        return sums

    def flow(self, model: WorldModel, prepared: Prepared, prediction: Prediction) -> tuple[Tensor, Tensor]:
        """Return the flow-matching error of all rounds and the clean latents that the velocity implies."""
        rounds, chance = prepared.content, prepared.chance
        target, context = rounds.target.flatten(0, 1), prediction.context.flatten(0, 1)[:, None]
        _, num_rounds, frames = rounds.target.shape[:3]
        keep = chance.uniform(num_rounds).flatten() >= model.config.generator.condition_dropout
        condition = choose(keep, prediction.condition, model.adapter.null(context[:, 0]))
        sigma = training_sigmas(
            chance.normal(num_rounds, frames).flatten(0, 1), chance.uniform(num_rounds, 2).flatten(0, 1)
        )
        noise = chance.normal(*rounds.target.shape[1:]).flatten(0, 1)
        noisy_target = add_noise(target, noise, sigma)
        velocity, _ = model.generator(
            torch.cat([context, noisy_target], dim=1),
            torch.cat([torch.zeros_like(sigma[:, :1]), sigma], dim=1),
            torch.cat([context, condition.forecast], dim=1),
            condition,
            blocks=torch.tensor([0] + [1] * frames),
            first_frame=-1,
        )
        error = velocity_error(velocity[:, 1:], noisy_target, target, sigma)
        weight = 1 + 3 * rounds.changed.flatten(0, 1).to(error.dtype)
        clean = noisy_target - sigma[:, :, None, None, None] * velocity[:, 1:]
        return (weight * error).sum(), clean


class JointObjective(GeneratorObjective):
    """All parts together, going on from what the generator itself made of earlier rounds."""

    def imagined(self, model: WorldModel, states: Tensor, context: Tensor, chance: Chance) -> Tensor:
        condition = model.condition(states, context)
        noise = chance.normal(*condition.forecast.shape[1:])
        return model.denoise(condition, context, noise, num_inference_steps=1)[:, -1]

    def made(self, model: WorldModel, prediction: Prediction, chance: Chance) -> Float[Tensor, "b r t c h w"]:
        noise = chance.normal(prediction.context.shape[1], *prediction.condition.forecast.shape[1:])
        steps = model.config.num_inference_steps
        context = prediction.context.flatten(0, 1)
        latents = model.denoise(prediction.condition, context, noise.flatten(0, 1), steps)
        return latents.unflatten(0, prediction.context.shape[:2])


def pixel_error(
    model: WorldModel, target: Float[Tensor, "b t c h w"], clean: Float[Tensor, "b t c h w"], chance: Chance
) -> Float[Tensor, ""]:
    """Compare one decoded latent frame of every clip with the decoded truth, as the codec's own loss does."""
    rows = torch.arange(target.shape[0], device=target.device)
    frame = chance.below(target.shape[1], target.shape[0] // len(chance.streams)).flatten()
    with torch.no_grad():
        truth = model.codec.decode(target[rows, frame][:, None])
    return reconstruction_error(model.codec.decode(clean[rows, frame][:, None]), truth).sum()


def encode_rounds(model: WorldModel, batch: Batch) -> Rounds:
    """Encode the observations of a batch whose episodes have actions."""
    columns = zip(*(episode.observations for episode in batch.episodes), strict=True)
    first, *clips = [to_tensor(list(column)) for column in columns]
    target = torch.stack([encode(model, clip) for clip in clips], dim=1)
    seen = encode(model, first)[:, -1:] if first.shape[1] else model.unseen.expand_as(target[:, :1, 0])
    context = torch.cat([seen, target[:, :-1, -1]], dim=1)
    changed = (target - context[:, :, None]).pow(2).mean(dim=3) > 0.1
    return Rounds(context, target, changed)


def encode_clips(model: WorldModel, clips: Sequence[np.ndarray]) -> list[Float[Tensor, "_ c h w"]]:
    """Encode clips of different lengths, equal lengths together."""
    rows: dict[int, Tensor] = {}
    for length in sorted({len(clip) for clip in clips}):
        chosen = [index for index, clip in enumerate(clips) if len(clip) == length]
        rows |= dict(zip(chosen, encode(model, to_tensor([clips[i] for i in chosen])), strict=True))
    return [rows[index] for index in range(len(clips))]


def encode(model: WorldModel, frames: Float[Tensor, "b t 3 h w"]) -> Float[Tensor, "b t2 c h2 w2"]:
    """Encode with the frozen codec; processes that share a sequence share the work."""
    group = model.config.codec.temporal_factor
    batch, frames = len(frames), frames.to(model.unseen)
    if frames.shape[1] % group or model.backbone.sequence.size > batch * frames.shape[1] // group:
        return model.codec.encode(frames)
    pieces = rearrange(frames, "b (t g) c h w -> (b t) g c h w", g=group)
    layout = Layout.causal(len(pieces)).shard(model.backbone.sequence)
    latents = layout.gather(model.codec.encode(layout.take(pieces, dim=0)), dim=0)
    return rearrange(latents, "(b t) 1 c h w -> b t c h w", b=batch)


OBJECTIVES: dict[str, type[Objective]] = {
    "codec": CodecObjective,
    "language": LanguageObjective,
    "alignment": AlignmentObjective,
    "state": StateObjective,
    "generator": GeneratorObjective,
    "joint": JointObjective,
}
