"""An inverse-dynamics model: the action of a round, recognised in its frames.

A small network is trained on recorded rounds. It predicts the words and keys of an action independently, and
its numbers. An action is recognised in frames if the network finds it more likely than all other
candidates: `NUM_CANDIDATES` different actions of the data, or all of them if there are fewer.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from worldmodel.actions import Action, action_kind, action_kinds
from worldmodel.errors import InputError
from worldmodel.eval.data.episodes import EpisodeReader
from worldmodel.eval.metrics import Metric, Played

NUM_CANDIDATES = 16
MAX_WORDS = 512
"""Most words and keys that are distinguished, the most frequent ones."""
MAX_BYTES = 2**28
"""Memory of the recorded rounds on which the network is trained."""
NUM_FRAMES = 4
"""Most frames of a round that the network reads, spread over it, besides the frame before it."""
BATCH = 64
EPOCHS = 8
"""Least number of times that a round is seen in training."""
NOISE = 0.05
"""Standard deviation of the noise on training frames, whose values are -1 to 1."""

Rounds = UInt8[np.ndarray, "b f h w 3"]


class ActionCode:
    """Targets of the network: words and keys that an action has, and its numbers, standardised.

    Raises:
        InputError: All of them are the same.
    """

    def __init__(self, actions: Sequence[Action]) -> None:
        self.distinct = list(dict.fromkeys(actions))
        if len(self.distinct) < 2:
            raise InputError(
                f"All {len(actions)} rounds for the inverse-dynamics model have the same action "
                f"({self.distinct[0]}); pass data with different ones (--train-data)."
            )
        counted = Counter(word for action in actions for word in set(_words(action)))
        self.words = [word for word, _ in counted.most_common(MAX_WORDS)]
        self.places = {word: place for place, word in enumerate(self.words)}
        self.parts = {
            kind.name: max(len(_numbers(action)[kind.name]) for action in actions) for kind in action_kinds()
        }
        numbers = np.stack([self._flat(action) for action in actions])
        self.mean, self.scale = numbers.mean(axis=0), np.maximum(numbers.std(axis=0), 1e-6)

    @property
    def width(self) -> int:
        """Number of outputs of the network."""
        return len(self.words) + len(self.mean)

    def encode(self, actions: Sequence[Action]) -> Float[Tensor, "b d"]:
        """Return the targets of actions: 1 for every word that they have, then their numbers."""
        rows = torch.zeros(len(actions), self.width)
        for row, action in zip(rows, actions, strict=True):
            row[[self.places[word] for word in _words(action) if word in self.places]] = 1
            row[len(self.words) :] = torch.from_numpy((self._flat(action) - self.mean) / self.scale)
        return rows

    def likelihood(
        self, predicted: Float[Tensor, "... d"], target: Float[Tensor, "... d"]
    ) -> Float[Tensor, "..."]:
        """Return the log-likelihood of targets, up to a constant."""
        words = len(self.words)
        said = F.binary_cross_entropy_with_logits(
            predicted[..., :words], target[..., :words], reduction="none"
        ).sum(-1)
        return -said - (predicted[..., words:] - target[..., words:]).square().sum(-1) / 2

    def candidates(self, action: Action, rng: np.random.Generator) -> list[Action]:
        """Return the action and others of the data, `NUM_CANDIDATES` or all."""
        others = [each for each in self.distinct if each != action]
        chosen = rng.permutation(len(others))[: NUM_CANDIDATES - 1].tolist()
        return [action, *(others[index] for index in chosen)]

    def _flat(self, action: Action) -> Float[np.ndarray, " n"]:
        """Return the numbers of an action; 0 for parts that it does not have."""
        found = _numbers(action)
        padded = [np.pad(found[part], (0, size - len(found[part]))) for part, size in self.parts.items()]
        return np.concatenate(padded).astype(np.float32)


class InverseDynamics(nn.Module):
    """Predicts the action of a round from the frame before it and frames of it."""

    def __init__(self, code: ActionCode, num_frames: int) -> None:
        super().__init__()
        widths = (3 * (1 + num_frames), 32, 64, 128, 128)
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(8, after), nn.GELU()]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(16 * widths[-1], 256), nn.GELU(), nn.Linear(256, code.width))

    def forward(self, frames: Float[Tensor, "b f 3 h w"]) -> Float[Tensor, "b d"]:
        """Return the outputs for the frame before a round and frames of it, in -1 to 1."""
        changes = torch.cat([frames[:, :1], frames[:, 1:] - frames[:, :1]], dim=1)
        return self.head(self.layers(rearrange(changes, "b f c h w -> b (f c) h w")))


class ActionRecognised(Metric):
    """The action of a round is recognised in its frames."""

    name, title, of_truth = "action", "action recognised in the frames", True

    def __init__(self, network: InverseDynamics, code: ActionCode) -> None:
        self.network, self.code = network, code

    @property
    def summary(self) -> dict[str, int]:
        """Different actions in the rounds for training, and the number of candidates in a comparison."""
        distinct = len(self.code.distinct)
        return {"distinct_actions": distinct, "candidates": min(distinct, NUM_CANDIDATES)}

    @torch.no_grad()
    def __call__(self, played: Played) -> list[bool]:
        frames = np.concatenate([played.starts[:, None], _spread(played.clips)], axis=1)
        predicted = self.network(_pixels(frames))
        found: list[bool] = []
        for row, action in zip(predicted, played.actions, strict=True):
            rng = np.random.default_rng(len(self.code.distinct))
            choices = self.code.encode(self.code.candidates(action, rng))
            own, *others = self.code.likelihood(row.expand_as(choices), choices).tolist()
            found.append(own > max(others))
        return found


def train_recogniser(reader: EpisodeReader, steps: int) -> ActionRecognised:
    """Train an inverse-dynamics model on recorded rounds.

    Raises:
        InputError: The episodes cannot be used, or all their actions are the same.
    """
    rounds, actions = _recorded(reader, steps * BATCH // EPOCHS)
    code = ActionCode(actions)
    targets = code.encode(actions)
    rng = np.random.default_rng(reader.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(reader.seed)
        network = InverseDynamics(code, rounds.shape[1] - 1)
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps, pct_start=0.1)
        for _ in range(steps):
            rows = rng.integers(len(rounds), size=BATCH)
            frames = _pixels(rounds[rows])
            predicted = network(frames + NOISE * torch.randn_like(frames))
            loss = -code.likelihood(predicted, targets[torch.from_numpy(rows)]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return ActionRecognised(network.eval().requires_grad_(False), code)


def _recorded(reader: EpisodeReader, count: int) -> tuple[Rounds, list[Action]]:
    """Return frames and actions of `count` recorded rounds, or of as many as fit in memory.

    The episodes are shuffled, because data are often sorted by task.
    """
    rounds: list[np.ndarray] = []
    actions: list[Action] = []
    for episode in reader.read(shuffled=True):
        for before, action, clip in zip(episode.starts, episode.actions, episode.clips, strict=True):
            rounds.append(np.concatenate([before[None], _spread(clip[None])[0]]))
            actions.append(action)
        if len(rounds) >= count or len(rounds) * rounds[0].nbytes >= MAX_BYTES:
            break
    return np.stack(rounds), actions


def _spread(clips: UInt8[np.ndarray, "b t h w 3"]) -> Rounds:
    """Return up to `NUM_FRAMES` frames of every clip, the last one among them."""
    length = clips.shape[1]
    return clips[:, np.unique(np.linspace(length - 1, 0, NUM_FRAMES, endpoint=False).round().astype(int))]


def _pixels(frames: Rounds) -> Float[Tensor, "b f 3 h w"]:
    return rearrange(torch.from_numpy(frames), "b f h w c -> b f c h w").float() / 127.5 - 1


def _words(action: Action) -> list[str]:
    """Return the words of an action's text and the names of its keys, in a chunk with their position."""
    if action.chunk:
        return [f"{place} {word}" for place, each in enumerate(action.chunk) for word in _words(each)]
    return [name for kind, value in action.parts for name in action_kind(kind).names_of(value)]


def _numbers(action: Action) -> dict[str, Sequence[float]]:
    """Return the numbers of each kind of action, in a chunk one action after the other."""
    if action.chunk:
        parts = [_numbers(each) for each in action.chunk]
        return {name: [x for part in parts for x in part[name]] for name in parts[0]}
    found: dict[str, Sequence[float]] = {kind.name: () for kind in action_kinds()}
    return found | {kind: action_kind(kind).vector_of(value) for kind, value in action.parts}
