"""The ceiling of a run: what the codec alone returns of the frames that the model is to predict."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from worldmodel.config import DataConfig, StageConfig, TrainConfig, height_width
from worldmodel.data import loader
from worldmodel.data.loader import Batch
from worldmodel.data.sequence_loader import SequenceLoader
from worldmodel.data.sources import open_sources
from worldmodel.eval.codec import Ceiling, ceiling
from worldmodel.media.tensors import to_frames, to_tensor
from worldmodel.models.world_model import WorldModel
from worldmodel.train.run.log import RunLog
from worldmodel.train.trainer import Trainer
from worldmodel.train.validation import codec_contrast

TASKS = ("rounds", "describe", "ask", "inverse", "imagine")
"""Tasks whose episodes have frames, in order of preference."""
MAX_PIXELS = 2**22
"""Pixels of all frames together: large frames are fewer."""
BATCH_PIXELS = 2**20
"""Pixels that are encoded and decoded together."""
LEAST_KEPT = 0.9
"""Share below which there is a warning; erasing the keys of MiniGrid's DoorKey leaves 68 %."""

LEAST_CONTRAST = 0.95
"""The same of the contrast of twin futures."""

Pairs = dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]
"""Clips and what the codec returns of them, `[t, h, w, 3]`, by sample and observation."""


def measured_in(config: TrainConfig) -> tuple[str, bool]:
    """Return the stage at whose end (True) or start (False) the codec is what the run goes on with."""
    trained = [name for name, stage in config.stages.items() if stage.objective == "codec"]
    return (trained[-1], True) if trained else (next(iter(config.stages)), False)


def report(trainer: Trainer, log: RunLog, step: int) -> None:
    """Print the ceiling and write it to metrics.jsonl; every process must call this.

    Raises:
        ConfigError: the data cannot be read.
    """
    settings = trainer.config.validation
    data = frames_data(trainer.config) if settings.codec_frames else None
    measured = measure(trainer, data) if data else None
    contrast = codec_contrast(trainer) if data else None
    if measured is None or not log.active:
        return
    values = {"codec/psnr": measured.psnr, "codec/frames": measured.num_frames}
    if contrast is not None:
        values["codec/contrast"] = contrast
    if measured.kept is not None:
        values |= {"codec/details": measured.kept, "codec/num_details": measured.num_details}
    log.scalars(step, values)
    for line in [*lines(measured, bool(settings.source)), *contrast_lines(contrast)]:
        log.print(line)


def lines(measured: Ceiling, held: bool) -> list[str]:
    """Return the ceiling in words, with a remedy if it is low."""
    which = "held-out" if held else "training"
    said = f"  codec      alone returns {measured.num_frames} {which} frames at {measured.psnr:.1f} dB"
    if measured.kept is None:
        return [said]
    said += (
        f", with {measured.num_kept} of {measured.num_details} kinds of small details (a rare kind counts as "
        "much as a common one): the model cannot predict what the codec loses"
    )
    if measured.kept >= LEAST_KEPT:
        return [said]
    return [
        said,
        f"  warning    the codec keeps {measured.kept:.0%} of them, less than {LEAST_KEPT:.0%}; "
        "train it for more steps, raise codec.widths or codec.latent_channels, or take another codec",
    ]


def contrast_lines(contrast: float | None) -> list[str]:
    """Return in words how much the codec keeps of what actions change, with a remedy if it is little."""
    if contrast is None:
        return []
    said = [f"  codec      keeps {contrast:.0%} of the contrast of twin futures: of what actions change"]
    if contrast >= LEAST_CONTRAST:
        return said
    return [
        *said,
        f"  warning    that is less than {LEAST_CONTRAST:.0%}; train the codec for more steps, or take "
        "larger frames (worldmodel new --size)",
    ]


def frames_data(config: TrainConfig) -> DataConfig | None:
    """Return the sources of the frames: the held-out one, or those of the training; None if there are none.

    The log of a data flow is not read for this, unless it is the held-out one: it has one reader.
    """
    sources = config.data.sources
    held = config.validation.source
    names = [held] if held else loader.trained_sources(config.data, config.stages.values())
    chosen = {
        name: replace(sources[name], weight=sources[name].weight or 1.0, precomputed=False)
        for name in names
        if sources[name].kind not in (("text",) if held else ("text", "flow"))
    }
    return replace(config.data, sources=chosen, num_workers=0) if chosen else None


def measure(trainer: Trainer, data: DataConfig) -> Ceiling | None:
    """Measure the codec of a trainer, on the first process; None on the others.

    The frames depend on the config alone, not on the mesh or on the progress of the run. Every process must
    call this.

    Raises:
        ConfigError: the data cannot be read.
    """
    config = trainer.config
    mesh = trainer.mesh
    height, width = height_width(config.model.codec.image_size)
    num_frames = min(config.validation.codec_frames, MAX_PIXELS // (height * width))
    size = max(num_frames // (1 + config.model.chunk_frames), mesh.dp_size)

    def open_loader() -> loader.BatchLoader:
        sources = open_sources(data, config.model)
        offered = {task for source in sources.values() for task in source.tasks}
        task = next((task for task in TASKS if task in offered), TASKS[0])
        stage = StageConfig("codec", steps=1, batch_size=size, rounds=1, tasks={task: 1.0})
        ranks = (mesh.dp_rank, mesh.dp_size)
        return loader.BatchLoader(sources, data, stage, config.seed, 0, *ranks, None, mesh.sum_counts)

    with SequenceLoader(open_loader, mesh) as stream:
        batches = [batch for step in stream for batch in step]
    own = trainer.without_gradients(lambda: coded_clips(trainer.root.model, batches))
    gathered = mesh.all_gather(own)
    if not mesh.first:
        return None
    pairs = {place: pair for each in gathered for place, pair in each.items()}
    truth, coded = (
        np.concatenate(side) for side in zip(*(pairs[place] for place in sorted(pairs)), strict=True)
    )
    return ceiling(truth, coded)


def coded_clips(model: WorldModel, batches: Sequence[Batch]) -> Pairs:
    """Encode and decode the observations of batches, each as a clip of its own."""
    clips = {
        (index, number): clip
        for batch in batches
        for index, episode in zip(batch.indices, batch.episodes, strict=True)
        for number, clip in enumerate(episode.observations)
        if len(clip)
    }
    pairs: Pairs = {}
    for length in sorted({len(clip) for clip in clips.values()}):
        places = [place for place, clip in clips.items() if len(clip) == length]
        size = max(1, BATCH_PIXELS // clips[places[0]][..., 0].size)
        for first in range(0, len(places), size):
            chosen = places[first : first + size]
            pixels = to_tensor([clips[place] for place in chosen], model.device).to(model.dtype)
            made = model.decode(model.codec.encode(pixels))[:, :length]
            pairs |= {
                place: (clips[place], to_frames(clip)) for place, clip in zip(chosen, made, strict=True)
            }
    return pairs
