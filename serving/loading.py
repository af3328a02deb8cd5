"""Loading a model with the options of a server: the first one, and those added later."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from worldmodel.errors import ConfigError
from worldmodel.models.inference import optimize
from worldmodel.models.loading import model_folder
from worldmodel.models.offload import Offload
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout.saved import identify
from worldmodel.serving.engine import limits as engine_limits
from worldmodel.serving.engine.adapters import ServedAdapters
from worldmodel.serving.engine.batching import Compute
from worldmodel.serving.engine.generator_processes import GeneratorProcesses, keep_part
from worldmodel.serving.engine.limits import EngineLimits
from worldmodel.serving.engine.local import Engine, InProcessEngine
from worldmodel.serving.settings import OPTIONS, EngineOptions, ServerConfig
from worldmodel.serving.worlds.service import WorldService


@dataclass(frozen=True)
class Loaded:
    """A model on its device, and what its engine can hold."""

    folder: Path
    model: WorldModel
    adapters: ServedAdapters
    limits: EngineLimits
    digest: str | None
    """Of its whole weights, if this process keeps a part of them."""
    processes: GeneratorProcesses | None
    """Those that share its generator."""


def load(
    name_or_path: str,
    device: torch.device,
    options: EngineOptions,
    engine: str = "in-process",
    adapters: Mapping[str, Path] | None = None,
) -> Loaded:
    """Load a model, and prepare it for an engine.

    Raises:
        ConfigError: the engine cannot hold the sessions of the model.
        ModelError: the model or an adapter cannot be loaded.
    """
    folder, adapters = model_folder.resolve(name_or_path), adapters or {}
    model = _load_model(name_or_path, device, options)
    attached = _attach(model, adapters, options, engine)
    parallelism, size = options.generator_parallelism
    digest = None
    if parallelism == "tensor" and size > 1:
        digest = identify(model)  # of the whole model, of which this process keeps a part
        keep_part(model, 0, size, device)
    limits = engine_limits.resolve(options, model, engine)
    quantization = options.quantization if engine != "vllm" else None
    optimize(model, options.cache_threshold, quantization, options.compile)
    processes = None
    if size > 1:
        processes = GeneratorProcesses.start(
            folder, model, size, adapters, quantization, options.compile, parallelism
        )
    return Loaded(folder, model, attached, limits, digest, processes)


async def start(
    loaded: Loaded, compute: Compute, options: EngineOptions, engine: str = "in-process"
) -> WorldService:
    """Start the engine of a model, whose calls run where those of others do."""
    model, limits, attached = loaded.model, loaded.limits, loaded.adapters
    runner: Engine
    if engine == "vllm":
        from worldmodel.serving.engine.vllm_engine import VllmEngine

        runner = await VllmEngine.start(
            model_folder.backbone_folder(loaded.folder),
            adapters={name: attached.folders.get("backbone", {}).get(name) for name in attached.names},
            limits=limits,
            tensor_parallel_size=options.tensor_parallel_size,
            quantization=options.quantization,
            enforce_eager=options.enforce_eager,
        )
    else:
        runner = InProcessEngine(model.backbone, compute, attached, limits.kv_bytes, limits.max_model_len)
    return WorldService(
        model,
        runner,
        compute=compute,
        adapters=attached,
        processes=loaded.processes,
        digest=loaded.digest,
        max_batch=limits.max_sessions,
    )


def _load_model(name_or_path: str, device: torch.device, options: EngineOptions) -> WorldModel:
    if options.offload and device.type == "cpu":
        raise ConfigError(
            "--offload keeps parts on the CPU instead of a GPU, and the device is cpu; omit it."
        )
    divided = options.generator_tensor_parallel_size > 1
    if not (options.offload or divided):
        return WorldModel.from_pretrained(name_or_path, device=device)
    model = WorldModel.from_pretrained(name_or_path)
    if divided:  # the generator stays on the CPU until it is divided
        for name, module in model.named_children():
            if name != "generator":
                module.to(device)
        for parameter in model.parameters(recurse=False):
            parameter.data = parameter.data.to(device)
    else:
        Offload(model, device)
    return model


def _attach(
    model: WorldModel, adapters: Mapping[str, Path], options: EngineOptions, engine: str
) -> ServedAdapters:
    """Convert the backbone to the dtype of the options, and attach adapters to the model."""
    in_process = engine != "vllm"
    if in_process and options.dtype:
        model.backbone.model.to(getattr(torch, options.dtype))  # type: ignore[arg-type]
    attached = ServedAdapters(model, adapters, elsewhere=() if in_process else ("backbone",))
    if options.offload and (name := attached.replaces("generator", "codec")):
        raise ConfigError(f"An adapter replaces {name!r} as a whole, which --offload cannot move; omit one.")
    if options.generator_tensor_parallel_size > 1 and (name := attached.replaces("generator")):
        raise ConfigError(
            f"An adapter replaces {name!r} as a whole, which --generator-tensor-parallel-size cannot divide; "
            "omit one."
        )
    return attached


def check_options(options: EngineOptions, engine: str, config: ServerConfig) -> None:
    """Raise `ConfigError` if two options exclude each other, or a folder does not exist."""
    parallelism, size = options.generator_parallelism
    if parallelism == "tensor" and options.sequence_parallel_size > 1:
        raise ConfigError(
            f"--sequence-parallel-size is {options.sequence_parallel_size} and "
            f"{OPTIONS[parallelism]} is {size}; processes divide tokens or weights, so set one of them."
        )
    used = f"{OPTIONS[parallelism]} is {size}"
    if size > 1 and options.offload:
        raise ConfigError(f"{used}, whose processes keep the generator on their devices; omit --offload.")
    if parallelism == "tensor" and options.quantization and engine != "vllm":
        raise ConfigError(f"{used}, which does not divide quantized weights; omit --quantization.")
    elsewhere = {
        "--engine vllm": engine == "vllm",
        "--offload": options.offload,
        OPTIONS[parallelism]: size > 1,
    }
    changed = {"--quantization": options.quantization is not None, "--compile": options.compile}
    _check_folder(
        "--adapters-dir",
        config.adapters_dir,
        elsewhere | changed,
        "adds adapters to layers as they are in this process",
        "name the adapters at the start by --adapter",
    )
    _check_folder(
        "--models-dir",
        config.models_dir,
        elsewhere,
        "adds models that this process keeps on its device",
        "serve each model by a server of its own",
    )


def _check_folder(
    option: str, folder: Path | None, excluding: Mapping[str, bool], purpose: str, instead: str
) -> None:
    """Raise `ConfigError` if a folder of what can be added later does not exist, or an option excludes it."""
    if folder is None:
        return
    if not folder.is_dir():
        raise ConfigError(f"{option} is {str(folder)!r}, which is not a folder; make it first.")
    if used := [name for name, is_set in excluding.items() if is_set]:
        raise ConfigError(f"{option} {purpose}, which {used[0]} changes; omit one of them, or {instead}.")
