"""The action adapter: words, keys, vectors, mouse and camera become tokens in front of the queries."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from worldmodel.config import ActionConfig
from worldmodel.errors import InputError
from worldmodel.models.backbone.causal_lm import Backbone
from worldmodel.types import Action, Pose, turned

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
        self.vector = _numbers_to_token(config.vector_size, width) if config.vector_size else None
        self.mouse = _numbers_to_token(2, width) if config.mouse else None
        self.camera = _numbers_to_token(9, width) if config.camera else None
        if self.keys is not None:
            nn.init.normal_(self.keys.weight, std=scale)

    def validate(self, action: Action, backbone: Backbone) -> list[int]:
        """Return the text's token ids after checking every part of the action.

        Raises:
            InputError: the model does not take such an action; the sentence says what it takes.
        """
        longest = self.config.max_text_tokens
        action.check(self.config)
        if action.text is None:
            return []
        if len(action.text) > 40 * longest:
            raise InputError(
                f"The action has {len(action.text.split())} words; say it in one short sentence."
            )
        ids = backbone.token_ids(action.text)
        if not 0 < len(ids) <= longest:
            raise InputError(f"The action has {len(ids)} tokens; use 1 to {longest}.")
        return ids

    def forward(self, actions: Sequence[Action], backbone: Backbone) -> list[Float[Tensor, "_ d"]]:
        """Embed actions, each in a slot whose length (a multiple of `SLOT`) depends on nothing but itself.

        The camera's pose is read as the round's motion: make one of a target first (`Action.seen_from`).
        """
        rows = []
        for action in actions:
            ids = self.validate(action, backbone)
            # An absent part is an empty one, not a missing one: all processes of a training then have
            # gradients for the same weights, whatever their episodes hold.
            parts = [self.marker[None], backbone.embed(self._tensor(ids, torch.long))]
            if self.keys is not None:
                places = [self.config.keys.index(key) for key in action.keys]
                parts.append(self.keys(self._tensor(places, torch.long)))
            for layer, size, numbers in (
                (self.vector, self.config.vector_size, self._scaled(action.vector or ())),
                (self.mouse, 2, action.mouse or ()),
                (self.camera, 9, pose_features(action.camera.pose) if action.camera else ()),
            ):
                if layer is not None:
                    parts.append(layer(self._tensor(numbers, self.marker.dtype).view(-1, size)))
            missing = -sum(len(part) for part in parts) % SLOT
            parts.insert(0, self.blank.expand(missing, -1))
            rows.append(torch.cat([part.to(self.marker.dtype) for part in parts]))
        return rows

    def _scaled(self, vector: Sequence[float]) -> Sequence[float]:
        """Return a vector (or none) with its bounds, if it has any, at -1 and 1."""
        if not vector or not self.config.vector_low:
            return vector
        bounds = zip(vector, self.config.vector_low, self.config.vector_high, strict=True)
        return [2 * (x - low) / (high - low) - 1 for x, low, high in bounds]

    def _tensor(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.marker.device)


def pose_features(pose: Pose) -> list[float]:
    """Return a motion as nine numbers: the translation, and the first two columns of the rotation's matrix.

    Source: Zhou et al. 2019, arXiv:1812.07035: networks learn this continuous form better than quaternions.
    """
    return [
        *pose.translation,
        *turned(pose.rotation, (1.0, 0.0, 0.0)),
        *turned(pose.rotation, (0.0, 1.0, 0.0)),
    ]


def _numbers_to_token(size: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size, width), nn.SiLU(), nn.Linear(width, width))
