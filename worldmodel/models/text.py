"""Text about observations: the sequences from which the backbone decodes descriptions and answers."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from worldmodel.batch import to_device
from worldmodel.models.backbone.causal_lm import Backbone
from worldmodel.models.vision.adapter import EncodedObservation, Observation
from worldmodel.parallel.agreement import Agreement

MAX_TOKENS = 96
"""Longest text that is decoded by default."""
TextSequence = tuple[Float[Tensor, "_ d"], Int[Tensor, " _"]]
"""Embeddings, and the token that each position should predict, or -100."""


@runtime_checkable
class TextModel(Protocol):
    """The parts of a world model that texts about observations are made with."""

    backbone: Backbone
    prompt_marker: nn.Parameter
    answer_marker: nn.Parameter
    agreement: Agreement

    def encode_observation(self, observation: Observation) -> EncodedObservation:
        """Map an observation to vision tokens and queries."""
        ...


@torch.no_grad()
def generate(model: TextModel, observation: Observation, prompt: str | None, max_tokens: int) -> list[str]:
    """Describe observations, or answer a prompt about them, by greedy decoding."""
    rows = observation.unstack()
    prefix = torch.stack([row for row, _ in sequences(model, rows, [prompt] * len(rows))])
    return model.backbone.decode_text(prefix, model.backbone.new_cache(), max_tokens)


def sequences(
    model: TextModel,
    observations: Sequence[Observation],
    prompts: Sequence[str | None],
    answers: Sequence[str] | None = None,
) -> list[TextSequence]:
    """Return the embeddings of vision tokens, prompt and (in training) answer, and the labels.

    Every observation is a batch of one. What was before it, if it is given, comes first: then texts and
    predictions read the same prefix. A label is the token that a position should predict, or -100; labels
    are on the CPU.
    """
    tokens = _vision_tokens(model, observations)
    backbone, rows = model.backbone, []
    for row, prompt in enumerate(prompts):
        vision = tokens[row]
        prompt_ids = backbone.token_ids(prompt) if prompt else []
        answer_ids = [*backbone.token_ids(answers[row]), backbone.end] if answers is not None else []
        ids = to_device(torch.tensor([*prompt_ids, *answer_ids[:-1]], dtype=torch.long), vision.device)
        words, count = backbone.embed(ids), len(prompt_ids)
        parts = [vision, model.prompt_marker[None], words[:count], model.answer_marker[None], words[count:]]
        before = observations[row].before
        unlabelled = sum(map(len, before)) + len(vision) + 1 + count
        labels = torch.tensor([-100] * unlabelled + (answer_ids or [-100]))
        rows.append((torch.cat([part.to(vision.dtype) for part in (*before, *parts)]), labels))
    return rows


def _vision_tokens(model: TextModel, observations: Sequence[Observation]) -> list[Float[Tensor, "_ d"]]:
    """Encode observations of different lengths; observations of equal length form one batch."""
    tokens: dict[int, Tensor] = {}
    shapes = sorted({each.shape for each in observations})
    (calls,) = model.agreement.most(len(shapes))
    for shape in shapes:
        chosen = [row for row, each in enumerate(observations) if each.shape == shape]
        batch = Observation.stack([observations[row] for row in chosen])
        tokens |= dict(zip(chosen, model.encode_observation(batch).tokens, strict=True))
    for _ in range(len(shapes), calls):
        spare = model.encode_observation(observations[0]).tokens
        tokens[0] = torch.cat([tokens[0], spare[0, :0]])
    return [tokens[row] for row in range(len(observations))]
