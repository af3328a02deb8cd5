"""Three ONNX graphs of a world: of a first frame, a round, and frames.

`encode` makes the context of a first frame, `round` predicts the latents of a round, and `decode` makes
frames of latents.

What changes from round to round goes in and comes out, so the page keeps it as it likes: undo and forks are
free. `round` gets the rounds before in one of two ways: their keys and values (`past`), or their embeddings
(`prefix`), which it computes again where the oldest rounds were dropped.
"""

import copy
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from transformers import DynamicCache

from worldmodel.actions import ActionKind, Numbers, Rows, Words
from worldmodel.errors import ConfigError, pip_install
from worldmodel.export.web.winograd import replace_convolutions
from worldmodel.media.tensors import to_pixels
from worldmodel.models.action import with_waves
from worldmodel.models.code import CodeSampling
from worldmodel.models.layers import attention
from worldmodel.models.outcome import symexp
from worldmodel.models.vision.adapter import LatentVision, Observation
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout.observation_score import states_of

OPSET = 23
NUMBER_KINDS = ("vector", "mouse")
"""Kinds of action whose values are the numbers themselves; of others, the page gets those of each button."""
LEAST_ROUNDED = 1024
"""Values of a weight from which on it is rounded to bf16; smaller ones are biases and scales."""


def check(model: WorldModel) -> None:
    """Raise `ConfigError` with the first part of a model, if any, that cannot go into the graphs."""
    if model.state is None:
        part = "its generator: its states regress no frames, and denoising is too slow for a browser"
    elif model.state.merge > 1:
        part = (
            "its generator: its states regress coarse frames (state.merge), which a generator has to render"
        )
    elif model.codec.causal or not isinstance(model.vision, LatentVision):
        part = "its codec or vision encoder (model.codec, model.vision), which is of another library"
    elif unknown := [kind.name for kind in model.action.kinds if not _is_known(model, kind)]:
        part = f"its {unknown[0]} actions (model.action.{unknown[0]})"
    else:
        return
    raise ConfigError(f"This model cannot play in a browser because of {part}; serve it instead.")


class EncodeGraph(nn.Module):
    """The first frame of a world, as a canvas has it, to the context of its first round."""

    def __init__(self, model: WorldModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, frame: UInt8[Tensor, "h w 4"]) -> Float[Tensor, "1 s c h2 w2"]:
        latents = self.model.codec.encode(to_pixels(frame[None, None, :, :, :3]))
        return self.model.codec.context(latents, None, self.model.config.context_latents)


class DecodeGraph(nn.Module):
    """Latents to frames, as a canvas has them, and the pixels of the first one as the codec gave them."""

    def __init__(self, model: WorldModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, latents: Float[Tensor, "1 s c h w"]
    ) -> tuple[UInt8[Tensor, "t h2 w2 4"], Float[Tensor, "h2 w2 3"]]:
        pixels = rearrange((self.model.decode(latents)[0] + 1) * 127.5, "t c h w -> t h w c")
        frames = F.pad(pixels.round(), (0, 1), value=255.0).to(torch.uint8)  # opaque, as a canvas wants it
        return frames, pixels[0]


