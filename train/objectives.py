"""What each stage learns: a loss for a batch of episodes, one small class per objective."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from worldmodel.data.loader import Batch
from worldmodel.data.sources import KINDS
from worldmodel.data.transforms import to_tensor
from worldmodel.diffusion.loss import add_noise, velocity_error
from worldmodel.diffusion.schedule import training_sigmas
from worldmodel.models.condition import choose
from worldmodel.models.world_model import Prediction, WorldModel

Losses = dict[str, Tensor]
"""`loss` is minimised; the others are reported."""


class Objective(nn.Module, ABC):
    """A loss, with heads of its own that are trained along and not shipped."""

    def __init__(self, model: WorldModel) -> None:
        super().__init__()

    @abstractmethod
    def forward(self, model: WorldModel, batch: Batch, generator: torch.Generator) -> Losses:
        """Return the losses of a batch; all chance comes from `generator`."""

    def finish(self, model: WorldModel, batch: Batch) -> None:
        """Run once after the last step of the stage."""


class CodecObjective(Objective):
    """Reconstruct pairs of frames; foreground and its edges count more, since shapes live there.

    Judged by whether objects survive, not by decibels (see benchmarks/codec.py).
    """

    kl_weight = 3e-4

    def forward(self, model: WorldModel, batch: Batch, generator: torch.Generator) -> Losses:
        frames = self.groups(batch, model.codec.config.temporal_factor)
        mean, log_variance = model.codec.posterior(frames)
        noise = torch.randn(mean.shape, generator=generator)
        decoded = model.codec.reconstruct(mean + (0.5 * log_variance).exp() * noise)
        weight = foreground_weight(frames)
        error = decoded - frames
        pixel = (weight * (error.abs() + 2 * error.pow(2))).mean()
        kl = 0.5 * (mean.pow(2) + log_variance.exp() - 1 - log_variance).mean()
        return {"loss": pixel + self.kl_weight * kl, "pixel": pixel, "kl": kl}

    @staticmethod
    def groups(batch: Batch, size: int) -> Tensor:
        """Take two groups of frames of every episode, sometimes a still image."""
        clips = []
        for place, episode in enumerate(batch.episodes):
            clip = episode.observations[-1]
            rng = np.random.default_rng((batch.step, place))
            for start in rng.choice(len(clip) // size, size=2, replace=False) * size:
                group = clip[start : start + size]
                clips.append(np.repeat(group[:1], size, axis=0) if rng.random() < 0.15 else group)
        return to_tensor(clips)

    @torch.no_grad()
    def finish(self, model: WorldModel, batch: Batch) -> None:
        mean, _ = model.codec.posterior(to_tensor([episode.observations[-1] for episode in batch.episodes]))
        model.codec.set_scale(mean)


def foreground_weight(frames: Tensor) -> Tensor:
    """Weigh pixels that differ from the clip's median colour five times, those on an outline ten times."""
    median = frames.flatten(3).median(dim=3).values[..., None, None]
    inside = ((frames - median).abs().amax(dim=2) > 0.3).float()
    grown = F.max_pool2d(inside, 3, stride=1, padding=1)
    shrunk = 1 - F.max_pool2d(1 - inside, 3, stride=1, padding=1)
    return (1 + 4 * inside + 5 * (grown - shrunk))[:, :, None]


@dataclass(frozen=True)
class Rounds:
    """Episodes as latents: what was seen before each round and what came of it."""

    context: Float[Tensor, "b r c h w"]
    target: Float[Tensor, "b r t c h w"]
    changed: Bool[Tensor, "b r t h w"]
    """Cells that differ from the context: few, and all that an action is about."""


@torch.no_grad()
def encode_rounds(model: WorldModel, batch: Batch) -> Rounds:
    """Encode the observations of a batch whose episodes have actions."""
    columns = zip(*(episode.observations for episode in batch.episodes), strict=True)
    first, *clips = [to_tensor(list(column)) for column in columns]
    target = torch.stack([model.codec.encode(clip) for clip in clips], dim=1)
    seen = model.codec.encode(first)[:, -1:] if first.shape[1] else model.unseen.expand_as(target[:, :1, 0])
    context = torch.cat([seen, target[:, :-1, -1]], dim=1)
    changed = (target - context[:, :, None]).pow(2).mean(dim=3) > 0.1
    return Rounds(context, target, changed)


