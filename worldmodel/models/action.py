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
"""Action tokens come in multiples of this, so that a round has a fixed length and needs no mask."""


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

    def forward(self, actions: Sequence[Action], backbone: Backbone) -> Float[Tensor, "b n d"]:
        """Embed one action a row, all in slots of one length (a multiple of `SLOT`)."""
        rows = []
        for action in actions:
            ids = self.validate(action, backbone)
            parts = [self.marker[None]]
            if ids:
                parts.append(backbone.embed(torch.tensor(ids, device=self.marker.device)))
            if action.keys and self.keys is not None:
                places = [self.config.keys.index(key) for key in action.keys]
                parts.append(self.keys(torch.tensor(places, device=self.marker.device)))
            if action.vector is not None and self.vector is not None:
                parts.append(self.vector(torch.tensor([action.vector], device=self.marker.device)))
            rows.append(torch.cat([part.to(self.marker.dtype) for part in parts]))
        length = SLOT * math.ceil(max(len(row) for row in rows) / SLOT)
        blanks = self.blank.expand(length, -1)
        return torch.stack([torch.cat([blanks[: length - len(row)], row]) for row in rows])
