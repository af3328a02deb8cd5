"""Vision alignment: the feature of a latent cell tells the words for it."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from worldmodel.batch import to_device
from worldmodel.data.loader import Batch
from worldmodel.errors import ConfigError
from worldmodel.models.layers.norm import upcast
from worldmodel.models.vision.adapter import Observation
from worldmodel.models.world_model import WorldModel
from worldmodel.train.episodes import encode_first_frames
from worldmodel.train.objectives.base import Counts, Losses, Objective, SampleRng, StageBatch, label
from worldmodel.worlds import get_world


class AlignmentObjective(Objective):
    """Vision alignment: classify a latent cell's feature by the embeddings of the words that hold there.

    The world of the model names the words by kind (for example colours and shapes); each kind is one
    classification. Embeddings of a kind are centred first: they are nearly parallel, and the logits of tied
    embeddings depend on their differences.

    With a pretrained backbone a feature also becomes parallel to the embedding of one of its words, of the
    first kind that holds (for an object its colour). Such a model has attention heads that match equal words:
    it finds the cells that a sentence names before it was trained on any (docs/concepts/state-alignment.md).
    """

    weights: Mapping[str, float] = {}
    tasks = ("rounds", "describe", "ask", "inverse")

    def __init__(self, model: WorldModel) -> None:
        super().__init__(model)
        self.scale = nn.Parameter(torch.full((1,), 8.0))
        kinds = get_world(model.config.world).label_words() if model.config.world else {}
        self.words = {
            kind: [model.backbone.token_ids(f" {word}") for word in words] for kind, words in kinds.items()
        }
        self.token_ids: dict[str, Tensor] = {}
        self.near_words = bool(model.config.backbone.pretrained)
        self.weights = self.kind_weights(1.0) if self.words else {}

    def kind_weights(self, total: float) -> dict[str, float]:
        """Divide a weight equally among the kinds."""
        weights = {f"words_{kind}": total / len(self.words) for kind in self.words}
        return weights | ({"word": total} if self.near_words and self.words else {})

    def prepare(self, model: WorldModel, batch: Batch, rng: SampleRng) -> StageBatch:
        if not model.config.vision.sees_latents:
            raise ConfigError(
                "The objective alignment needs a vision adapter that reads latents; leave out "
                "vision.encoder, or the stage."
            )
        if not self.words:
            raise ConfigError(
                "The objective alignment needs the labels of a world; set model.world to one that has them, "
                "such as shapes, or leave out the stage."
            )
        return StageBatch(batch, rng, self.counts(model, batch), encode_first_frames(model, batch))

    def counts(self, model: WorldModel, batch: Batch) -> Counts:
        """Count the labelled cells of every kind."""
        counts: Counts = {}
        for name, truth in self.truths(model, batch).items():
            counts[f"words_{name}"] = counts[f"right_{name}"] = float((truth.sum(dim=-1) > 0).sum())
        if self.near_words and counts:
            counts["word"] = float((self.nearest_words(model, batch) >= 0).sum())
        return counts

    def truths(
        self, model: WorldModel, batch: Batch, name: str = "words", merge: int = 1
    ) -> dict[str, Tensor]:
        """Return for each kind which of its words hold on each cell, `[b, cells, words]`, on the CPU.

        `name` is that of the label; squares of `merge` x `merge` cells become one, with the words of all.
        """
        if not self.words:
            return {}
        sizes = [len(words) for words in self.words.values()]
        truth, _ = label(batch, name, (*model.config.codec.grid, sum(sizes)))
        truth = F.max_pool2d(truth.movedim(-1, 1), merge).movedim(1, -1)
        return dict(zip(self.words, truth.flatten(1, 2).split(sizes, dim=-1), strict=True))

    def nearest_words(self, model: WorldModel, batch: Batch) -> Tensor:
        """Return the word of the first kind that holds on each cell, `[b, cells]`, on the CPU.

        It is an index among the words of all kinds; -1 where none holds.
        """
        truth = torch.cat(list(self.truths(model, batch).values()), dim=-1)
        return torch.where(truth.any(dim=-1), truth.argmax(dim=-1), -1)

    def forward(self, model: WorldModel, inputs: StageBatch) -> Losses:
        return self.alignment(model, inputs.content, inputs.batch)

    def alignment(self, model: WorldModel, latents: Float[Tensor, "b 1 c h w"], batch: Batch) -> Losses:
        """Score the features of first frames against the words that hold there."""
        if not self.words:
            return {}
        cells = model.encode_observation(Observation(latents)).cells
        assert cells is not None, "only the latents' own adapter makes cells"
        cells = upcast(cells[:, 0])
        losses: Losses = {}
        for name, truth in self.truths(model, batch).items():
            words = self.word_embeddings(model, name)
            labelled = (truth.sum(dim=-1) > 0).nonzero()  # on the CPU: their number sets a shape
            rows, columns = to_device(labelled, cells.device).unbind(dim=1)
            logits = self.scale * cells[rows, columns] @ upcast(words - words.mean(dim=0)).T.to(cells)
            target = to_device(truth[labelled[:, 0], labelled[:, 1]], cells.device)
            losses[f"words_{name}"] = word_loss(logits, target)
            losses[f"right_{name}"] = target.gather(1, logits.argmax(dim=-1, keepdim=True)).sum()
        if self.near_words:
            nearest = self.nearest_words(model, batch)
            rows, columns = to_device((nearest >= 0).nonzero(), cells.device).unbind(dim=1)
            words = torch.cat([self.word_embeddings(model, name) for name in self.words])
            target = upcast(words)[to_device(nearest[nearest >= 0], cells.device)]
            losses["word"] = (1 - F.cosine_similarity(cells[rows, columns], target, dim=-1)).sum()
        return losses

    @torch.no_grad()
    def word_embeddings(self, model: WorldModel, kind: str) -> Float[Tensor, "n d"]:
        """Return the mean embedding of the tokens of each word of a kind."""
        if kind not in self.token_ids:  # constant: moved to the device once
            ids = torch.tensor([each for word in self.words[kind] for each in word])
            self.token_ids[kind] = to_device(ids, model.device)
        parts = model.backbone.embed(self.token_ids[kind]).split([len(word) for word in self.words[kind]])
        return torch.stack([part.mean(dim=0) for part in parts])


def word_loss(logits: Float[Tensor, "n words"], truth: Float[Tensor, "n words"]) -> Float[Tensor, ""]:
    """Return the summed cross-entropy; where several words hold, they share the probability."""
    share = truth / truth.sum(dim=-1, keepdim=True)
    return F.cross_entropy(logits, share.to(logits.dtype), reduction="sum")
