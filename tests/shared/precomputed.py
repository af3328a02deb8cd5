"""Training steps on episodes whose latents and text states were computed before."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from worldmodel.actions import Action
from worldmodel.config import TrainConfig
from worldmodel.data.latents import ChunkLatents, LatentFormat
from worldmodel.data.loader import Batch
from worldmodel.episodes import DESCRIBE, Episode
from worldmodel.media.tensors import to_tensor
from worldmodel.models.loading import deferred
from worldmodel.models.rounds import RoundEncoder
from worldmodel.models.world_model import WorldModel
from worldmodel.train import distributed
from worldmodel.train.trainer import Trainer

TASKS = ("rounds", "imagine", "describe")


def array_of(tensor: Tensor, dtype: torch.dtype) -> np.ndarray:
    """Return a tensor as it is stored in a file."""
    tensor = tensor.contiguous().to(dtype)
    return (tensor.view(torch.uint16) if dtype == torch.bfloat16 else tensor).numpy()


def encode(model: WorldModel, frames: np.ndarray, dtype: torch.dtype = torch.float32) -> ChunkLatents:
    """Encode a clip of 1 + n chunks."""
    with torch.no_grad():
        made = RoundEncoder.of(model).chunks(to_tensor([frames], model.device), TASKS)
    return ChunkLatents({k: array_of(v[0], dtype) for k, v in made.items()}, LatentFormat.of(model.config))


def states(model: WorldModel, texts: Sequence[str], dtype: torch.dtype) -> dict[str, np.ndarray]:
    """Encode texts, and no text."""
    made = model.generator.compute_text_states(["", *texts])
    return {text: array_of(state, dtype) for text, state in made.items()}


def pair(
    model: WorldModel,
    frames: np.ndarray,
    task: str,
    texts: Sequence[str],
    first: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Episode, Episode]:
    """Return an episode of a clip from chunk `first` on, to be encoded in the step, and encoded before it."""
    chunk, rounds = model.config.chunk_frames, len(texts)
    used = frames[first * chunk :][: 1 + rounds * chunk]
    clips = tuple(used[1 + index * chunk :][:chunk] for index in range(rounds))
    actions, answer = tuple(map(Action, texts)), None
    observations = (used[: task == "rounds"], *clips)
    if task == "describe":
        observations, actions, answer = clips, (), texts[0]
    prompt = DESCRIBE if answer else None
    plain = Episode("plain", observations, actions, prompt=prompt, answer=answer)
    encoded = encode(model, frames, dtype).observations(task, first, rounds)
    kept = observations if model.vision.needs_frames else ()
    found = states(model, texts, dtype) if model.config.condition_adapter.text else None
    return plain, replace(plain, observations=kept, encoded=encoded, text_states=found)


def step(
    config: TrainConfig, model: WorldModel, task: str, episodes: Sequence[Episode], **batch: bool
) -> dict[str, float]:
    """Return the losses and the gradient norm of a first step, from the weights of `model`."""
    (name,) = config.stages
    mesh = distributed.init(config)
    try:
        trainer, _ = Trainer.start(config, name, mesh, None)
        with torch.no_grad():
            for key, tensor in trainer.root.model.state_dict().items():
                deferred.local_shard(tensor)[0].copy_(model.state_dict()[key])
        indices = tuple(range(len(episodes)))
        return trainer.step([Batch(0, task, indices, list(episodes), **batch)], stop=False).losses
    finally:
        distributed.shutdown()