def balanced(error: Float[Tensor, "b r t h w"], changed: Bool[Tensor, "b r t h w"]) -> Float[Tensor, ""]:
    """Average over changed and over unchanged cells apart, so that the few changed ones carry the loss."""
    mask = changed.float()
    return 0.5 * (error * mask).sum() / mask.sum().clamp(min=1) + (error * (1 - mask)).sum() / (
        1 - mask
    ).sum().clamp(min=1)


class AlignmentObjective(Objective):
    """Vision alignment: a cell's feature points at the words for what lies on it.

    Of every kind of word (colours, shapes, …) the right one must score best. Words are told by what sets
    their embeddings apart from the others of their kind: those are nearly parallel, and by their differences
    the logits of tied embeddings tell them apart.
    """

    def __init__(self, model: WorldModel) -> None:
        super().__init__(model)
        self.scale = nn.Parameter(torch.tensor(8.0))
        self.kinds = [[model.backbone.token_ids(word) for word in kind] for kind in KINDS]

    def forward(self, model: WorldModel, batch: Batch, generator: torch.Generator) -> Losses:
        with torch.no_grad():
            latents = model.codec.encode(to_tensor([episode.observations[0] for episode in batch.episodes]))
        return self.alignment(model, latents, batch)

    def alignment(self, model: WorldModel, latents: Float[Tensor, "b 1 c h w"], batch: Batch) -> Losses:
        """Score the features of first frames against the words that hold there."""
        cells = model.encode_observation(latents).cells[:, 0].float()
        truths = label(batch, "words").flatten(1, 2).split([len(kind) for kind in self.kinds], dim=-1)
        losses, hits, total = [], torch.tensor(0), torch.tensor(0)
        for kind, truth in zip(self.kinds, truths, strict=True):
            with torch.no_grad():
                words = torch.stack([model.backbone.embed(torch.tensor(ids)).mean(dim=0) for ids in kind])
            labelled = truth.sum(dim=-1) > 0
            logits = self.scale * cells[labelled] @ (words - words.mean(dim=0)).float().T
            target = truth[labelled]
            losses.append(F.cross_entropy(logits, target / target.sum(dim=-1, keepdim=True)))
            hits = hits + target.gather(1, logits.argmax(dim=-1, keepdim=True)).sum()
            total = total + len(target)
        return {"loss": torch.stack(losses).mean(), "right": hits / total}


class LanguageObjective(Objective):
    """Backbone language modelling on the world's documents."""

    def forward(self, model: WorldModel, batch: Batch, generator: torch.Generator) -> Losses:
        end = model.backbone.tokenizer.eos_token_id
        rows = [torch.tensor([*model.backbone.token_ids(e.answer or ""), end])[:160] for e in batch.episodes]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
        hidden = model.backbone(model.backbone.embed(ids[:, :-1].clamp(min=0)))
        loss = F.cross_entropy(model.backbone.logits(hidden).flatten(0, 1).float(), ids[:, 1:].flatten())
        return {"loss": loss}