class RoundGraph(nn.Module):
    """One round of one world with 0 denoising steps."""

    def __init__(self, model: WorldModel) -> None:
        super().__init__()
        self.model = model
        self.table = nn.Parameter(_token_table(model))
        self.kinds = [kind.name for kind in number_kinds(model)]
        if model.known is not None:
            self.known = nn.Parameter(model.known.states)
        rows = (len(each.names) for each in model.action.embeddings.values() if isinstance(each, Rows))
        self.first_key = len(self.table) - sum(rows)
        layers: Any = model.backbone.model.base_model.layers
        _return_newest(layers[-1], model.config.num_queries)

    def forward(
        self,
        context: Float[Tensor, "1 s c h w"],
        action: Int[Tensor, " n"],
        prefix: Float[Tensor, "m d"],
        past: Float[Tensor, "layers 2 1 g p e"],
        numbers: Float[Tensor, "k j"] | None = None,
        code: Float[Tensor, "1 v o"] | None = None,
        draws: Float[Tensor, "1 v"] | None = None,
    ) -> tuple[Tensor, ...]:
        """Play the round.

        Args:
            context: Latent frames that the round continues.
            action: Rows of the table: words, padding, markers and keys; later ones are those of `numbers`.
            prefix: Embeddings of rounds to compute again.
            past: Keys and values of the rounds before.
            numbers: Numbers of each kind of action of the round, filled up with zeros to the widest kind: for
                every action of the round, one row per kind.
            code: Code that led to the context; zeros before the first round.
            draws: Random numbers in [0, 1) for the code of this round.
        """
        model = self.model
        history = None if code is None or model.state is None else model.state.history(code)
        seen = model.encode_observation(Observation(model.unseen(context)), history)
        queries = seen.queries[0]
        if model.action.to_queries is not None:
            queries = queries + model.action.to_queries(self._held(action, numbers))
        round_embeds = torch.cat([seen.tokens[0], self._embed(action, numbers), queries])
        given = torch.cat([prefix, round_embeds])[None]
        cache = DynamicCache([(layer[0], layer[1]) for layer in past.unbind(0)])
        first = past.shape[4]
        hidden = model.backbone.model.base_model(
            inputs_embeds=given,
            past_key_values=cache,
            use_cache=True,
            position_ids=torch.arange(first, first + given.shape[1])[None],
        ).last_hidden_state
        layers: list[Any] = cache.layers
        present = torch.stack([torch.stack([layer.keys, layer.values]) for layer in layers])
        state = model.read_state(hidden, context, draws=draws, sampling=CodeSampling())
        assert state.forecast is not None, "`check` refuses models without a forecast"
        after = model.codec.context(state.forecast, None, model.config.context_latents, context)
        outputs = [state.forecast, after, round_embeds, present]
        if model.state is not None and model.state.outcome is not None:
            bins, end = model.state.outcome(hidden)
            outputs += [symexp(bins.softmax(dim=1) @ model.state.outcome.bins), end]
        if state.code is not None and state.log_probability is not None:
            outputs += [state.code, state.log_probability]
        if model.known is not None:
            outputs.append((states_of(hidden) - self.known).square().sum(dim=1).amin(dim=0).sqrt())
        return tuple(outputs)

    def _embed(self, action: Int[Tensor, " n"], numbers: Float[Tensor, "k j"] | None) -> Float[Tensor, "n d"]:
        rows = len(self.table)
        tokens = F.embedding(action.clamp(max=rows - 1), self.table)
        if numbers is None:
            return tokens
        # Row r of `numbers` is of kind r modulo the number of kinds; all are embedded as every kind, and each
        # token takes its own.
        made = torch.stack(
            [self.model.action.get_submodule(kind)(numbers[:, : self._size(kind)]) for kind in self.kinds],
            dim=1,
        ).flatten(0, 1)
        chosen = (action - rows).clamp(min=0) * len(self.kinds) + (action - rows).clamp(min=0) % len(
            self.kinds
        )
        return torch.where((action < rows)[:, None], tokens, F.embedding(chosen, made))

    def _held(self, action: Int[Tensor, " n"], numbers: Float[Tensor, "k j"] | None) -> Float[Tensor, " a"]:
        """Return what `ActionAdapter` reads of keys and numbers, from the rows of the table."""
        adapter = self.model.action
        count, keys = adapter.config.per_round, self.first_key
        # A token is of the action whose marker was the newest, and padding of none.
        markers = (action >= keys - count) & (action < keys)
        owner = markers.long().cumsum(0)[None] == torch.arange(1, count + 1)[:, None]
        held, kinds = [], iter(range(len(self.kinds)))
        for embedding in adapter.embeddings.values():
            if isinstance(embedding, Rows):
                pressed = action[:, None] == keys + torch.arange(len(embedding.names))
                held.append((owner.float() @ pressed.float()).clamp(max=1))
                keys += len(embedding.names)
            elif isinstance(embedding, Numbers):
                assert numbers is not None, "there is a row for every kind of numbers"
                given = numbers[next(kinds) :: len(self.kinds), : embedding.size]
                held.append(with_waves(given, embedding.waves))
        return torch.cat(held, dim=1).flatten()

    def _size(self, kind: str) -> int:
        embedding = self.model.action.embeddings[kind]
        assert isinstance(embedding, Numbers), "only kinds of numbers have a network"
        return embedding.size


