"""The action adapter: the actions of a round to tokens before the queries."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from worldmodel.actions import (
    Action,
    ActionKind,
    Numbers,
    Rows,
    Words,
    action_kinds,
    resolve_camera_targets,
)
from worldmodel.actions.kind import Embedding
from worldmodel.batch import to_device
from worldmodel.config import ActionConfig
from worldmodel.errors import ConfigError, InputError
from worldmodel.models.backbone.causal_lm import Backbone
from worldmodel.models.layers.norm import upcast

TEXT_SLOT, SLOT = 32, 8
"""Action tokens are padded to a multiple of this, with or without texts, so that nearly all rounds have the
same length."""

WAVE_OCTAVES = 5
"""Waves of a number: from half a wave over the picture to eight, which are four latent cells of 64 pixels."""


@dataclass(frozen=True)
class EncodedAction:
    """The actions of a batch of rounds, as the backbone gets them."""

    tokens: list[Float[Tensor, "_ d"]]
    """Tokens of each round, in front of its queries."""
    on_queries: Float[Tensor, "b d"] | None = None
    """What is added to all queries of a round, if controls are (`query_actions`)."""

    def rows(
        self, tokens: Iterable[Float[Tensor, "m d"]], queries: Float[Tensor, "b q d"]
    ) -> list[tuple[Float[Tensor, "_ d"], ...]]:
        """Return the parts of every round: vision tokens, the action, queries."""
        if self.on_queries is not None:
            queries = queries + self.on_queries[:, None].to(queries)
        return list(zip(tokens, self.tokens, queries, strict=True))


class ActionAdapter(nn.Module):
    """Embeds an action as padding, a marker and the parts of the action, in a multiple of `slot` tokens.

    The actions of a chunk follow each other, each after a marker of its own. A kind whose embedding is `Rows`
    or `Numbers` has a table or a small network here, under its own name; texts use the backbone's table.
    """

    def __init__(self, config: ActionConfig, width: int, on_queries: bool = False) -> None:
        """Build with random weights; `on_queries` is `query_actions` of the model.

        Raises:
            ConfigError: there are no keys and no numbers to add to the queries.
        """
        super().__init__()
        self.config = config
        self.kinds = _kinds(config)
        self.embeddings = {kind.name: kind.embedding(config.kinds[kind.name]) for kind in self.kinds}
        has_words = any(isinstance(embedding, Words) for embedding in self.embeddings.values())
        self.slot = TEXT_SLOT if has_words else SLOT
        scale = width**-0.5
        self.blank = nn.Parameter(torch.randn(width) * scale)
        self.marker = nn.Parameter(torch.randn(width) * scale)
        self.places = nn.Embedding(config.per_round, width) if config.per_round > 1 else None
        for name, embedding in self.embeddings.items():
            if isinstance(embedding, Rows):
                self.add_module(name, nn.Embedding(len(embedding.names), width))
            elif isinstance(embedding, Numbers):
                self.add_module(name, _numbers_to_token(embedding, width))
        for table in self.children():
            if isinstance(table, nn.Embedding):
                nn.init.normal_(table.weight, std=scale)
        self.controls = _controls(self.embeddings)
        """What an action holds of keys and numbers: the kind and the name of a key, or the kind and column of
        a number or of one of its waves."""
        if on_queries and not self.controls:
            raise ConfigError(
                "model.query_actions adds keys and numbers to queries, but model.action has none; omit it."
            )
        self.to_queries = nn.Linear(config.per_round * len(self.controls), width) if on_queries else None
        self.new_weights = frozenset[str]()
        """Names of the weights that `adapted` found in another adapter in part or not at all."""

    @property
    def max_tokens(self) -> int:
        """Most tokens of a round's action."""
        longest = 1 + sum(embedding.max_positions for embedding in self.embeddings.values())
        return -(-self.config.per_round * longest // self.slot) * self.slot

    @property
    def max_text_tokens(self) -> int:
        """Most tokens of the texts of one action; 0 if the model takes no text."""
        texts = (each for each in self.embeddings.values() if isinstance(each, Words))
        return sum(embedding.max_tokens for embedding in texts)

    def adapted(
        self, weights: Mapping[str, Tensor], former: ActionConfig, wanted: Callable[[str], bool]
    ) -> dict[str, Tensor]:
        """Return the wanted weights of an adapter for other actions as weights of this one.

        Those of keys, and of numbers of the vector if both adapters name them, are taken by name, those of
        the actions of a round by position. A vector of another size without names starts anew. What the
        other adapter has no weights for keeps its values, and is in `new_weights`.
        """
        own = {name: tensor for name, tensor in self.state_dict().items() if wanted(name)}
        taken, new = dict(weights), set[str]()
        for name, (dim, mine, theirs) in self._labels(former).items():
            known = (
                name in own and name in weights and own[name].shape[1 - dim] == weights[name].shape[1 - dim]
            )
            if not known or (mine == theirs and own[name].shape == weights[name].shape):
                continue
            if mine and theirs:
                pairs = [(index, theirs.index(each)) for index, each in enumerate(mine) if each in theirs]
                here, there = torch.tensor(pairs, dtype=torch.long).view(-1, 2).unbind(1)
                taken[name] = own[name].index_copy(dim, here, weights[name].index_select(dim, there))
                new |= {name} if len(pairs) < len(mine) else set()
            elif own[name].shape[dim] != weights[name].shape[dim]:
                layer = name.split(".")[0]
                taken = {each: tensor for each, tensor in taken.items() if each.split(".")[0] != layer}
        self.new_weights |= new | (own.keys() - taken.keys())
        return own | {name: tensor for name, tensor in taken.items() if name in own}

    def _labels(self, former: ActionConfig) -> dict[str, tuple[int, list[Any], list[Any]]]:
        """Return the dimension of weights with an entry for each name, number or action, and their names."""
        found: dict[str, tuple[int, list[Any], list[Any]]] = {
            "places.weight": (0, list(range(self.config.per_round)), list(range(former.per_round)))
        }
        for kind in self.kinds:
            own = self.embeddings[kind.name]
            if kind.name not in former.kinds or isinstance(own, Words):
                continue
            other: Any = kind.embedding(former.kinds[kind.name])
            if isinstance(own, Rows):
                found[f"{kind.name}.weight"] = (0, list(own.names), list(other.names))
            if isinstance(own, Numbers):
                # Those without names are taken by position, if there are as many.
                mine, theirs = (_columns(each) if each.names else [] for each in (own, other))
                found[f"{kind.name}.0.weight"] = (1, mine, theirs)
        others = {kind.name: kind.embedding(former.kinds[kind.name]) for kind in _kinds(former)}
        mine, theirs = (
            [(place, *control) for place in range(count) for control in controls]
            for count, controls in (
                (self.config.per_round, self.controls),
                (former.per_round, _controls(others)),
            )
        )
        return found | {"to_queries.weight": (1, mine, theirs)}

    def validate(self, action: Action, backbone: Backbone) -> list[list[int]]:
        """Check every part of an action; return the token ids of the text of each action in the round.

        Raises:
            InputError: the model does not support a part of the action.
        """
        action.check(self.config)
        return [self._token_ids(each, backbone) for each in self._in_order(action)]

    def _in_order(self, action: Action) -> tuple[Action, ...]:
        return action.of_round(self.config.per_round).chunk or (action,)

    def _token_ids(self, action: Action, backbone: Backbone) -> list[int]:
        """Return the ids of the texts of one action.

        Raises:
            InputError: one is empty or too long.
        """
        ids: list[int] = []
        for name, embedding in self.embeddings.items():
            text = action.part(name)
            if not isinstance(embedding, Words) or text is None:
                continue
            longest = embedding.max_tokens
            if len(text) > 40 * longest:
                raise InputError(f"The action has {len(text.split())} words; use one short sentence.")
            own = backbone.token_ids(text)
            if not 0 < len(own) <= longest:
                raise InputError(f"The action has {len(own)} tokens; use 1 to {longest}.")
            ids += own
        return ids

    def of_rounds(self, actions: Sequence[Action]) -> list[Action]:
        """Return the actions of an episode's rounds as the model takes them: with motions of cameras."""
        return resolve_camera_targets([action.of_round(self.config.per_round) for action in actions])

    def forward(self, actions: Sequence[Action], backbone: Backbone) -> EncodedAction:
        """Embed actions; the length of each (a multiple of `slot`) does not depend on the others.

        The camera's pose must be a motion: resolve targets first (`Action.relative_to`).
        """
        tokens, on_queries = self._tokens(actions, backbone), None  # the tokens first: they check the actions
        if self.to_queries is not None and actions:
            held = self._moved(list(map(self._held, actions)), self.marker.dtype)
            on_queries = self.to_queries(torch.stack(list(held)))
        return EncodedAction(tokens, on_queries)

    def _held(self, action: Action) -> list[float]:
        """Return what the actions of a round hold of every one of `controls`, one action after the other."""
        found: list[float] = []
        for each in self._in_order(action):
            for kind in self.kinds:
                embedding = self.embeddings[kind.name]
                if isinstance(embedding, Rows):
                    pressed = self._features(kind, each)
                    found += [float(row in pressed) for row in range(len(embedding.names))]
                elif isinstance(embedding, Numbers):
                    values = self._features(kind, each) or [0.0] * embedding.size
                    numbers = torch.tensor([values], dtype=torch.float64)  # also of whole numbers
                    found += with_waves(numbers, embedding.waves)[0].tolist()
        return found

    def _tokens(self, actions: Sequence[Action], backbone: Backbone) -> list[Float[Tensor, "_ d"]]:
        ids = [each for action in actions for each in self.validate(action, backbone)]
        every = [each for action in actions for each in self._in_order(action)]
        looked_up = [self._look_up(backbone.embed, ids)]
        for kind in self.kinds:
            if isinstance(self.embeddings[kind.name], Rows):
                rows: Any = [self._features(kind, action) for action in every]
                looked_up.append(self._look_up(self.get_submodule(kind.name), rows))
        embedded = [
            [self.marker[None], *parts, *self._numbers(action)]
            for action, *parts in zip(every, *looked_up, strict=True)
        ]
        pieces, lengths, count = [], [], self.config.per_round
        for first in range(0, len(embedded), count):
            parts = embedded[first : first + count]
            if self.places is not None:
                markers = self.marker + self.places.weight
                parts = [[marker[None], *each[1:]] for marker, each in zip(markers, parts, strict=True)]
            row = [part.to(self.marker.dtype) for each in parts for part in each]
            tokens = sum(map(len, row))
            padding = -tokens % self.slot
            pieces += [self.blank.expand(padding, -1), *row]
            lengths.append(padding + tokens)
        return list(torch.cat(pieces).split(lengths)) if lengths else []

    def text_states(self, actions: Sequence[Action], backbone: Backbone) -> Float[Tensor, "b n d"]:
        """Return the backbone's hidden states of the texts of actions, which see nothing else, then zeros."""
        ids = [self.validate(action, backbone)[0] for action in actions]
        return backbone.text_states(self._moved(ids, torch.long), self.max_text_tokens + 1)

    def _numbers(self, action: Action) -> list[Tensor]:
        """Return the tokens of the numbers of one action: a matrix product of several would round otherwise.

        Absent ones are embedded as empty tensors, so that all processes of a training run have gradients for
        the same weights.
        """
        parts = []
        for kind in self.kinds:
            embedding = self.embeddings[kind.name]
            if isinstance(embedding, Numbers):
                (values,) = self._moved([self._features(kind, action)], self.marker.dtype)
                parts.append(self.get_submodule(kind.name)(values.view(-1, embedding.size)))
        return parts

    def _features(self, kind: ActionKind, action: Action) -> Sequence[float]:
        """Return the input of a kind's embedding; nothing for an action without the kind."""
        value = action.part(kind.name)
        return () if value is None else kind.features(value, self.config.kinds[kind.name])

    def _moved(self, rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Sequence[Tensor]:
        """Return rows of numbers on the model's device, moved together."""
        values = torch.tensor([value for row in rows for value in row], dtype=dtype)
        return to_device(values, self.marker.device).split([len(row) for row in rows])

    def _look_up(self, table: Callable[[Tensor], Tensor], rows: Sequence[Sequence[int]]) -> Sequence[Tensor]:
        """Embed rows of ids together: each look-up would have a gradient as large as the table."""
        (ids,) = self._moved([[each for row in rows for each in row]], torch.long)
        return table(ids).split([len(row) for row in rows])


def _kinds(config: ActionConfig) -> tuple[ActionKind, ...]:
    """Return the kinds of action that a model takes, in their order."""
    return tuple(kind for kind in action_kinds() if kind.name in config.kinds)


def _controls(embeddings: Mapping[str, Embedding]) -> list[tuple[str, Any]]:
    """Return the kind and the name of all keys, and the kind and the column of all numbers."""
    found: list[tuple[str, Any]] = []
    for kind, embedding in embeddings.items():
        if isinstance(embedding, Rows):
            found += [(kind, name) for name in embedding.names]
        elif isinstance(embedding, Numbers):
            found += [(kind, column) for column in _columns(embedding)]
    return found


def with_waves(numbers: Float[Tensor, "n k"], count: int) -> Float[Tensor, "n k2"]:
    """Return numbers, then sines and cosines less 1 of the first `count` of them, from slow to fast waves.

    All of them are 0 for 0: a number that is absent is neither seen nor learned from.
    """
    if not count:
        return numbers
    # In fp32 or better: in bf16 the angles of the fastest waves would be rounded to a 25th of a turn.
    rates = math.pi * 2.0 ** torch.arange(WAVE_OCTAVES, device=numbers.device)
    angles = (upcast(numbers[:, None, :count]) * rates[:, None]).flatten(1)
    return torch.cat([numbers, angles.sin().to(numbers), (angles.cos() - 1).to(numbers)], dim=1)


class NumbersLayer(nn.Linear):
    """A linear layer of numbers, and of sines and cosines of those that are bounded."""

    def __init__(self, numbers: Numbers, width: int) -> None:
        super().__init__(numbers.size + 2 * WAVE_OCTAVES * numbers.waves, width)
        self.waves = numbers.waves

    def forward(self, input: Float[Tensor, "n k"]) -> Float[Tensor, "n d"]:
        return super().forward(with_waves(input, self.waves))


def _numbers_to_token(numbers: Numbers, width: int) -> nn.Sequential:
    return nn.Sequential(NumbersLayer(numbers, width), nn.SiLU(), nn.Linear(width, width))


def _columns(numbers: Numbers) -> list[tuple[str | int, int]]:
    """Return the name, or the place, and the wave, 0 for none, of each column of `with_waves`."""
    names = numbers.names or tuple(range(numbers.size))
    waves = range(1, 1 + 2 * WAVE_OCTAVES)
    return [*((name, 0) for name in names), *((name, w) for w in waves for name in names[: numbers.waves])]
