"""The folder of a world that plays in a browser, or the one file that plays from a disk."""

import base64
import gzip
import hashlib
import io
import json
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

from PIL import Image

from worldmodel.actions import Numbers, NumbersKind, Rows, Words
from worldmodel.errors import OutputError
from worldmodel.export.web import graphs, runtime
from worldmodel.io import atomic_file, atomic_folder
from worldmodel.models.world_model import WorldModel
from worldmodel.worlds import start_images

CODE = ("assets.js", "isolate.js", "page.js", "world.js", "worker.js")
"""Modules of the page; `controls.js` and `play.css` are those of the demo."""


def export_web(
    model: WorldModel, target: Path, name: str, single_file: bool = False, archives: Path | None = None
) -> Path:
    """Write a static folder that plays a model in a browser, or one HTML file.

    Args:
        model: The model; rounds have 0 denoising steps.
        target: Folder to write, or the HTML file.
        name: What the page calls the world.
        single_file: Write one file, which plays from a disk without a server.
        archives: A folder with the archives of the JavaScript libraries; None fetches them once.

    Raises:
        ConfigError: a part of the model cannot go into a browser, or the package onnx is missing.
        ModelError: the libraries cannot be fetched.
        OutputError: the target exists or cannot be written.
    """
    if target.exists():
        raise OutputError(f"{target} exists; remove it, or choose another one.")
    graphs.check(model)
    libraries = runtime.find(archives)
    target.parent.mkdir(parents=True, exist_ok=True)
    if not single_file:
        with atomic_folder(target) as folder:
            write_folder(model, folder, name, libraries)
        return target
    with tempfile.TemporaryDirectory() as temporary:
        write_folder(model, Path(temporary), name, libraries)
        with atomic_file(target) as file:
            file.write_text(single_page(Path(temporary)), encoding="utf-8")
    return target


