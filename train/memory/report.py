"""`worldmodel info --plan`: the memory that a config needs, and what to change if it does not fit."""

import json
from collections.abc import Sequence
from dataclasses import replace

import torch

from worldmodel.config import TrainConfig, TrainedConfig
from worldmodel.errors import ConfigError
from worldmodel.parallel.mesh import data_parallel
from worldmodel.train.memory.estimate import MemoryEstimate, StepEstimator, microbatches
from worldmodel.train.run.settings import load

GIB = 2**30
USABLE = 0.9
"""Share of a GPU's memory for tensors; libraries, communication and fragmentation take the rest."""
DEFAULT_MEMORY_GIB = 80.0
"""Memory of a GPU where none is visible."""
NUM_GPUS = (1, 8, 64)
MOST_GPUS = 1024
LORA_RANK = 16
Ways = dict[str, StepEstimator]
"""Ways to train a stage, by name."""
COLUMNS = ("weights", "gradients", "optimizer", "copies", "gathered", "activations", "total")


def report(
    name: str,
    overrides: list[str],
    as_json: bool,
    gpus: Sequence[int] | None = None,
    stage: str | None = None,
    memory_gib: float | None = None,
) -> None:
    """Print the memory of one GPU in a step of a stage.

    A stage that does not fit and trains large components in full is estimated with LoRA, too.

    Args:
        name: A config.
        overrides: Settings that override it.
        as_json: Whether to print JSON.
        gpus: Numbers of GPUs; None takes those of 1, 8 and 64 on which the stage runs.
        stage: A stage; None is the last.
        memory_gib: Memory of a GPU; None takes the visible one's, or 80 GiB.

    Raises:
        ConfigError: there is no such stage, or the stage, the model and the mesh do not fit each other.
    """
    config = load(name, overrides)
    if not config.stages or (stage is not None and stage not in config.stages):
        known = ", ".join(config.stages) or "none"
        raise ConfigError(f"The config has no stage {stage or ''!r}; its stages: {known}.")
    stage = stage or list(config.stages)[-1]
    memory_gib = memory_gib or _visible_gib()
    gpus = gpus or [n for n in NUM_GPUS if _runs_on(n, config, stage)] or NUM_GPUS
    ways: Ways = {stage: StepEstimator(config, stage)}
    rows = {(stage, n): ways[stage].estimate(n) for n in gpus}
    lora = with_lora(config, stage)
    if lora and not all(fits(each, memory_gib) for each in rows.values()):
        name = f"{stage} by LoRA"
        ways[name] = StepEstimator(lora, stage)
        rows |= {(name, n): ways[name].estimate(n) for n in gpus}
    advice = {key: advise(*key, ways, memory_gib) for key, each in rows.items() if not fits(each, memory_gib)}
    if as_json:
        found = [
            {"way": way, "gpus": n, "fits": fits(each, memory_gib)}
            | {column: getattr(each, column) for column in COLUMNS}
            | ({"would_fit": advice[way, n]} if (way, n) in advice else {})
            for (way, n), each in rows.items()
        ]
        sizes = next(iter(ways[stage].played.values())).weights.sizes
        print(json.dumps({"parameters": sizes, "memory_gib": memory_gib, "memory_bytes": found}, indent=2))
        return
    _print_table(ways[stage], rows, memory_gib)
    for (way, n), found in advice.items():
        print(
            f"{_label(way, n)}: does not fit into {memory_gib:g} GiB, of which {USABLE:.0%} hold tensors; "
            f"would fit: {', or '.join(found) or 'none of the changes tried'}"
        )
    print(
        f"\nAt the peak of a step with activations: {config.activations}; without the memory of libraries "
        "and fragmentation."
    )


def _print_table(step: StepEstimator, rows: dict[tuple[str, int], MemoryEstimate], memory_gib: float) -> None:
    for part, size in next(iter(step.played.values())).weights.sizes.items():
        print(f"  {part:17s} {size / 1e9:8.3f} B parameters")
    print(f"\n{'GiB per GPU':28}" + "".join(f"{each:>12}" for each in COLUMNS) + "  fits")
    for (way, n), each in rows.items():
        values = "".join(f"{getattr(each, column) / GIB:12.2f}" for column in COLUMNS)
        print(f"  {_label(way, n):26}{values}  {'yes' if fits(each, memory_gib) else 'no'}")


def _label(way: str, num_gpus: int) -> str:
    return f"{way}, {num_gpus} GPU{'s' * (num_gpus > 1)}"


def fits(estimate: MemoryEstimate, memory_gib: float) -> bool:
    """Return whether a GPU holds an estimate."""
    return estimate.total <= USABLE * memory_gib * GIB


def _runs_on(num_gpus: int, config: TrainConfig, stage: str) -> bool:
    try:
        replicate, shard = data_parallel(config.mesh, num_gpus)
        microbatches(config.stages[stage], replicate * shard)
    except ConfigError:
        return False
    return True


def with_lora(config: TrainConfig, name: str) -> TrainConfig | None:
    """Return a config whose stage trains its large components by LoRA; None if it trains none in full."""
    stage = config.stages[name]
    low = {
        key: replace(each, lora_rank=LORA_RANK) for key, each in stage.train.items() if _is_large(key, each)
    }
    if not low:
        return None
    return replace(config, stages=config.stages | {name: replace(stage, train=stage.train | low)})


def _is_large(key: str, settings: TrainedConfig) -> bool:
    return key.split(".")[0] in ("backbone", "generator") and not settings.lora_rank


def advise(way: str, num_gpus: int, ways: Ways, memory_gib: float) -> list[str]:
    """Return changes with which a step fits that does not, each alone."""
    step = ways[way]
    found = []
    more = 2 * num_gpus
    while not step.config.mesh.dp_shard and more <= min(MOST_GPUS, _most_gpus(step)):
        if fits(step.estimate(more), memory_gib):
            found.append(f"{more} GPUs")
            break
        more *= 2
    variants = _variants(step, num_gpus) | {
        f"lora_rank={LORA_RANK}": lora for name, lora in ways.items() if name == f"{way} by LoRA"
    }
    return found + [change for change, each in variants.items() if fits(each.estimate(num_gpus), memory_gib)]


def _variants(step: StepEstimator, num_gpus: int) -> Ways:
    """Return the same stage with less memory for activations, by what is changed."""
    config = step.config
    stage = step.config.stages[step.name]
    found: Ways = {}
    if config.activations == "keep":
        found["activations=recompute"] = StepEstimator(replace(config, activations="recompute"), step.name)
    if microbatches(stage, num_gpus // (config.mesh.cp * config.mesh.sp))[0] > 1:
        small = {step.name: replace(stage, microbatch_size=1)}
        changed = replace(config, stages=config.stages | small)
        found[f"stages.{step.name}.microbatch_size=1"] = StepEstimator(changed, step.name)
    return found


def _most_gpus(step: StepEstimator) -> int:
    mesh = step.config.mesh
    return step.config.stages[step.name].batch_size * mesh.cp * mesh.sp


def _visible_gib() -> float:
    if not torch.cuda.is_available():
        return DEFAULT_MEMORY_GIB
    return torch.cuda.get_device_properties(0).total_memory / GIB
