"""Tables of clips: written, and opened as a source."""

import csv
import io
import json
from pathlib import Path
from typing import Any

from worldmodel.config import ActionConfig, CodecConfig, DataConfig, SourceConfig, WorldModelConfig
from worldmodel.data.sources import Source, open_source

MODEL = WorldModelConfig(
    codec=CodecConfig(image_size=32),
    action=ActionConfig(keys=("left", "right", "jump"), vector=2),
    fps=8,
    chunk_frames=8,
)


def open_table(path: Path, columns: dict[str, str], model: WorldModelConfig = MODEL, **more: Any) -> Source:
    """Open a table as the source `mine`."""
    source = SourceConfig(kind="clips", path=str(path), columns=columns, **more)
    return open_source("mine", DataConfig({"mine": source}), model)


def write_table(folder: Path, rows: list[dict[str, Any]], name: str = "clips.jsonl") -> Path:
    """Write rows as jsonl, or as csv with JSON in the cells that are not text."""
    path = folder / name
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        out = io.StringIO()
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(
            {k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()} for row in rows
        )
        path.write_text(out.getvalue())
    return path
