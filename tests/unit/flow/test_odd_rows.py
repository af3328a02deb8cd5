"""Rows with values that a database, a file name or Arrow cannot hold: each costs its own clip at most."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from flow_stages import flow_config

from worldmodel.config.flow import FlowSourceConfig
from worldmodel.flow.log.log import Log
from worldmodel.flow.sources import open_listing
from worldmodel.flow.work.run import run_flow
from worldmodel.flow.work.work import read_columns

HALF = "\ud83d"
"""Half of a surrogate pair."""


class Values:
    """A catalog of some values."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def columns(self, *_: object) -> tuple[dict[str, list[Any]], dict[str, Any]]:
        return {"column": self.values}, {}


def read(*values: Any) -> pa.Array:
    catalog: Any = Values(list(values))
    buffer: Any = None
    clips = [str(number) for number in range(len(values))]
    return read_columns(catalog, buffer, clips, ["column"], "pack").column("column")


def test_a_flow_goes_on_past_odd_rows(tmp_path: Path, database_url: str) -> None:
    odd = [
        {"text": f"half {HALF}", "tags": {f"a{HALF}": [HALF, "\0"]}, "licence": f"cc{HALF}\0"},
        {"text": "a large number", "hash": 2**64 - 1},
        {"text": "no address", "address": f"{HALF}.bin"},
        {"text": "no address", "address": "\0.bin"},
        {"text": "plain", "hash": 5},
    ]
    for number in range(len(odd)):
        (tmp_path / f"{number}.bin").write_bytes(b"x" * 50)
    rows = [{"address": f"{number}.bin", **row} for number, row in enumerate(odd)]
    table = tmp_path / "clips.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = flow_config(tmp_path / "flow", table, {"read": {}}, catalog=database_url, max_attempts=1)
    assert run_flow(config) == 0
    log = Log(config.place("log"))
    texts = []
    for clip in log.segment(0):
        first, size = clip.parts["json"]
        texts.append(json.loads(Path(clip.file).read_bytes()[first : first + size])["text"])
    assert texts == ["half \ufffd", "a large number", "plain"]


def test_rows_keep_their_other_texts_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(
        json.dumps({"address": "a", "text": "ünï 😀", "odd": f"x{HALF}"}) + "\n"
    )
    ((clip,),) = open_listing("mine", FlowSourceConfig(path=str(tmp_path / "t.jsonl")), 0)
    assert clip.row == {"text": "ünï 😀", "odd": "x\ufffd"}


def test_files_whose_names_are_not_utf8_are_clips_that_say_so(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"a")
    with open(os.fsencode(tmp_path) + b"/b\xe9.mp4", "wb") as file:
        file.write(b"b")
    source = FlowSourceConfig("folder", str(tmp_path))
    (good,), (bad,) = open_listing("mine", source, 0)
    assert (good.address, good.row) == (f"{tmp_path}/a.mp4", {})
    assert bad.address == ""
    assert "UTF-8" in bad.row["error"]
    assert bad.row["error"].encode()


def test_values_that_arrow_has_no_type_for_are_read_as_json() -> None:
    assert read({"id": 5}, {"id": 2**64 - 1}).to_pylist() == ['{"id": 5}', f'{{"id": {2**64 - 1}}}']
    assert read(5, "five", None).to_pylist() == ["5", '"five"', None]


@pytest.mark.parametrize("values", [(b"a", None), (None, b"a")])
def test_files_of_a_batch_may_have_more_than_2_gib_together(values: tuple[Any, ...]) -> None:
    found = read(*values)
    assert found.type == pa.large_binary()
    assert found.to_pylist() == list(values)
