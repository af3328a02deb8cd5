"""`worldmodel info --plan`: the memory that a config needs, and what to change if it does not fit."""

import json
from collections.abc import Iterator
from dataclasses import replace

from worldmodel import config as configs
from worldmodel.config import TrainConfig, TrainedConfig
from worldmodel.errors import ConfigError
from worldmodel.train.memory_estimate import MemoryEstimate, Step, rollout

GIB = 2**30
USABLE = 0.9
"""Share of a GPU's memory for tensors; libraries, communication and fragmentation take the rest."""
COLUMNS = ("weights", "gradients", "optimizer", "ema", "gathered", "activations", "total")


def report(
    name: str, overrides: list[str], as_json: bool, num_gpus: int, memory_gib: float, worlds: int
) -> None:
    """Print the memory of one GPU in a step of every stage of a config, and in a rollout.

    Raises:
        ConfigError: the config has no stages, or its stages, model and mesh do not fit each other.
    """
    config = configs.load(name, overrides)
    if not config.stages:
        raise ConfigError("The config has no stages; give at least one under `stages`.")
    steps = {stage: Step(config, stage, num_gpus) for stage in config.stages}
    estimates = {stage: step.estimate() for stage, step in steps.items()}
    estimates["rollout"] = rollout(config, worlds)
    too_large = [stage for stage in steps if not fits(estimates[stage], memory_gib)]
    advice = {stage: list(changes(config, stage, steps[stage], num_gpus, memory_gib)) for stage in too_large}
    if as_json:
        rows = {stage: vars(each) | {"total": each.total} for stage, each in estimates.items()}
        print(json.dumps({"gpus": num_gpus, "memory_bytes": rows, "would_fit": advice}, indent=2))
        return
    print(f"GiB per GPU, {num_gpus} GPU{'s' * (num_gpus > 1)}" + "".join(f"{each:>13}" for each in COLUMNS))
    for stage, each in estimates.items():
        values = "".join(f"{getattr(each, column) / GIB:13.2f}" for column in COLUMNS)
        print(f"  {stage:17}{values}")
    for stage in estimates if memory_gib else ():
        if fits(estimates[stage], memory_gib):
            print(f"{stage} fits into {memory_gib:g} GiB.")
        else:
            found = "; ".join(advice.get(stage, [])) or "none of the changes tried"
            print(
                f"{stage} does not fit into {memory_gib:g} GiB, of which {USABLE:.0%} hold tensors. "
                f"Would fit: {found}."
            )
    print(
        f"\nAt the peak of a step, and of a round of {worlds} world{'s' * (worlds > 1)} with a full history "
        "on one GPU; computed on tensors without memory, without that of libraries and fragmentation."
    )


def fits(estimate: MemoryEstimate, memory_gib: float) -> bool:
    """Return whether a GPU holds an estimate; one of 0 GiB is not checked."""
    return not memory_gib or estimate.total <= USABLE * memory_gib * GIB


def changes(config: TrainConfig, name: str, step: Step, num_gpus: int, memory_gib: float) -> Iterator[str]:
    """Yield changes with which a stage fits, each alone."""
    for factor in (2, 4, 8, 16, 32):
        if fits(step.estimate(step.shards * factor), memory_gib):
            yield f"{num_gpus * factor} GPUs (mesh.dp_shard)"
            break
    tried: dict[str, TrainConfig] = {}
    if config.activations == "keep":
        tried["activations=recompute"] = replace(config, activations="recompute")
    if config.activations != "offload":
        tried["activations=offload"] = replace(config, activations="offload")
    stage = config.stages[name]
    low = {key: replace(each, lora_rank=16) for key, each in stage.train.items() if _is_large(key, each)}
    if low:
        lora = replace(stage, train=stage.train | low)
        tried[f"lora_rank 16 for {', '.join(low)}"] = replace(config, stages=config.stages | {name: lora})
    for change, changed in tried.items():
        if fits(Step(changed, name, num_gpus).estimate(), memory_gib):
            yield change


def _is_large(key: str, settings: TrainedConfig) -> bool:
    return key.split(".")[0] in ("backbone", "generator") and not settings.lora_rank