class StateObjective(Objective):
    """State alignment, with the texts that keep the backbone speaking.

    The states regress the next observation's latents, with no generator in the loop; a linear probe finds
    the things that the action names, and vision alignment goes on. Tasks without actions ask for text and
    score its tokens.
    """

    context_noise = 0.15
    text_weight = 0.5
    named_weight = 0.2
    words_weight = 0.5

    def __init__(self, model: WorldModel) -> None:
        super().__init__(model)
        self.named = nn.Linear(model.backbone.width, 1)
        self.alignment = AlignmentObjective(model)
        self.language = LanguageObjective(model)

    def forward(self, model: WorldModel, batch: Batch, generator: torch.Generator) -> Losses:
        if batch.task == "document":
            losses = self.language(model, batch, generator)
            return {**losses, "loss": self.text_weight * losses["loss"]}
        if batch.task not in ("rounds", "imagine"):
            return self.text(model, batch, generator)
        rounds = encode_rounds(model, batch)
        prediction = self.predict(model, batch, rounds, generator)
        return self.regression(model, batch, rounds, prediction)

    def text(self, model: WorldModel, batch: Batch, generator: torch.Generator) -> Losses:
        """Score the answers about the observations, shown to the adapter one after the other."""
        with torch.no_grad():
            columns = zip(*(episode.observations for episode in batch.episodes), strict=True)
            by_length = [codec_batches(model, list(column)) for column in columns]
        rows = [torch.cat(parts) for parts in zip(*by_length, strict=True)]
        losses = []
        for frames in sorted({len(row) for row in rows}):
            chosen = [index for index, row in enumerate(rows) if len(row) == frames]
            latents = noisy(torch.stack([rows[index] for index in chosen]), self.context_noise, generator)
            episodes = [batch.episodes[index] for index in chosen]
            embeds, labels = model.read_embeds(
                latents, [e.prompt for e in episodes], [e.answer or "" for e in episodes]
            )
            logits = model.backbone.logits(model.backbone(embeds)).float()
            losses.append(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none"))
            losses[-1] = losses[-1].sum() / (labels >= 0).sum() * len(chosen) / len(rows)
        loss = torch.stack(losses).sum()
        return {"loss": self.text_weight * loss, "nll": loss}

    def predict(
        self, model: WorldModel, batch: Batch, rounds: Rounds, generator: torch.Generator
    ) -> Prediction:
        """Predict every round, from noisy true observations (teacher forcing) or from the model's own.

        In a share of the steps (`Batch.self_rollout`) the observation of every round after the first is what
        the model made of the round before, while the targets stay true: it learns to undo its own drift.
        """
        actions = [list(episode.actions) for episode in batch.episodes]
        if batch.task == "imagine":
            return model(model.unseen.expand_as(rounds.context[:, 0])[:, None], actions)
        own = torch.rand((), generator=generator) < batch.self_rollout
        seen = noisy(rounds.context.flatten(0, 1), self.context_noise, generator).view_as(rounds.context)
        if own:
            made = seen[:, :1]
            with torch.no_grad():
                for index in range(1, seen.shape[1]):
                    states = model(made, [episode[:index] for episode in actions]).states[:, -1]
                    last = self.imagined(model, states, made[:, -1], generator)
                    made = torch.cat([made, last[:, None]], dim=1)
            seen = made
        return model(seen, actions)

    def imagined(
        self, model: WorldModel, states: Tensor, context: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Return the last latent frame of what the model makes of a round."""
        return model.condition(states, context).forecast[:, -1]

    def regression(self, model: WorldModel, batch: Batch, rounds: Rounds, prediction: Prediction) -> Losses:
        """Compare the forecast with what came, and the probe with what was named."""
        forecast = prediction.condition.forecast.view_as(rounds.target)
        error = (forecast - rounds.target).pow(2).mean(dim=3)
        losses = {"state": balanced(error, rounds.changed), "mse": error.mean()}
        losses["loss"] = losses["state"]
        if batch.task == "rounds":
            logits = self.named(prediction.states[:, 0]).squeeze(-1).float()
            truth = label(batch, "named").flatten(1)
            losses["named"] = F.binary_cross_entropy_with_logits(logits, truth, pos_weight=torch.tensor(3.0))
            aligned = self.alignment.alignment(model, rounds.context[:, :1], batch)
            losses["words"] = aligned["loss"]
            losses["loss"] = losses["loss"] + self.named_weight * losses["named"]
            losses["loss"] = losses["loss"] + self.words_weight * losses["words"]
        return losses


class GeneratorObjective(StateObjective):
    """Flow matching on the next observation's latents, given the states; the regression goes on beside it.

    One frame of every clip is decoded and compared in pixels, where shapes are: latents weigh all directions
    alike, eyes do not.
    """

    pixel_weight = 0.3

    def forward(self, model: WorldModel, batch: Batch, generator: torch.Generator) -> Losses:
        if batch.task not in ("rounds", "imagine"):
            return super().forward(model, batch, generator)
        rounds = encode_rounds(model, batch)
        prediction = self.predict(model, batch, rounds, generator)
        losses = self.regression(model, batch, rounds, prediction)
        losses["flow"], clean = self.flow(model, rounds, prediction, generator)
        losses["pixel"] = pixel_error(model, rounds.target.flatten(0, 1), clean, generator)
        return {**losses, "loss": losses["loss"] + losses["flow"] + self.pixel_weight * losses["pixel"]}

    def flow(
        self, model: WorldModel, rounds: Rounds, prediction: Prediction, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return the flow-matching loss of all rounds and the clean latents that the velocity implies."""
        target, context = rounds.target.flatten(0, 1), prediction.context.flatten(0, 1)[:, None]
        batch, frames = target.shape[:2]
        keep = torch.rand(batch, generator=generator) >= model.config.generator.condition_dropout
        condition = choose(keep, prediction.condition, model.adapter.null(context[:, 0]))
        sigma = training_sigmas(batch, frames, generator)
        noisy_target = add_noise(target, torch.randn(target.shape, generator=generator), sigma)
        velocity, _ = model.generator(
            torch.cat([context, noisy_target], dim=1),
            torch.cat([torch.zeros(batch, 1), sigma], dim=1),
            torch.cat([context, condition.forecast], dim=1),
            condition,
            blocks=torch.tensor([0] + [1] * frames),
            first_frame=-1,
        )
        error = velocity_error(velocity[:, 1:], noisy_target, target, sigma)
        weight = 1 + 3 * rounds.changed.flatten(0, 1).float()
        clean = noisy_target - sigma[:, :, None, None, None] * velocity[:, 1:]
        return (weight * error).sum() / weight.sum(), clean


class JointObjective(GeneratorObjective):
    """All parts together, going on from what the generator itself made of earlier rounds."""

    def imagined(
        self, model: WorldModel, states: Tensor, context: Tensor, generator: torch.Generator
    ) -> Tensor:
        condition = model.condition(states, context)
        noise = torch.randn(condition.forecast.shape, generator=generator)
        return model.denoise(condition, context, noise, num_inference_steps=1)[:, -1]


def pixel_error(
    model: WorldModel,
    target: Float[Tensor, "b t c h w"],
    clean: Float[Tensor, "b t c h w"],
    generator: torch.Generator,
) -> Tensor:
    """Compare one decoded latent frame of every clip with the decoded truth, as the codec's own loss does."""
    rows = torch.arange(target.shape[0])
    frame = torch.randint(target.shape[1], (target.shape[0],), generator=generator)
    with torch.no_grad():
        truth = model.codec.decode(target[rows, frame][:, None])
    error = model.codec.decode(clean[rows, frame][:, None]) - truth
    return (foreground_weight(truth) * (error.abs() + 2 * error.pow(2))).mean()


def noisy(latents: Tensor, level: float, generator: torch.Generator) -> Tensor:
    """Add noise of a strength drawn per sample from U(0, level): the model's own latents are not exact."""
    shape = (latents.shape[0], *[1] * (latents.dim() - 1))
    strength = level * torch.rand(shape, generator=generator)
    return latents + strength * torch.randn(latents.shape, generator=generator)


def label(batch: Batch, name: str) -> Tensor:
    """Stack a label of all episodes."""
    return torch.from_numpy(np.stack([episode.labels[name] for episode in batch.episodes if episode.labels]))


def codec_batches(model: WorldModel, clips: list[np.ndarray]) -> list[Tensor]:
    """Encode clips of different lengths, equal lengths together."""
    rows: list[Tensor] = [torch.empty(0)] * len(clips)
    for length in {len(clip) for clip in clips}:
        chosen = [index for index, clip in enumerate(clips) if len(clip) == length]
        for index, latents in zip(
            chosen, model.codec.encode(to_tensor([clips[i] for i in chosen])), strict=True
        ):
            rows[index] = latents
    return rows


OBJECTIVES: dict[str, type[Objective]] = {
    "codec": CodecObjective,
    "language": LanguageObjective,
    "alignment": AlignmentObjective,
    "state": StateObjective,
    "generator": GeneratorObjective,
    "joint": JointObjective,
}
