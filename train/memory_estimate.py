"""Estimates of the GPU memory of a training step, without allocating weights.

Weights, gradients and optimizer states are counted on the meta device. Activations are measured with fake
tensors (shapes without memory) on one and on two layers, whose difference is that of one layer.
"""

import json
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from worldmodel import config as configs
from worldmodel.errors import ConfigError
from worldmodel.models import lora
from worldmodel.models.backbone.causal_lm import Backbone
from worldmodel.models.conditioning import Condition
from worldmodel.models.loading import pretrained
from worldmodel.models.world_model import WorldModel
from worldmodel.train.distributed import STACKS, layers
from worldmodel.train.trainer import freeze

GIB = 2**30
Method = Literal["lora", "full"]
NUM_GPUS = (1, 8, 64)


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one GPU in a step, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    """Gathered layers while they compute, and weights that stay gathered between uses."""
    activations: float

    @property
    def total(self) -> float:
        """The sum, without libraries and fragmentation."""
        return self.weights + self.gradients + self.optimizer + self.gathered + self.activations


def report(name: str, overrides: list[str], as_json: bool) -> None:
    """Print the memory of a step of a config, by LoRA and in full, on 1, 8 and 64 GPUs."""
    config = configs.load(name, overrides)
    model = build_on_meta(config.model)
    sizes: Counter[str] = Counter()
    for parameter_name, parameter in model.named_parameters():
        sizes[parameter_name.split(".")[0]] += parameter.numel()
    saved = activation_bytes(config)
    estimates = {
        (method, number): estimate(config, method, number, saved)
        for method in get_args(Method)
        for number in NUM_GPUS
    }
    if as_json:
        rows = [
            {"method": method, "gpus": number, **asdict(each)} for (method, number), each in estimates.items()
        ]
        print(json.dumps({"parameters": dict(sizes), "memory_bytes": rows}, indent=2))
        return
    for part, size in sizes.items():
        print(f"  {part:10s} {size / 1e9:8.3f} B parameters")
    columns = ("weights", "gradients", "optimizer", "gathered", "activations", "total")
    print(f"\nGiB per GPU{'':8}" + "".join(f"{column:>13}" for column in columns))
    for (method, number), each in estimates.items():
        values = "".join(f"{getattr(each, column) / GIB:13.2f}" for column in columns)
        print(f"  {method:5s} {number:4d} GPU{'s' if number > 1 else ' '}   {values}")
    rounds = _last_stage(config).rounds
    print(
        f"\nOne sample of {rounds} round{'s' if rounds > 1 else ''} per GPU, weights sharded over all GPUs, "
        f"activations: {config.activations}. Estimated with fake tensors, without the memory of libraries."
    )


def estimate(
    config: configs.TrainConfig, method: Method, num_gpus: int, activations: float, lora_rank: int = 16
) -> MemoryEstimate:
    """Estimate a step of a joint stage with one sample per GPU and weights sharded over all GPUs.

    Args:
        config: The run; its last stage sets the rounds of a sample.
        method: `lora` (backbone and generator by LoRA, adapters in full) or `full` (all in full).
        num_gpus: GPUs over which FSDP shards.
        activations: The result of `activation_bytes` for the config.
        lora_rank: Rank of LoRA.

    Raises:
        ConfigError: the model of the config cannot be built.
    """
    model = build_on_meta(config.model)
    large = configs.TrainedConfig(lora_rank=lora_rank if method == "lora" else 0)
    adapter = configs.TrainedConfig()
    train = {"action": adapter, "queries": adapter, "condition_adapter": adapter}
    train |= {"backbone": large, generator_part(model): large}
    stage = replace(_last_stage(config), train=train)
    with torch.device("meta"):
        lora.add(model, train)
    freeze(model, stage)
    weights = sum(_bytes(parameter) for parameter in model.parameters())
    trained = sum(_bytes(parameter) for parameter in model.parameters() if parameter.requires_grad)
    stack = layers(model)
    inside = {id(parameter) for layer in stack for parameter in layer.parameters()}
    outside = sum(_bytes(parameter) for parameter in model.parameters() if id(parameter) not in inside)
    largest = max(sum(_bytes(parameter) for parameter in layer.parameters()) for layer in stack)
    return MemoryEstimate(
        weights=weights / num_gpus,
        gradients=trained / num_gpus,
        optimizer=2 * trained / num_gpus,
        gathered=outside + 2 * largest if num_gpus > 1 else 0,  # the next layer is prefetched
        activations=activations,
    )


