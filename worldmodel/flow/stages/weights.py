"""Identity of the parts of a model that a stage runs: their weights, not only the model's name."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from worldmodel.models.loading import location

WHOLE_BYTES = 256 * 2**20
"""Larger files are identified by samples, so that commands begin at once."""
NUM_SAMPLES, SAMPLE_BYTES = 4096, 4096


def weights_digest(model: str, folders: Sequence[str], settings: Sequence[str] = ()) -> str:
    """Return the digest of some parts of a model; of a repository on the Hub, its commit.

    Of files above 256 MiB their size, their beginning and 4096 blocks of 4 KiB, spread evenly, are read: any
    training of a codec or a text encoder changes all of these.

    Args:
        model: a shipped model, a model folder, or a repository on the Hub.
        folders: sub-folders of the parts; one that the model does not have is empty.
        settings: names of settings of the model that matter, too.

    Raises:
        ModelError: there is no such model.
    """
    if location.is_repository(model):
        return location.download(model, allow_patterns=[location.CONFIG]).name
    folder, digest = location.resolve(model), hashlib.sha256()
    found = json.loads((folder / location.CONFIG).read_bytes())["model"]
    digest.update(json.dumps([[name, found.get(name)] for name in settings], sort_keys=True).encode())
    files = sorted(path for part in folders for path in (folder / part).rglob("*") if path.is_file())
    for path in files:
        digest.update(json.dumps([path.relative_to(folder).as_posix(), path.stat().st_size]).encode())
        _add(digest, path)
    return digest.hexdigest()[:16]


def _add(digest: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            while block := file.read(2**20):
                digest.update(block)
            return
        for sample in range(NUM_SAMPLES):
            file.seek(sample * (size - SAMPLE_BYTES) // (NUM_SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
