"""The loss on held-out episodes, whether the model obeys by twin futures, and the best checkpoint."""

import dataclasses
import logging
import os
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn

from worldmodel.config import StageConfig, TrainConfig, ValidationConfig
from worldmodel.data import loader
from worldmodel.data.buckets import open_in_buckets
from worldmodel.data.clips import Clip
from worldmodel.data.sequence_loader import SequenceLoader
from worldmodel.data.sources import open_source, stage_weights
from worldmodel.episodes import StartImage
from worldmodel.errors import ConfigError, InputError
from worldmodel.eval.data.twins import read_twins, twin_figures, twin_reader
from worldmodel.eval.runner import ModelSubject
from worldmodel.io import atomic_folder
from worldmodel.train.checkpoint.checkpointer import load
from worldmodel.train.checkpoint.manifest import NAME as MANIFEST
from worldmodel.train.checkpoint.manifest import Manifest
from worldmodel.train.trainer import Trainer

BEST = "best"
"""Name of the folder of the best checkpoint, beside the others."""
NAME = "validation/loss"
TWIN_STEPS = 10
"""Actions of the twin futures that are played, or fewer where shorter ones were recorded."""
NUM_START_IMAGES = 8
NUM_KNOWN_FRAMES = 256
LARGE = 1e9
"""Parameters from which a quarter of these frames has to suffice: they pass through the backbone on a CPU."""
logger = logging.getLogger(__name__)


class NothingToValidateError(ConfigError):
    """The held-out source has no episodes for the tasks of a stage."""


def check_validation(config: TrainConfig) -> None:
    """Check that the source of the validation exists and that no stage draws from it.

    Raises:
        ConfigError: it does not, or a stage does.
    """
    source = config.validation.source
    if not source:
        return
    if source not in config.data.sources:
        raise ConfigError(
            f"validation.source is {source!r}, which is not in data.sources "
            f"({', '.join(config.data.sources)})."
        )
    for name, stage in config.stages.items():
        if stage_weights(config.data, stage)[source]:
            raise ConfigError(
                f"Stage {name} is trained on validation.source {source!r}; set its weight to 0 in "
                "data.sources and in the sources of stages."
            )


def validate(trainer: Trainer) -> dict[str, float]:
    """Return the mean losses over the first batches of the held-out source, and whether the model obeys.

    Every validation of a stage uses the same episodes and random numbers. As in training, sums and counts are
    those of all processes, so the mesh does not matter.

    Raises:
        NothingToValidateError: the source offers none of the stage's tasks.
        ConfigError: it cannot be read.
    """
    config = trainer.config
    mesh = trainer.mesh
    name = trainer.config.validation.source
    source = dataclasses.replace(config.data.sources[name], weight=1.0)
    data = dataclasses.replace(config.data, sources={name: source})

    def open_loader() -> loader.BatchLoader:
        sources = open_in_buckets(data, config.model)
        stage = validation_stage(config.validation, trainer.stage, sources[name].tasks)
        ranks = (mesh.dp_rank, mesh.dp_size)
        return loader.BatchLoader(sources, data, stage, config.seed, 0, *ranks, None, mesh.sum_counts)

    sums: defaultdict[str, float] = defaultdict(float)
    counts: defaultdict[str, float] = defaultdict(float)
    with SequenceLoader(open_loader, mesh) as stream:
        for batches in stream:
            for total, found in zip((sums, counts), trainer.evaluate(batches), strict=True):
                for key, value in found.items():
                    total[key] += value
    found = trainer.mean_losses(sums, counts) | obedience(trainer)
    return {f"validation/{name}": value for name, value in found.items()}


def criterion(found: Mapping[str, Any]) -> float:
    """Return that of which the best checkpoint has the least.

    With twin futures it is the share that is not obeyed plus the error there: the share alone changes in
    steps, and is the same for a world in which the actor fades. Otherwise it is the loss.
    """
    if "validation/obeyed" not in found:
        return found[NAME]
    return 1 - found["validation/obeyed"] + found["validation/error_there"]


def obedience(trainer: Trainer) -> dict[str, float]:
    """Play twin futures of the held-out source, and return `obeyed`, `contrast` and `error_there`.

    Nothing is returned without twins, in a stage that trains no rounds, and where processes share a sequence.
    """
    stage = trainer.stage
    if stage.objective == "codec" or not stage.tasks.get("rounds"):
        return {}
    # A generator that is not trained yet would hide the state that is.
    steps = None if "generator" in stage.train else trainer.config.model.least_inference_steps
    return _figures(trainer, steps, "model")


def codec_contrast(trainer: Trainer) -> float | None:
    """Return how much of the contrast of the twin futures the codec alone keeps; None without twins.

    What it loses of what actions change, no model that predicts its latents can show.
    """
    return _figures(trainer, None, "codec").get("contrast")