def _return_newest(layer: Any, count: int) -> None:
    """Make the last layer of a backbone return its newest tokens only.

    Later rounds need the keys and values of those before. Nobody reads what else is computed of them, so the
    exporter leaves it out.
    """
    whole = layer.forward

    def forward(hidden: Tensor, *, position_embeddings: Any, position_ids: Tensor, **others: Any) -> Tensor:
        def part(tokens: slice) -> Tensor:
            embeddings = tuple(each[:, tokens] for each in position_embeddings)
            places = position_ids[:, tokens]
            return whole(hidden[:, tokens], position_embeddings=embeddings, position_ids=places, **others)

        part(slice(-count))
        return part(slice(-count, None))

    layer.forward = forward


def number_kinds(model: WorldModel) -> list[ActionKind]:
    """Return the kinds of action that enter the graph as numbers, in the order of their tokens."""
    return [kind for kind in model.action.kinds if isinstance(model.action.embeddings[kind.name], Numbers)]


def write(model: WorldModel, folder: Path) -> None:
    """Write `encode.onnx`, `round.onnx` and `decode.onnx`, with weights rounded to bf16.

    Raises:
        ConfigError: a part of the model cannot go into them, or the package onnx is missing.
    """
    check(model)
    try:
        import onnx  # noqa: F401 -- torch imports both
        import onnxscript  # noqa: F401
    except ImportError:
        raise ConfigError(f"--web needs onnx; run {pip_install('web')}.") from None
    model = copy.deepcopy(model).float().eval().requires_grad_(False)
    with torch.no_grad(), attention.using("sdpa"):
        _write(EncodeGraph(model), (_frame(model),), folder / "encode.onnx", ["frame"], ["context"], ({},))
        replace_convolutions(model)  # of what is computed in every round
        latents = torch.zeros(1, 3, *model.config.latent_shape[1:])
        _write(
            DecodeGraph(model),
            (latents,),
            folder / "decode.onnx",
            ["latents"],
            ["frames", "first"],
            ({1: torch.export.Dim.DYNAMIC},),
        )
        names, args, dims = _round_inputs(model)
        _write(RoundGraph(model), args, folder / "round.onnx", names, round_outputs(model), dims)


def round_outputs(model: WorldModel) -> list[str]:
    """Return the names of what a round gives."""
    assert model.state is not None, "`check` refuses models without a state"
    outcome = ["reward", "end"] if model.state.outcome is not None else []
    code = ["next_code", "log_probability"] if model.state.code is not None else []
    known = ["distance"] if model.known is not None else []
    return ["forecast", "next_context", "round", "present", *outcome, *code, *known]


