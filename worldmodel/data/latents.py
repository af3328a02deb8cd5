"""Latents and text states of clips that a data flow computed before training: safetensors files."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import safetensors

from worldmodel.config import WorldModelConfig
from worldmodel.episodes import EncodedObservations
from worldmodel.errors import ConfigError, InputError

TEXT = "text:"
"""Prefix of the names of text states; the rest is the text."""
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


class File(Protocol):
    """The bytes of a file, read when they are needed."""

    def read(self) -> bytes:
        """Return the bytes."""
        ...


@dataclass(frozen=True)
class LatentFormat:
    """The latents that a model's rounds consist of."""

    context: tuple[int, ...]
    """Shape of the context latents of a round, `(s, c, h, w)`."""
    target: tuple[int, ...]
    """Shape of the latents that a round leads to, `(t, c, h, w)`."""
    causal: bool
    """Whether latents depend on the frames before their chunk."""
    needs_frames: bool
    """Whether the vision encoder reads pixels, too."""

    @classmethod
    def of(cls, model: WorldModelConfig) -> "LatentFormat":
        """Return the format of a model's config."""
        target = model.latent_shape
        context = (model.context_latents, *target[1:])
        return cls(context, target, not model.codec.is_ours, not model.vision.sees_latents)


@dataclass(frozen=True)
class StoredLatents:
    """A file with the latents of a clip's chunks (`worldmodel.models.rounds.RoundEncoder.chunks`)."""

    file: File | bytes
    format: LatentFormat

    def read(self) -> "ChunkLatents":
        """Read the file.

        Raises:
            InputError: it is damaged.
            ConfigError: it has the latents of another model.
        """
        tensors, format = read_tensors(self.file, "latents"), self.format
        for name, tensor in tensors.items():
            shape = (-1, *format.target[1:]) if name == "observed" else format.target
            shape = format.context if name.endswith("context") else shape
            if tensor.ndim != 5 or any(
                n not in (-1, m) for n, m in zip(shape, tensor.shape[1:], strict=True)
            ):
                raise ConfigError(
                    f"its latents {name} have shape {list(tensor.shape)}, and this model's are "
                    f"[chunks, {', '.join(map(str, shape)).replace('-1', 'any')}]; run the stage encode with "
                    "this model, or set precomputed: false for the source"
                )
        if not {"first_context", "first_target"} <= tensors.keys():
            raise InputError(f"its latents are {', '.join(tensors) or 'missing'}; run the stage encode again")
        return ChunkLatents(tensors, format)


@dataclass(frozen=True)
class ChunkLatents:
    """Latents of the chunks of a clip, by name."""

    tensors: dict[str, np.ndarray]
    format: LatentFormat

    @property
    def num_chunks(self) -> int:
        """Number of chunks after the first frame of the clip."""
        return len(self.tensors["first_target"])

    def observations(self, task: str, first: int, rounds: int) -> EncodedObservations:
        """Return the latents of an episode that begins with the chunk `first`.

        Raises:
            InputError: the file has no latents for the task.
        """
        if task == "rounds":
            target = self._rows("first_target", first), self._later("target", first, rounds)
            return EncodedObservations(self._contexts(first, rounds), np.concatenate(target))
        if task == "inverse":  # the frame before the round, and the round
            before, after = (self._rows(name, first)[0] for name in ("first_context", "first_target"))
            return EncodedObservations(observed=np.concatenate([before[-1:], after]))
        name = "imagine" if task == "imagine" else "observed"
        if self.format.causal and name not in self.tensors:
            raise InputError(
                f"it has no latents for the task {task}; list it in the tasks of the stage encode"
            )
        (latents,) = self._rows(name if self.format.causal else "first_target", first)
        if task == "imagine":
            return EncodedObservations(target=latents[None])
        return EncodedObservations(observed=latents)

    def _rows(self, name: str, first: int, count: int = 1) -> np.ndarray:
        return self.tensors[name][first : first + count]

    def _later(self, name: str, first: int, rounds: int) -> np.ndarray:
        """Return the rows of the rounds after the first one."""
        if not self.format.causal:  # a chunk's latents are the same in any round
            return self._rows(f"first_{name}", first + 1, rounds - 1)
        if rounds > 1 and len(self.tensors.get(name, ())) < first + rounds - 1:
            raise InputError(f"its latents have no {name}; run the stage encode again")
        return self._rows(name, first, rounds - 1) if rounds > 1 else self._rows(f"first_{name}", first, 0)

    def _contexts(self, first: int, rounds: int) -> np.ndarray:
        """Return the context of every round."""
        begin = self._rows("first_context", first)
        if self.format.causal:
            return np.concatenate([begin, self._later("context", first, rounds)])
        contexts = [begin[0]]
        for target in self._rows("first_target", first, rounds - 1):
            contexts.append(np.concatenate([contexts[-1], target])[-len(begin[0]) :])
        return np.stack(contexts)


@dataclass(frozen=True)
class StoredTexts:
    """A file with the outputs of a generator's text encoder for the texts of a clip."""

    file: File | bytes

    def read(self) -> dict[str, np.ndarray]:
        """Return the state of every text, `[l, e]`.

        Raises:
            InputError: the file is damaged.
        """
        tensors = read_tensors(self.file, "text states")
        return {name.removeprefix(TEXT): tensor for name, tensor in tensors.items() if name.startswith(TEXT)}


def read_tensors(file: File | bytes, content: str) -> dict[str, np.ndarray]:
    """Read a safetensors file of floats; bfloat16 becomes uint16 with its bits.

    Raises:
        InputError: it is damaged, or has other numbers.
    """
    try:
        entries = safetensors.deserialize(file if isinstance(file, bytes) else file.read())
        return {
            name: np.frombuffer(entry["data"], DTYPES[entry["dtype"]]).reshape(entry["shape"])
            for name, entry in entries
        }
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise InputError(f"its {content} cannot be read ({error}); run the stage encode again") from None