def write_folder(model: WorldModel, folder: Path, name: str, libraries: Path) -> None:
    """Write graphs, tokenizer, pictures to start from, page and libraries into an empty folder."""
    graphs.write(model, folder)
    (folder / "starts").mkdir()
    starts = []
    for number, start in enumerate(start_images(model)):
        data = io.BytesIO()
        Image.fromarray(start.image).save(data, "PNG")
        (folder / "starts" / f"{number}.png").write_bytes(data.getvalue())
        starts.append({"title": start.title, "file": f"starts/{number}.png"})
    if _takes_words(model):
        with tempfile.TemporaryDirectory() as temporary:
            model.backbone.tokenizer.save_pretrained(temporary)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                (folder / file).write_bytes((Path(temporary) / file).read_bytes())
    (folder / "runtime").mkdir()
    for file in libraries.iterdir():
        if _takes_words(model) or file.name != "tokenizers.mjs":
            (folder / "runtime" / file.name).write_bytes(file.read_bytes())
    page, demo = resources.files("worldmodel.export.web") / "page", resources.files("worldmodel.demo")
    for file in ("index.html", "web.css", *CODE):
        (folder / file).write_bytes((page / file).read_bytes())
    for file in ("controls.js", "play.css"):
        (folder / file).write_bytes((demo / file).read_bytes())
    described = describe(model, name, starts)
    graph_bytes = [(folder / file).read_bytes() for file in ("encode.onnx", "round.onnx", "decode.onnx")]
    described["fingerprint"] = hashlib.sha256(b"".join(graph_bytes)).hexdigest()[:16]
    described["files"] = {
        str(file.relative_to(folder)): file.stat().st_size
        for file in sorted(folder.rglob("*"))
        if file.suffix in (".onnx", ".wasm", ".json")
    }
    (folder / "web.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


def describe(model: WorldModel, name: str, starts: list[dict[str, str]]) -> dict[str, Any]:
    """Return what the page has to know of a model."""
    config, action, language = model.config, model.action, model.backbone.model.config
    layers, heads, head_width = model.backbone.cache_shape
    words = language.vocab_size if _takes_words(model) else 0
    row = words + 1 + config.action.per_round  # after words, padding and markers
    names: dict[str, Any] = {}
    for kind, embedding in action.embeddings.items():
        if isinstance(embedding, Rows):
            names[kind] = {"first": row, "names": list(embedding.names)}
            row += len(embedding.names)
    assert model.state is not None, "`graphs.check` refuses models without a state"
    code = model.state.code
    imagines = "text" in config.action.kinds and (model.tasks is None or "imagine" in model.tasks)
    blank = model.blank_observation(1).latents.detach().float()
    size = config.codec.image_size
    return {
        "name": name,
        "about": config.about,
        "size": [size, size] if isinstance(size, int) else list(size),
        "chunk_frames": config.chunk_frames,
        "fps": config.fps,
        "pace": config.pace,
        "history_rounds": config.history_rounds,
        "width": model.backbone.width,
        "past": {"layers": layers, "heads": heads, "width": head_width},
        "tokens": {
            "slot": action.slot,
            "blank": words,
            "marker": words + 1,
            "rows": row,
            "names": names,
            "max_text": action.max_text_tokens,
        },
        "numbers": _numbers(model),
        "code": None if code is None else {"length": code.length, "classes": code.classes},
        "outcome": model.state.outcome is not None,
        "known": None
        if model.known is None
        else {"error": model.known.error, "distance": model.known.distance},
        "blank": {"shape": list(blank.shape), "values": blank.flatten().tolist()} if imagines else None,
        "action": {
            "per_round": config.action.per_round,
            "kinds": config.action.settings,
            "widgets": config.action.widgets,
        },
        "starts": starts,
    }


def single_page(folder: Path) -> str:
    """Return the page with all other files of its folder inside, each as base64 of gzip."""
    html = (folder / "index.html").read_text(encoding="utf-8")
    for sheet in ("play.css", "web.css"):
        style = (folder / sheet).read_text(encoding="utf-8")
        html = html.replace(f'<link rel="stylesheet" href="{sheet}">', f"<style>\n{style}</style>")
    inside = {"index.html", "play.css", "web.css", "page.js", "assets.js", "isolate.js", "runtime/NOTICE.txt"}
    elements = []
    for file in sorted(folder.rglob("*")):
        name = str(file.relative_to(folder))
        if file.is_file() and name not in inside:
            packed = base64.b64encode(gzip.compress(file.read_bytes(), mtime=0)).decode()
            elements.append(f'<script type="text/plain" id="file:{name}">{packed}</script>')
    # The page's own module is in the document, and the one that it imports has a data address.
    assets = base64.b64encode((folder / "assets.js").read_bytes()).decode()
    imports = json.dumps({"imports": {"./assets.js": f"data:text/javascript;base64,{assets}"}})
    page = (folder / "page.js").read_text(encoding="utf-8")
    script = f'<script type="importmap">{imports}</script>\n<script type="module">\n{page}</script>'
    return html.replace('<script type="module" src="page.js"></script>', "\n".join([*elements, script]))


def _takes_words(model: WorldModel) -> bool:
    return any(isinstance(embedding, Words) for embedding in model.action.embeddings.values())


def _numbers(model: WorldModel) -> dict[str, Any] | None:
    """Return the kinds of action of numbers, with bounds of their values or the numbers of each button."""
    kinds = []
    for kind in graphs.number_kinds(model):
        embedding, settings = model.action.embeddings[kind.name], model.config.action.kinds[kind.name]
        assert isinstance(embedding, Numbers), "only kinds of numbers have a network"
        told: dict[str, Any] = {"name": kind.name, "size": embedding.size}
        if isinstance(kind, NumbersKind):
            low, high = kind.bounds(settings)
            told |= {"low": list(low), "high": list(high), "scaled": kind.name == "vector"}
        else:
            told["buttons"] = [
                {"value": button["value"], "numbers": kind.features(kind.parse(button["value"]), settings)}
                for button in kind.widget(settings)["buttons"]
            ]
        kinds.append(told)
    return {"kinds": kinds, "widest": max(kind["size"] for kind in kinds)} if kinds else None
