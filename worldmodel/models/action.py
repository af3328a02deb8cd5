"""The action adapter: words, keys and vectors become tokens in front of the queries."""

import difflib
import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from worldmodel.config import ActionConfig
from worldmodel.errors import InputError
from worldmodel.models.backbone import Backbone
from worldmodel.types import Action

SLOT = 32
"""Action tokens come in multiples of this, so that nearly all rounds have one length."""


class ActionAdapter(nn.Module):
    """Every action fills a slot of `SLOT` tokens, blanks first, the marker, then what the user did."""

    def __init__(self, config: ActionConfig, width: int) -> None:
        super().__init__()
        self.config = config
        scale = width**-0.5
        self.blank = nn.Parameter(torch.randn(width) * scale)
        self.marker = nn.Parameter(torch.randn(width) * scale)
        self.keys = nn.Embedding(len(config.keys), width) if config.keys else None
        self.vector = (
            nn.Sequential(nn.Linear(config.vector_size, width), nn.SiLU(), nn.Linear(width, width))
            if config.vector_size
            else None
        )
        if self.keys is not None:
            nn.init.normal_(self.keys.weight, std=scale)

    def validate(self, action: Action, backbone: Backbone) -> list[int]:
        """Return the text's token ids after checking every part of the action.

        Raises:
            InputError: the model does not take such an action; the sentence says what it takes.
        """
        config = self.config
        ids = []
        if action.text is not None:
            if not config.text:
                raise InputError("This model takes no text actions; see `worldmodel info MODEL`.")
            if len(action.text) > 40 * config.max_text_tokens:
                raise InputError(
                    f"The action has {len(action.text.split())} words; say it in one short sentence."
                )
            ids = backbone.token_ids(action.text)
            if not 0 < len(ids) <= config.max_text_tokens:
                raise InputError(f"The action has {len(ids)} tokens; use 1 to {config.max_text_tokens}.")
        for key in action.keys:
            if key not in config.keys:
                near = difflib.get_close_matches(str(key), config.keys, n=1)
                hint = (
                    f"did you mean {near[0]!r}?"
                    if near
                    else f"it knows {', '.join(config.keys) or 'no keys'}."
                )
                raise InputError(f"This model does not know the key {key!r}; {hint}")
        if action.vector is not None:
            if len(action.vector) != config.vector_size:
                raise InputError(
                    f"The action vector has {len(action.vector)} numbers; pass {config.vector_size}."
                )
            if not all(math.isfinite(x) for x in action.vector):
                raise InputError(
                    f"The action vector {list(action.vector)} is not finite; pass plain numbers."
                )
        return ids

    def forward(self, actions: Sequence[Action], backbone: Backbone) -> list[Float[Tensor, "_ d"]]:
        """Embed actions, each in a slot whose length (a multiple of `SLOT`) depends on nothing but itself."""
        rows = []
        for action in actions:
            ids = self.validate(action, backbone)
            # An absent part is an empty one, not a missing one: all processes of a training then have
            # gradients for the same weights, whatever their episodes hold.
            parts = [self.marker[None], backbone.embed(self._tensor(ids, torch.long))]
            if self.keys is not None:
                places = [self.config.keys.index(key) for key in action.keys]
                parts.append(self.keys(self._tensor(places, torch.long)))
            if self.vector is not None:
                numbers = self._tensor(action.vector or (), self.marker.dtype)
                parts.append(self.vector(numbers.view(-1, self.config.vector_size)))
            missing = -sum(len(part) for part in parts) % SLOT
            parts.insert(0, self.blank.expand(missing, -1))
            rows.append(torch.cat([part.to(self.marker.dtype) for part in parts]))
        return rows

    def _tensor(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.marker.device)
