"""What a training step would need of every GPU, told before any weight exists.

Weights, gradients and optimizer states are counted on the meta device; activations are measured with fake
tensors (shapes without memory) on one and on two layers, whose difference is a layer's.
"""

import json
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from worldmodel import config as configs
from worldmodel.config import (
    SMALL_DECODER,
    BackboneConfig,
    StageConfig,
    TrainConfig,
    TrainedConfig,
    WorldModelConfig,
)
from worldmodel.errors import ConfigError
from worldmodel.models import lora
from worldmodel.models.backbone.causal_lm import Backbone
from worldmodel.models.conditioning import Condition
from worldmodel.models.loading import pretrained
from worldmodel.models.world_model import WorldModel
from worldmodel.train.distributed import STACKS, layers
from worldmodel.train.trainer import freeze

GIB = 2**30
WAYS = ("lora", "full")
NUM_GPUS = (1, 8, 64)


@dataclass(frozen=True)
class Need:
    """Memory of one GPU in a step, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    """Layers that are whole while they compute, and what is never sharded between uses."""
    activations: float

    @property
    def total(self) -> float:
        """All of it; libraries and fragments come on top."""
        return self.weights + self.gradients + self.optimizer + self.gathered + self.activations


def report(name: str, overrides: list[str], as_json: bool) -> int:
    """Print what a step of a config would need, by LoRA and in full, on 1, 8 and 64 GPUs."""
    config = configs.load(name, overrides)
    model = on_meta(config.model)
    sizes: Counter[str] = Counter()
    for parameter_name, parameter in model.named_parameters():
        sizes[parameter_name.split(".")[0]] += parameter.numel()
    kept = activations(config)
    needs = {(way, number): plan(config, way, number, kept) for way in WAYS for number in NUM_GPUS}
    if as_json:
        rows = [{"way": way, "gpus": number, **asdict(need)} for (way, number), need in needs.items()]
        print(json.dumps({"parameters": dict(sizes), "memory_bytes": rows}, indent=2))
        return 0
    for part, size in sizes.items():
        print(f"  {part:10s} {size / 1e9:8.3f} B parameters")
    columns = ("weights", "gradients", "optimizer", "gathered", "activations", "total")
    print(f"\nGiB a GPU{'':10}" + "".join(f"{column:>13}" for column in columns))
    for (way, number), need in needs.items():
        values = "".join(f"{getattr(need, column) / GIB:13.2f}" for column in columns)
        print(f"  {way:5s} {number:4d} GPU{'s' if number > 1 else ' '}   {values}")
    rounds = _last(config).rounds
    print(
        f"\nOne sample of {rounds} round{'s' if rounds > 1 else ''} a GPU, weights sharded over all of them, "
        f"activations: {config.activations}. Estimated with fake tensors; what libraries hold comes on top."
    )
    return 0


def plan(config: TrainConfig, way: str, num_gpus: int, kept: float, lora_rank: int = 16) -> Need:
    """Estimate the step of a joint stage with one sample a GPU and weights sharded over all GPUs.

    Args:
        config: The run; its last stage says how many rounds a sample has, its `activations` what is kept.
        way: `lora` (backbone and generator by low-rank additions, adapters whole) or `full` (all of both).
        num_gpus: GPUs over which FSDP shards.
        kept: What `activations` returned for the config.
        lora_rank: Rank of the additions.

    Raises:
        ConfigError: the config describes no model that can be built.
    """
    if way not in WAYS:
        raise ConfigError(f"The way to train is {way!r}; use one of {', '.join(WAYS)}.")
    model = on_meta(config.model)
    rank = lora_rank if way == "lora" else 0
    by_rank, whole = TrainedConfig(lora_rank=rank), TrainedConfig()
    train = {name: whole for name in ("action", "queries", "condition_adapter")}
    train |= {"backbone": by_rank, generator_part(model): by_rank}
    stage = replace(_last(config), train=train)
    with torch.device("meta"):
        lora.add(model, train)
    freeze(model, stage)
    held = sum(_bytes(parameter) for parameter in model.parameters())
    learned = sum(_bytes(parameter) for parameter in model.parameters() if parameter.requires_grad)
    stacked = layers(model)
    inside = {id(parameter) for layer in stacked for parameter in layer.parameters()}
    outside = sum(_bytes(parameter) for parameter in model.parameters() if id(parameter) not in inside)
    largest = max(sum(_bytes(parameter) for parameter in layer.parameters()) for layer in stacked)
    alone = num_gpus == 1
    return Need(
        weights=held / num_gpus,
        gradients=learned / num_gpus,
        optimizer=2 * learned / num_gpus,
        gathered=0 if alone else outside + 2 * largest,  # the next layer is fetched while one computes
        activations=kept,
    )


def on_meta(config: WorldModelConfig) -> WorldModel:
    """Build a model without memory for its weights; of parts that are described nothing is read."""
    parts = config.codec, config.vision, config.generator
    codec, vision, generator = (replace(part, **_described(part)) for part in parts)
    text = replace(config.condition, text=False)  # the text encoder runs before, and is not held meanwhile
    config = replace(config, codec=codec, vision=vision, generator=generator, condition=text)
    backbone = _language_model(config.backbone)
    with torch.device("meta"):
        return WorldModel(config, backbone)


def _described(part: Any) -> dict[str, None]:
    name = "encoder" if hasattr(part, "encoder") else "pretrained"
    return {name: None} if part.architecture else {}


def _language_model(config: BackboneConfig) -> Backbone:
    """Build the backbone that is described, if its vocabulary is told too, else the one in its folder."""
    if config.pretrained and "vocab_size" not in config.architecture:
        return Backbone.on_meta(config)
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"": 0}, unk_token="")))
    size = config.architecture.get("vocab_size", config.vocab_size)
    with torch.device("meta"):
        chosen = config.architecture or SMALL_DECODER
        architecture = pretrained.describe({**chosen, "vocab_size": size}, "backbone")
        model = AutoModelForCausalLM.from_config(
            architecture, attn_implementation="sdpa", dtype=pretrained.dtype_of(config.dtype)
        )
        return Backbone(model, words)


def generator_part(model: WorldModel) -> str:
    """Return the name of the part of the generator that learns: of a pretrained one, not its encoders."""
    return "generator" if model.config.generator.is_ours else "generator.network"


def activations(config: TrainConfig) -> float:
    """Estimate the bytes that one sample keeps for the backward pass, in bf16 autocast."""
    rounds = _last(config).rounds
    model = config.model
    shallow, deep = (_kept(_backbone(model, rounds, count)) for count in (1, 2))
    first, second = (_kept(_generator(model, rounds, count)) for count in (1, 2))
    whole = on_meta(model)
    depths = _depth(whole.backbone.model), _depth(whole.get_submodule(generator_part(whole)))
    token_bytes = rounds * whole.round_tokens * whole.backbone.width * 2
    cells = (model.context_latents + model.chunk_latents) * model.codec.cells
    latent_bytes = rounds * cells // whole.generator.cells_per_token * whole.generator.width * 2
    total = 0.0
    for depth, base, layer, hidden in (
        (depths[0], shallow, deep - shallow, token_bytes),
        (depths[1], first, second - first, latent_bytes),
    ):
        rest = base - layer
        # Computed again, a layer keeps its input; the one at work has everything.
        total += rest + (depth * layer if config.activations == "keep" else depth * hidden + layer)
    return total


def _backbone(config: WorldModelConfig, rounds: int, count: int) -> Callable[[], Tensor]:
    backbone = _shallow(lambda: _language_model(config.backbone), count)
    model = on_meta(config)
    tokens = rounds * model.round_tokens

    def run() -> Tensor:
        fake = _materialised(backbone.model)
        embeds = torch.randn(1, tokens, backbone.width, requires_grad=True)
        return fake.base_model(inputs_embeds=embeds, use_cache=False).last_hidden_state.float().sum()

    return run


def _generator(config: WorldModelConfig, rounds: int, count: int) -> Callable[[], Tensor]:
    model = on_meta(config)
    _shallow(lambda: model.get_submodule(generator_part(model)), count)

    def run() -> Tensor:
        fake = _materialised(model.generator)
        _materialised(model.codec)  # which some generators look at their context with
        shape = (config.codec.latent_channels, *config.codec.grid)
        clean = torch.randn(rounds, config.chunk_latents, *shape)
        context = torch.randn(rounds, config.context_latents, *shape)
        width, ours = fake.token_width, config.generator.is_ours
        tokens = torch.randn(rounds, config.num_queries, width, requires_grad=True)
        condition = Condition(
            tokens=tokens,
            pooled=torch.randn(rounds, width) if ours else None,
            cells=torch.randn(rounds, config.codec.cells, width) if ours else None,
            forecast=clean if ours else None,
            text=None,
        )
        level = torch.ones(rounds, config.chunk_latents)
        return fake(clean, level, condition, fake.prefill(context, condition)).float().sum()

    return run


def _kept(run: Callable[[], Tensor]) -> float:
    """Measure what a forward pass saves for the backward pass."""
    seen: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            seen[storage._cdata] = storage.nbytes()
        return tensor

    hooks: AbstractContextManager[Any] = saved_tensors_hooks(count, lambda tensor: tensor)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("cpu", torch.bfloat16), hooks:
        result = run()
    assert result.requires_grad, "nothing was kept"
    return float(sum(seen.values()))


def _materialised(module: Any) -> Any:
    """Give a module of the meta device fake weights, inside the fake mode that is on."""
    return module.to_empty(device="cpu")


def _shallow(build: Callable[[], Any], count: int) -> Any:
    """Cut every stack of layers down to its first `count`."""
    made = build()
    for module in list(made.modules()):
        for name in STACKS:
            stack = module._modules.get(name)
            if isinstance(stack, nn.ModuleList):
                module._modules[name] = stack[:count]
    return made


def _depth(module: nn.Module) -> int:
    return len(layers(module))


def _last(config: TrainConfig) -> StageConfig:
    if not config.stages:
        raise ConfigError("The config has no stages; the last one says how long a sample is.")
    return list(config.stages.values())[-1]


def _bytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()
