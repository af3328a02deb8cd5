"""Language modelling with the backbone."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from worldmodel.batch import to_device
from worldmodel.data.loader import Batch
from worldmodel.models.layers.norm import upcast
from worldmodel.models.world_model import WorldModel
from worldmodel.parallel.layout import Layout, pack
from worldmodel.train.objectives.base import Losses, Objective, SampleRng, StageBatch


class LanguageObjective(Objective):
    """Next-token prediction on the documents of a source."""

    weights: Mapping[str, float] = {"nll": 1.0}
    tasks = ("document",)

    max_tokens = 160

    def prepare(self, model: WorldModel, batch: Batch, rng: SampleRng) -> StageBatch:
        end = model.backbone.end
        rows = [[*model.backbone.token_ids(e.answer or ""), end][: self.max_tokens] for e in batch.episodes]
        ids = [torch.tensor(row) for row in rows]
        tokens = sum(len(row) - 1 for row in rows)
        return StageBatch(batch, rng, {"nll": float(tokens)}, ids, tokens)

    def forward(self, model: WorldModel, inputs: StageBatch) -> Losses:
        # Together, because each look-up has a gradient as large as the vocabulary.
        read = [ids[:-1] for ids in inputs.content]
        words = model.backbone.embed(to_device(torch.cat(read), model.device))
        embeds = words.split([len(ids) for ids in read])
        return {"nll": text_loss(model, embeds, [ids[1:] for ids in inputs.content])}


def text_loss(
    model: WorldModel, embeds: Sequence[Float[Tensor, "_ d"]], labels: Sequence[Tensor]
) -> Float[Tensor, ""]:
    """Sum the negative log-likelihood of labels over rows of any length, packed side by side.

    Labels are on the CPU; -100 is none.
    """
    bins = pack([len(row) for row in embeds], max(len(row) for row in embeds))
    layout = Layout.packed([[len(embeds[row]) for row in each] for each in bins])

    def packed(rows: Sequence[Tensor], padding: float) -> Tensor:
        joined = [torch.cat([rows[row] for row in each]) for each in bins]
        return nn.utils.rnn.pad_sequence(joined, batch_first=True, padding_value=padding)

    hidden = model.backbone(packed(embeds, 0.0), layout=layout)
    targets = packed(labels, -100)
    labelled = (targets >= 0).nonzero()  # logits are computed only where there is a label
    rows, columns = to_device(labelled, hidden.device).unbind(dim=1)
    wanted = to_device(targets[labelled[:, 0], labelled[:, 1]], hidden.device)
    shared = Layout.items(len(wanted), model.backbone.sequence)
    logits = upcast(model.backbone.logits(shared.take(hidden[rows, columns], 0)))
    return shared.sum(F.cross_entropy(logits, shared.take(wanted, 0), reduction="sum"))
