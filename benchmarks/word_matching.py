"""Which cells a sentence names, read from the states of a frozen backbone: does it match words by itself?

In every scene of the shapes world each object is named by a sentence of its own. A linear classifier reads
from the state of a cell with an object whether that object is named; it is fitted on two thirds of the scenes
and measured on the others. The rows differ in the embeddings of the queries: made by the vision adapter
before any training, or the word for the colour on each cell; the last row is that by a backbone with random
weights. The area under the curve is 0.5 by chance.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from worldmodel import config as configs
from worldmodel.errors import WorldModelError
from worldmodel.eval.tables import markdown
from worldmodel.media.tensors import to_tensor
from worldmodel.models.loading import deferred
from worldmodel.models.world_model import WorldModel
from worldmodel.parallel.layout import Layout
from worldmodel.train import start
from worldmodel.types import Action, Episode
from worldmodel.worlds.shapes.source import LABEL_WORDS, ShapesSource

COLOURS = LABEL_WORDS["colour"]
RIDGE = 0.1
"""Weight of the penalty, for standardised states, as a share of their number."""


def build(config: str, pretrained: bool) -> WorldModel:
    """Return the model that a run begins with; without pretrained weights, its backbone is random."""
    model = start.build_model(configs.load(config))
    deferred.materialize(model, torch.device("cpu"))
    deferred.load_shards(model)
    if not pretrained:
        model.backbone.model.init_weights()
        for module in model.backbone.model.modules():
            model.backbone.model._init_weights(module)
    return model.eval().requires_grad_(False)


def word_queries(model: WorldModel, colours: Tensor) -> Tensor:
    """Return the embeddings of the cells' colours, `[cells, d]`; their mean where no object is (-1)."""
    ids = [model.backbone.token_ids(f" {word}") for word in COLOURS]
    embeds = torch.stack([model.backbone.embed(torch.tensor(each)).mean(dim=0) for each in ids])
    return torch.cat([embeds, embeds.mean(dim=0, keepdim=True)])[colours]


def states(model: WorldModel, episode: Episode, words: bool) -> tuple[list[Tensor], Tensor]:
    """Return the states of cells with objects after every layer, `[n, d]` each, and which are named, `[n]`.

    The sentences that name the objects of the scene follow each other along the first axis.
    """
    seen = model.encode_observation(model.observe(to_tensor([episode.observations[0]])))
    assert episode.labels is not None, "the world labels cells"
    label = torch.from_numpy(episode.labels["words"]).flatten(0, 1)[:, : len(COLOURS)]
    colours = torch.where(label.any(dim=1), label.argmax(dim=1), -1)
    queries = word_queries(model, colours) if words else seen.queries[0]
    held, layers, named = colours >= 0, [], []
    for colour in colours[held].unique().tolist():
        (sentence,) = model.encode_action([Action(f"the {COLOURS[colour]} object jumps")])
        embeds = torch.cat([seen.tokens[0], sentence, queries])
        layout = Layout.causal(len(embeds))
        output = model.backbone.model.base_model(
            inputs_embeds=embeds[None],
            position_ids=layout.position,
            use_cache=False,
            layout=layout,
            output_hidden_states=True,
        )
        layers.append([layer[0, -len(queries) :][held].float() for layer in output.hidden_states[1:]])
        named.append(colours[held] == colour)
    return [torch.cat(each) for each in zip(*layers, strict=True)], torch.cat(named)


def area_under_curve(scores: Tensor, truth: Tensor) -> float:
    """Return the probability that a positive has a higher score than a negative (Mann-Whitney)."""
    better = scores[truth][:, None] - scores[~truth][None]
    return float((better > 0).double().mean() + (better == 0).double().mean() / 2)


def classified(x: Tensor, named: Tensor, other: Tensor, truth: Tensor) -> float:
    """Fit a ridge regression to `x`, and return the area under its curve on `other`."""
    mean, scale = x.mean(dim=0), x.std(dim=0) + 1e-6
    x, other = ((each - mean).double() / scale for each in (x, other))
    gram = x.T @ x + RIDGE * len(x) * torch.eye(x.shape[1], dtype=x.dtype)
    weights = torch.linalg.solve(gram, x.T @ (named.double() - named.double().mean()))
    return area_under_curve(other @ weights, truth)


def measure(model: WorldModel, words: bool, num_scenes: int, seed: int, title: str) -> list[float]:
    """Return the area under the curve after every layer."""
    source = ShapesSource("single", keys=())
    episodes = [source.episode("rounds", seed, index, rounds=1) for index in range(num_scenes)]
    scenes = [states(model, episode, words) for episode in tqdm(episodes, desc=title, leave=False)]
    first = num_scenes * 2 // 3
    parts = []
    for part in (scenes[:first], scenes[first:]):
        layers, truth = zip(*part, strict=True)
        parts.append(([torch.cat(each) for each in zip(*layers, strict=True)], torch.cat(truth)))
    (fitted, named), (measured, truth) = parts
    return [classified(x, named, other, truth) for x, other in zip(fitted, measured, strict=True)]


def rows(config: str, num_scenes: int, seed: int) -> Mapping[str, list[float]]:
    """Measure all rows."""
    made: dict[str, list[float]] = {}
    for title, words, pretrained in (
        ("features of the vision adapter", False, True),
        ("the word for the colour", True, True),
        ("the word for the colour, random weights", True, False),
    ):
        with torch.inference_mode():
            made[title] = measure(build(config, pretrained), words, num_scenes, seed, title)
    return made


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="shapes_smol", help="config of a run with a pretrained backbone")
    parser.add_argument("--num-samples", type=int, default=200, help="scenes")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--json", type=Path, help="where to write the figures of all layers")
    args = parser.parse_args()
    try:
        made = rows(args.config, args.num_samples, args.seed)
    except WorldModelError as error:
        sys.exit(str(error))
    depth = len(next(iter(made.values())))
    shown = sorted({min(3, depth), depth})
    head = ("queries", *(f"after layer {layer}" for layer in shown))
    print(
        markdown([head, *((title, *(f"{aucs[k - 1]:.2f}" for k in shown)) for title, aucs in made.items())])
    )
    if args.json:
        args.json.write_text(json.dumps(made, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