def _round_inputs(model: WorldModel) -> tuple[list[str], tuple[Any, ...], tuple[Any, ...]]:
    """Return names, examples and dynamic dimensions of the inputs of a round."""
    config, (layers, heads, width) = model.config, model.backbone.cache_shape
    tokens = model.round_tokens
    # `prefix` and `past` have different lengths, which the exporter would take for one otherwise.
    examples: dict[str, Any] = {
        "context": torch.zeros(1, config.context_latents, *config.latent_shape[1:]),
        "action": torch.zeros(model.action.slot, dtype=torch.long),
        "prefix": torch.zeros(tokens, model.backbone.width),
        "past": torch.zeros(layers, 2, 1, heads, tokens + 3, width),
    }
    any_length = torch.export.Dim.DYNAMIC
    dims: list[Any] = [{}, {0: any_length}, {0: any_length}, {4: any_length}]
    kinds = number_kinds(model)
    assert model.state is not None, "`check` refuses models without a state"
    code = model.state.code
    optional: list[Any] = [None, None, None]
    names = list(examples)
    if kinds:
        sizes = [model.action.embeddings[kind.name] for kind in kinds]
        widest = max(each.size for each in sizes if isinstance(each, Numbers))
        optional[0] = torch.zeros(config.action.per_round * len(kinds), widest)
        names.append("numbers")
    if code is not None:
        optional[1] = torch.zeros(1, code.length, code.classes)
        optional[2] = torch.zeros(1, code.length)
        names += ["code", "draws"]
    return names, (*examples.values(), *optional), (*dims, *(None if x is None else {} for x in optional))


def _token_table(model: WorldModel) -> Float[Tensor, "n d"]:
    """Return the embeddings of words, padding, the marker of every action of a round, and names of keys."""
    action, rows = model.action, []
    if any(isinstance(embedding, Words) for embedding in action.embeddings.values()):
        rows.append(model.backbone.embed(torch.arange(model.backbone.model.config.vocab_size)))
    rows.append(action.blank[None])
    rows.append(action.marker[None] if action.places is None else action.marker + action.places.weight)
    for name, embedding in action.embeddings.items():
        if isinstance(embedding, Rows):
            rows.append(action.get_parameter(f"{name}.weight"))
    return torch.cat([row.detach() for row in rows])


def _frame(model: WorldModel) -> UInt8[Tensor, "h w 4"]:
    size = model.config.codec.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return torch.zeros(height, width, 4, dtype=torch.uint8)


def _is_known(model: WorldModel, kind: ActionKind) -> bool:
    if not isinstance(model.action.embeddings[kind.name], Numbers) or kind.name in NUMBER_KINDS:
        return True
    return kind.widget(model.config.action.kinds[kind.name])["type"] == "buttons"


def _write(
    graph: nn.Module,
    args: tuple[Any, ...],
    file: Path,
    inputs: list[str],
    outputs: list[str],
    dims: tuple[Any, ...],
) -> None:
    import onnx

    for weight in graph.parameters():
        if weight.numel() >= LEAST_ROUNDED:
            weight.data = weight.bfloat16().float()
    # The exporter warns of torchvision's operators, which no graph here has.
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                graph.eval(),
                args,
                str(file),
                dynamo=True,
                external_data=False,
                input_names=inputs,
                output_names=outputs,
                dynamic_shapes=dims,
                opset_version=OPSET,
                verbose=False,
            )
    finally:
        logger.setLevel(level)
    model = onnx.load(file)
    _store_bf16(model)
    onnx.checker.check_model(model)
    onnx.save(model, file)


def _store_bf16(model: Any) -> None:
    """Store rounded weights in bf16, and cast them when the graph is loaded: half the bytes, the same speed.

    fp16 would round the smallest of the values that bf16 holds.
    """
    from onnx import TensorProto, helper, numpy_helper

    graph, kept, casts = model.graph, [], []
    for weight in graph.initializer:
        values = torch.from_numpy(numpy_helper.to_array(weight).copy())
        rounded = values.bfloat16()
        whole = weight.data_type == TensorProto.FLOAT and torch.equal(rounded.float(), values)
        if not whole or values.numel() < LEAST_ROUNDED:
            kept.append(weight)
            continue
        stored = rounded.view(torch.int16).numpy().tobytes()
        name = f"{weight.name}_bf16"
        kept.append(
            TensorProto(name=name, data_type=TensorProto.BFLOAT16, dims=values.shape, raw_data=stored)
        )
        casts.append(helper.make_node("Cast", [name], [weight.name], to=TensorProto.FLOAT))
    nodes = [*casts, *graph.node]
    for field, items in ((graph.initializer, kept), (graph.node, nodes)):
        del field[:]
        field.extend(items)
    del graph.value_info[:]
