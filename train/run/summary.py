"""The summary of a stage that is printed at its start."""

from collections import Counter, defaultdict

from torch import nn

from worldmodel.config import StageConfig, WorldModelConfig
from worldmodel.models import lora
from worldmodel.parallel.mesh import Mesh
from worldmodel.train.diagnostics.throughput import GIB, stacks, step_flops
from worldmodel.train.distributed import Root, to_local
from worldmodel.train.optim.optimizers import rates_of, trained_parameters


def describe(root: Root, stage: StageConfig, mesh: Mesh) -> list[str]:
    """Return lines on the size of every component, the mesh, the work of a step, and memory."""
    total: Counter[str] = Counter()
    trained: Counter[str] = Counter()
    weights = trained_weights = 0
    for name, parameter in root.named_parameters():
        component = name.split(".")[1] if name.startswith("model.") else "objective"
        total[component] += parameter.numel()
        weights += _bytes(parameter)
        if parameter.requires_grad:
            trained[component] += parameter.numel()
            trained_weights += _bytes(parameter)
    lines = [
        f"  {name:10s} {total[name] / 1e6:9.2f} M parameters, {trained[name] / 1e6:9.2f} M trained"
        for name in total
    ]
    config = root.model.config
    frames = 1 + stage.rounds * config.chunk_frames
    round_tokens = root.model.round_tokens
    backbone, generator = step_flops(root.model, stage)
    generator_tokens = stacks(root.model, stage.rounds)[1].tokens
    lines += [
        f"  mesh       dp_replicate {mesh.dp_replicate} x dp_shard {mesh.dp_shard} x cp {mesh.cp} x sp "
        f"{mesh.sp} = {mesh.world_size} processes on {mesh.device.type}",
        f"  sample     {frames} frames, {stage.rounds} rounds of {round_tokens} backbone tokens and "
        f"{generator_tokens} generator tokens; "
        f"{stage.batch_size} samples per step",
        f"  work       {backbone / 1e12:.3g} TFLOP per step of rounds in the backbone's layers and "
        f"{generator / 1e12:.3g} in the generator's, forward and backward, if both run",
        f"  memory     {(weights + 3 * trained_weights) / GIB:.3f} GiB per process for weights, gradients "
        "and optimizers, without activations",
    ]
    lines += _rates(root, stage)
    if new := sorted(root.model.action.new_weights):
        lines.append(
            f"  actions    the model of init_from has none or not all of {', '.join(new)}; the rest starts "
            "with random weights"
        )
    return lines


def _rates(root: Root, stage: StageConfig) -> list[str]:
    """Return lines on the peak learning rates, and on pretrained parts that have the default ones."""
    own = stage.optimizer != "muon"
    rates: defaultdict[str, set[str]] = defaultdict(set)
    defaults: defaultdict[str, set[str]] = defaultdict(set)
    for name, parameter in trained_parameters(root):
        lr, muon_lr = rates_of(name, parameter, stage)
        rate, default = (muon_lr, StageConfig.muon_lr) if muon_lr and not own else (lr, StageConfig.lr)
        text = f"{'lr' if default == StageConfig.lr else 'muon_lr'} {rate:g}"
        rates[name.split(".")[0]].add(text)
        part = next((part for part in _pretrained(root.model.config) if name.startswith(f"{part}.")), None)
        if part and rate == default and not lora.is_new(name):
            defaults[part].add(text)
    described = "; ".join(f"{part} {', '.join(sorted(texts))}" for part, texts in rates.items())
    return [
        f"  rates      {described}",
        *(
            f"  warning    {part} is pretrained, and {' and '.join(sorted(texts))} are the defaults, for a "
            f"small model from random weights; set them in the stage's train.{part}, for example lr 1e-5, or "
            "1e-4 with lora_rank, and muon_lr 0"
            for part, texts in defaults.items()
        ),
    ]


def _pretrained(config: WorldModelConfig) -> list[str]:
    """Return the parts of a model whose weights come from other libraries."""
    sources = {
        "backbone": config.backbone.pretrained,
        "vision.encoder": config.vision.encoder,
        "generator.network.transformer": config.generator and config.generator.pretrained,
    }
    return [part for part, source in sources.items() if source]


def _bytes(parameter: nn.Parameter) -> int:
    return to_local(parameter).nbytes