def build_on_meta(config: configs.WorldModelConfig) -> WorldModel:
    """Build a model without memory for its weights; components with an `architecture` are not read."""
    parts = config.codec, config.vision, config.generator
    codec, vision, generator = (replace(part, **_without_weights(part)) for part in parts)
    text = replace(config.condition_adapter, text=False)  # the text encoder runs before the step
    config = replace(config, codec=codec, vision=vision, generator=generator, condition_adapter=text)
    backbone = _language_model(config.backbone)
    with torch.device("meta"):
        return WorldModel(config, backbone)


def _without_weights(part: Any) -> dict[str, None]:
    name = "encoder" if hasattr(part, "encoder") else "pretrained"
    return {name: None} if part.architecture else {}


def _language_model(config: configs.BackboneConfig) -> Backbone:
    """Build the backbone from its `architecture` if that has a vocab_size, else from its folder."""
    if config.pretrained and "vocab_size" not in config.architecture:
        return Backbone.on_meta(config)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"": 0}, unk_token="")))
    size = config.architecture.get("vocab_size", config.vocab_size)
    with torch.device("meta"):
        chosen = config.architecture or configs.SMALL_DECODER
        architecture = pretrained.build_config({**chosen, "vocab_size": size}, "backbone")
        model = AutoModelForCausalLM.from_config(
            architecture, attn_implementation="sdpa", dtype=pretrained.dtype_of(config.dtype)
        )
        return Backbone(model, tokenizer)


def generator_part(model: WorldModel) -> str:
    """Return the name of the part of the generator that is trained: without pretrained encoders."""
    return "generator" if model.config.generator.is_ours else "generator.network"


def activation_bytes(config: configs.TrainConfig) -> float:
    """Estimate the bytes that one sample saves for the backward pass, in bf16 autocast."""
    rounds = _last_stage(config).rounds
    model = config.model
    shallow, deep = (_saved_bytes(_backbone(model, rounds, count)) for count in (1, 2))
    first, second = (_saved_bytes(_generator(model, rounds, count)) for count in (1, 2))
    whole = build_on_meta(model)
    depths = len(layers(whole.backbone.model)), len(layers(whole.get_submodule(generator_part(whole))))
    token_bytes = rounds * whole.round_tokens * whole.backbone.width * 2
    cells = (model.context_latents + model.chunk_latents) * model.codec.cells
    latent_bytes = rounds * cells // whole.generator.cells_per_token * whole.generator.width * 2
    total = 0.0
    for depth, base, layer, hidden in (
        (depths[0], shallow, deep - shallow, token_bytes),
        (depths[1], first, second - first, latent_bytes),
    ):
        rest = base - layer
        # A recomputed layer saves its input; the current one saves everything.
        total += rest + (depth * layer if config.activations == "keep" else depth * hidden + layer)
    return total


def _backbone(config: configs.WorldModelConfig, rounds: int, count: int) -> Callable[[], Tensor]:
    backbone = _truncated(lambda: _language_model(config.backbone), count)
    model = build_on_meta(config)
    tokens = rounds * model.round_tokens

    def run() -> Tensor:
        fake = _to_fake(backbone.model)
        embeds = torch.randn(1, tokens, backbone.width, requires_grad=True)
        return fake.base_model(inputs_embeds=embeds, use_cache=False).last_hidden_state.float().sum()

    return run


def _generator(config: configs.WorldModelConfig, rounds: int, count: int) -> Callable[[], Tensor]:
    model = build_on_meta(config)
    _truncated(lambda: model.get_submodule(generator_part(model)), count)

    def run() -> Tensor:
        fake = _to_fake(model.generator)
        _to_fake(model.codec)  # with which some generators encode their context
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


def _saved_bytes(run: Callable[[], Tensor]) -> float:
    """Return the bytes that a forward pass saves for the backward pass."""
    seen: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            seen[storage._cdata] = storage.nbytes()
        return tensor

    hooks: AbstractContextManager[Any] = saved_tensors_hooks(count, lambda tensor: tensor)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("cpu", torch.bfloat16), hooks:
        result = run()
    assert result.requires_grad, "nothing was saved"
    return float(sum(seen.values()))


def _to_fake(module: Any) -> Any:
    """Allocate fake weights for a module of the meta device, in the current fake mode."""
    return module.to_empty(device="cpu")


def _truncated(build: Callable[[], Any], count: int) -> Any:
    """Keep only the first `count` layers of every stack."""
    root = build()
    for module in list(root.modules()):
        for name in STACKS:
            stack = module._modules.get(name)
            if isinstance(stack, nn.ModuleList):
                module._modules[name] = stack[:count]
    return root


def _last_stage(config: configs.TrainConfig) -> configs.StageConfig:
    if not config.stages:
        raise ConfigError("The config has no stages; the last one sets the rounds of a sample.")
    return list(config.stages.values())[-1]


def _bytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()
