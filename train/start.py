"""The model that a run starts from, and the digests of the files that its weights are in.

A checkpoint holds what training changes, and not the frozen weights of a backbone or a generator: those are
read from their files again. Digests of the files are stored with every checkpoint, so that a run never goes
on with other weights than it began with.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from worldmodel.config import TrainConfig
from worldmodel.errors import ModelError
from worldmodel.models.loading import deferred, model_folder
from worldmodel.models.world_model import WorldModel
from worldmodel.parallel.mesh import Mesh
from worldmodel.train.checkpoint.manifest import THREADS, Manifest, sha256_of
from worldmodel.train.components import check_component, settings_of
from worldmodel.train.tokenizer import build_tokenizer


def build_model(config: TrainConfig) -> WorldModel:
    """Build the model that a run starts from: with the weights of `init_from`, or random ones.

    Weights of actions that the model of `init_from` does not take are random: see `ActionAdapter.adapted`.
    Weights in files of other libraries are loaded later, by `deferred.load_shards`.

    Raises:
        ConfigError: `init_from` names a component that the model does not have.
        ModelError: the weights do not fit the config.
    """
    torch.manual_seed(config.seed)
    with deferred.loading():
        model = WorldModel.from_config(config.model, build_tokenizer(config))
    sources = config.init_sources
    for key in sources:
        check_component(key, model.state_dict(), "init_from")
    for name in dict.fromkeys(filter(None, sources.values())):
        model_folder.load_weights(model, name, lambda key, name=name: settings_of(key, sources) == name)
    return model


@dataclass(frozen=True)
class Files:
    """The files that a model's weights are read from."""

    names: frozenset[str]
    """Names of the weights that are in files; all others are random."""
    paths: Mapping[str, Path]

    @classmethod
    def of(cls, model: WorldModel, config: TrainConfig) -> "Files":
        """Find the files of a model of `build_model`, before its weights are loaded."""
        names = deferred.names(model)
        paths = deferred.files(model)
        sources = config.init_sources
        for key, source in sources.items():
            if source:
                label = f"init_from.{key}" if len(sources) > 1 else "init_from"
                folder = model_folder.resolve(source)
                found = sorted(folder.rglob("*.safetensors"))
                paths |= {f"{label}/{path.relative_to(folder)}": path for path in found}
        new = {f"action.{name}" for name in model.action.new_weights}
        names |= {name for name in model.state_dict() if settings_of(name, sources) and name not in new}
        return cls(frozenset(names), paths)

    def digests(self, mesh: Mesh) -> dict[str, str]:
        """Compute the SHA-256 of every file; processes share the work, so all of them must call this."""
        mine = list(self.paths)[mesh.rank :: mesh.world_size]
        with ThreadPoolExecutor(THREADS) as threads:  # hashing releases the GIL
            found = dict(zip(mine, threads.map(sha256_of, (self.paths[name] for name in mine)), strict=True))
        return {name: digest for each in mesh.all_gather(found) for name, digest in each.items()}


def check_files(checkpoint: Path, digests: Mapping[str, str]) -> dict[str, str]:
    """Check that the files that a checkpoint's run started from have not changed.

    Returns:
        The digests of `digests`, and of files of parts that this model does not have: an objective of an
        earlier stage added them, as `prompt` adds the generator's text encoder.

    Raises:
        ModelError: one is missing or has changed; the message names it.
    """
    parts = {_part(name) for name in digests}
    elsewhere = {}
    for name, digest in Manifest.read(checkpoint).origin.files.items():
        if _part(name) not in parts:
            elsewhere[name] = digest
        elif digests.get(name) != digest:
            raise ModelError(
                f"{checkpoint} needs the frozen weights of {name}, with which its run started, and that file "
                f"{'has changed' if name in digests else 'is missing'}; restore it, or choose another "
                "run_dir."
            )
    return elsewhere | dict(digests)


def _part(name: str) -> str:
    """Return the module, or the folder of `init_from`, that a file in a manifest belongs to."""
    return name.rpartition("/")[0]
