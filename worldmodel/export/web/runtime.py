"""The JavaScript libraries that a world in a browser needs, from the npm registry, by their checksums.

They are not in the wheel: ONNX Runtime's WebAssembly alone has 14 MB.
"""

import base64
import hashlib
import io
import os
import tarfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from worldmodel.errors import ModelError
from worldmodel.io import atomic_folder, user_cache

REGISTRY = "https://registry.npmjs.org"
TIMEOUT_S = 120


@dataclass(frozen=True)
class Library:
    """A package of the npm registry."""

    name: str
    version: str
    sha512: str
    """Checksum of the archive, in base64 as npm writes it."""
    licence: str
    members: dict[str, str]
    """Files of the archive, and their names here."""

    @property
    def archive(self) -> str:
        """Name of the archive, as `npm pack` writes it."""
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"

    @property
    def address(self) -> str:
        """Path of the archive in the registry."""
        return f"{self.name}/-/{self.name.rsplit('/', 1)[-1]}-{self.version}.tgz"


LIBRARIES = (
    Library(
        "onnxruntime-web",
        "1.30.0",
        "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ==",
        "MIT",
        {"dist/ort.wasm.bundle.min.mjs": "ort.mjs", "dist/ort-wasm-simd-threaded.wasm": "ort.wasm"},
    ),
    Library(
        "@huggingface/tokenizers",
        "0.2.0",
        "LidMHe1FpcSYH4vcSjXooda34pC0M8m1gmDOv7SQi6Iv+ib1zX7J3sHBCC9/3FPCkn2k1b55FneVqMRxrr99pg==",
        "Apache-2.0",
        {"dist/tokenizers.min.mjs": "tokenizers.mjs"},
    ),
    Library(
        "gifenc",
        "1.0.3",
        "xdr6AdrfGBcfzncONUOlXMBuc5wJDtOueE3c5rdG0oNgtINLD+f2iFZltrBRZYzACRbKr+mSVU/x98zv2u3jmw==",
        "MIT",
        {"dist/gifenc.esm.js": "gifenc.mjs"},
    ),
)


def find(archives: Path | None = None) -> Path:
    """Return a folder of the user's cache with the libraries' files; fetch them once.

    Args:
        archives: A folder with the archives, for a machine without the registry (`npm pack NAME@VERSION`).

    Raises:
        ModelError: an archive cannot be fetched, or is not the expected one.
        OutputError: the cache cannot be written.
    """
    versions = "-".join(library.version for library in LIBRARIES)
    folder = user_cache() / "web" / versions
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(folder) as temporary:
        for library in LIBRARIES:
            _unpack(library, _archive(library, archives), temporary)
        notice = [f"{each.name} {each.version}, {each.licence}" for each in LIBRARIES]
        (temporary / "NOTICE.txt").write_text("\n".join(notice) + "\n", encoding="utf-8")
    return folder


def _archive(library: Library, archives: Path | None) -> bytes:
    """Return the bytes of an archive, whose checksum is right."""
    if archives is not None:
        file = archives / library.archive
        if not file.is_file():
            raise ModelError(
                f"There is no {file}; run `npm pack {library.name}@{library.version}` in that folder."
            )
        data = file.read_bytes()
    else:
        data = _fetch(library)
    found = base64.b64encode(hashlib.sha512(data).digest()).decode()
    if found != library.sha512:
        raise ModelError(f"{library.archive} has the sha512 {found}, not {library.sha512}; fetch it again.")
    return data


def _fetch(library: Library) -> bytes:
    # npm's own variable, so that a mirror that npm uses is used here, too.
    registry = os.environ.get("NPM_CONFIG_REGISTRY") or REGISTRY
    address = f"{registry.rstrip('/')}/{library.address}"
    try:
        if not address.startswith("https://"):
            raise ValueError("the address of the registry does not begin with https://")
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as response:  # noqa: S310 -- https, checked above
            return response.read()
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise ModelError(
            f"{library.name} {library.version} cannot be fetched from {registry}: {error}; run "
            f"`npm pack {library.name}@{library.version}` elsewhere and pass --runtime FOLDER."
        ) from None


def _unpack(library: Library, archive: bytes, folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        for member, name in library.members.items():
            source = members.extractfile(f"package/{member}")
            assert source is not None, "the checksum says what the archive holds"
            (folder / name).write_bytes(source.read())
