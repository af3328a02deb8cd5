"""Tables are opened without parsing their rows, and offsets are stored."""

import gzip
from pathlib import Path

import pytest
from clip_tables import open_table, write_table

from worldmodel.data import files, tables
from worldmodel.data.clips import BrokenClip, Clip
from worldmodel.data.tables import NUM_PROBED, LineTable
from worldmodel.errors import ConfigError, InputError


@pytest.mark.parametrize("name", ["clips.csv", "clips.jsonl"])
def test_opening_a_table_parses_some_of_its_rows(
    counting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    rows = [{"path": counting.name, "keys": "left"} for _ in range(2000)]
    rows[1234]["keys"] = "left+fly"
    parsed, row = set(), LineTable.row
    monkeypatch.setattr(LineTable, "row", lambda self, number: parsed.add(number) or row(self, number))
    source = open_table(
        write_table(tmp_path, rows, name), {"video": "path", "keys": "keys"}, root=str(counting.parent)
    )
    assert len(parsed) <= 2 * NUM_PROBED
    assert isinstance(source.at(1233), Clip)
    assert isinstance(source.at(1234), BrokenClip)  # counted against data.max_bad_fraction
    with pytest.raises(InputError, match=r"row 1235.*'fly'"):
        source.at(1234).episode("rounds", 0, 1234, 1)
    source.close()


@pytest.mark.parametrize("name", ["clips.csv", "clips.jsonl"])
def test_offsets_of_rows_are_stored_once(
    counting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    scanned, scan = [], tables._record_offsets
    monkeypatch.setattr(tables, "_record_offsets", lambda *args: scanned.append(1) or scan(*args))
    rows = [{"path": counting.name, "text": f"{'many words ' * 50}{i}"} for i in range(2000)]
    path = write_table(tmp_path, rows, name)
    for _ in range(3):
        source = open_table(path, {"video": "path", "text": "text"}, root=str(counting.parent))
        assert source.at(1999).text.values == (rows[1999]["text"],)
        source.close()
    assert len(scanned) == 1
    path.write_text(path.read_text().replace("many words", "other word"))
    source = open_table(path, {"video": "path", "text": "text"}, root=str(counting.parent))
    assert source.at(0).text.values[0].startswith("other word")
    assert len(scanned) == 2
    source.close()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.csv", 'video;text\na.mp4;"one; two"\nb.mp4;three\n'),
        ("t.csv", 'video,text\na.mp4,"one; two"\nb.mp4,three\n'),
        ("t.tsv", "video\ttext\na.mp4\tone; two\nb.mp4\tthree\n"),
        ("t.json", '[{"video": "a.mp4", "text": "one; two"}, {"video": "b.mp4", "text": "three"}]'),
        ("t.json", '{"video": "a.mp4", "text": "one; two"}\n{"video": "b.mp4", "text": "three"}\n'),
    ],
)
def test_tables_of_many_forms_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, packed: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / (f"{name}.gz" if packed else name)
    path.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    table = tables.open_table(path)
    assert [*table.columns] == ["video", "text"]
    assert [dict(table.row(number)) for number in range(len(table))] == [
        {"video": "a.mp4", "text": "one; two"},
        {"video": "b.mp4", "text": "three"},
    ]
    table.close()


def test_tables_that_are_no_lists_or_cut_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.json").write_text('["a.mp4", "b.mp4"]')
    (tmp_path / "b.json").write_text('[{"video": "a.mp4"')
    (tmp_path / "c.csv.gz").write_bytes(gzip.compress(b"video,text\n" * 1000)[:-20])
    for name, message in (
        ("a.json", "not a list of objects"),
        ("b.json", "not valid JSON"),
        ("c.csv.gz", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            tables.open_table(tmp_path / name)
    monkeypatch.setattr(files, "MAX_UNPACKED_BYTES", 100)
    (tmp_path / "d.csv.gz").write_bytes(gzip.compress(b"video,text\n" * 1000))
    with pytest.raises(ConfigError, match="when unpacked"):
        tables.open_table(tmp_path / "d.csv.gz")