def _figures(trainer: Trainer, steps: int | None, row: Literal["model", "codec"]) -> dict[str, float]:
    """Return the figures of a row over the twin futures of the held-out source, if there are any."""
    config, settings, model = trainer.config, trainer.config.validation, trainer.root.model
    name = settings.source
    if not name or not settings.twins or trainer.mesh.sequence.size > 1:
        return {}
    data = dataclasses.replace(config.data, sources={name: config.data.sources[name]})
    reader = twin_reader(data, config.model, config.seed)
    if reader is None:
        return {}
    try:
        pairs = list(read_twins(reader, settings.twins))
    except InputError as error:
        logger.warning("Twin futures were left out: %s", error)
        return {}

    lengths = [len(pair.actions[0]) * pair.steps_per_round for pair in pairs]
    length = min(TWIN_STEPS, max(lengths, default=1))

    model.resize(config.model.codec.image_size)

    def compared() -> dict[str, Any]:
        subject = ModelSubject(model, steps)
        return twin_figures(subject, pairs, config.seed, (length,), codec_alone=row == "codec")

    with _evaluating(model):
        figures = trainer.without_gradients(compared)
    return {measure: found[str(length)][row]["value"] for measure, found in figures.items()}


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put all modules back into the mode of training or evaluation that they were in."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def validation_stage(settings: ValidationConfig, stage: StageConfig, offered: Collection[str]) -> StageConfig:
    """Return a stage of the validation's batches, with the tasks that the source offers.

    Raises:
        NothingToValidateError: there is none.
    """
    tasks = {task: weight for task, weight in stage.tasks.items() if task in offered}
    if not any(tasks.values()):
        raise NothingToValidateError(
            f"validation.source {settings.source!r} offers {', '.join(offered)}, but none of the stage's "
            f"tasks ({', '.join(stage.tasks)})"
        )
    return dataclasses.replace(
        stage, steps=settings.batches, tasks=tasks, sources={}, self_rollout=(0.0, 0.0)
    )


def start_images(config: TrainConfig) -> tuple[StartImage, ...]:
    """Return the first frames of held-out episodes, from which users of the model can start.

    There are none without a source of the validation, or if that is read front to back or encoded.
    """
    name = config.validation.source
    if not name:
        return ()
    source = open_source(name, config.data, config.model)
    images = []
    for index in range(0 if source.streams else min(NUM_START_IMAGES, source.size or NUM_START_IMAGES)):
        try:
            frames = _first_frames(source.at(index), source.tasks[0], config.seed, index)
        except InputError as error:
            logger.warning("A start image was left out: %s", error)
            continue
        if len(frames):
            images.append(StartImage(f"start {index + 1}", frames[0]))
    source.close()
    return tuple(images)


def known_frames(config: TrainConfig, model: nn.Module) -> np.ndarray:
    """Return frames of held-out episodes, uint8 `[n, h, w, 3]`, by which a model learns what it knows.

    There are none without a source of the validation, or if that is read front to back or encoded.
    """
    frames = []
    name = config.validation.source
    source = open_source(name, config.data, config.model) if name else None
    if source is not None:
        size = sum(parameter.numel() for parameter in model.parameters())
        count = NUM_KNOWN_FRAMES if size < LARGE else NUM_KNOWN_FRAMES // 4
        # Frames of an episode stay together: the last ones are compared with those of other episodes.
        for index in sorted(range(0 if source.streams else count), key=lambda i: i % (source.size or count)):
            # Damaged episodes were named before: their start images were left out.
            with suppress(InputError):
                observations = source.at(index).episode(source.tasks[0], config.seed, index, 1).observations
                if observations:
                    frames.append(observations[index % len(observations)][-1])
        source.close()
    return np.stack(frames) if frames else np.zeros((0, 1, 1, 3), np.uint8)


def _first_frames(example: Any, task: str, seed: int, index: int) -> np.ndarray:
    """Return frames of an episode, its first one first: what is to be done in a game is still to be done."""
    if isinstance(example, Clip) and example.latents is None:
        return example.read_rounds(1)
    observations = example.episode(task, seed, index, 1).observations
    return observations[0][-1:] if observations else np.zeros(0)


def best_loss(checkpoints: Path, stage: str) -> float:
    """Return the `criterion` of the best checkpoint of a stage so far; infinity if there is none."""
    folder = checkpoints / BEST
    progress = load(folder, {}) if folder.is_dir() else {}
    found = progress.get("validation_loss") if progress.get("stage") == stage else None
    return float("inf") if found is None else found


def keep_best(checkpoint: Path, loss: float) -> None:
    """Keep a complete checkpoint as `best`: hard links where the file system has them, else a copy.

    Its manifest is its own, and tells the loss (the `criterion`), which may have been computed after the
    checkpoint was made.
    """
    manifest = Manifest.read(checkpoint)
    told = dataclasses.replace(manifest, progress={**manifest.progress, "validation_loss": loss})
    with atomic_folder(checkpoint.parent / BEST) as folder:
        without = shutil.ignore_patterns(MANIFEST)
        shutil.copytree(checkpoint, folder, copy_function=_link, ignore=without, dirs_exist_ok=True)
        told.write(folder)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
