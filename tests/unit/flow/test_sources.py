"""Listing of clips from tables, shards, folders and streamed data sets, here and over http."""

import csv
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from web import content, ranges, served

from worldmodel.config import DataConfig, SourceConfig, WorldModelConfig
from worldmodel.config.flow import FlowSourceConfig
from worldmodel.data.sources import open_source
from worldmodel.errors import ConfigError
from worldmodel.flow.catalog.records import NewClip
from worldmodel.flow.sources import open_listing
from worldmodel.flow.stages import find_stage


def listed(path: object, first: int = 0, **settings: Any) -> list[list[NewClip]]:
    return list(open_listing("mine", FlowSourceConfig(path=str(path), **settings), first))


def write_csv(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


WEBVID = [
    {"videoid": str(n), "contentUrl": f"https://example.com/{n}.mp4", "duration": "PT00H00M15S",
     "page_dir": "006001_006050", "name": f"A cat, number {n}"}
    for n in range(5)
]  # fmt: skip
PANDA = [
    {"videoID": "abc", "url": "https://example.com/watch?v=abc",
     "timestamp": "[['0:00:08.342', '0:00:20.187'], ['0:01:00.5', '0:01:10']]",
     "caption": "['a dog runs', 'it\\'s asleep']", "matching_score": "[0.4, 0.5]"},
    {"videoID": "bad", "url": "https://example.com/watch?v=bad", "timestamp": "[['x', 'y']]",
     "caption": "['?']", "matching_score": "[0.1]"},
]  # fmt: skip


def test_a_table_in_webvids_format(tmp_path: Path) -> None:
    found = listed(write_csv(tmp_path / "w.csv", WEBVID), preset="webvid", licence="unknown")
    (clip,) = found[1]
    assert (clip.address, clip.licence) == ("https://example.com/1.mp4", "unknown")
    assert clip.row == {
        "text": "A cat, number 1", "name": "1", "videoid": "1", "duration": "PT00H00M15S",
        "page_dir": "006001_006050",
    }  # fmt: skip
    assert len({clip.id for clips in found for clip in clips}) == 5


def test_pandas_timestamps_give_one_clip_each(tmp_path: Path) -> None:
    good, bad = listed(write_csv(tmp_path / "p.csv", PANDA), preset="panda70m")
    assert [(clip.start_s, clip.end_s, clip.row["text"]) for clip in good] == [
        (8.342, 20.187, "a dog runs"),
        (60.5, 70.0, "it's asleep"),
    ]
    assert {clip.address for clip in good} == {"https://example.com/watch?v=abc"}
    assert good[0].id != good[1].id
    assert (bad[0].address, "times" in bad[0].row["error"]) == ("", True)


def test_listing_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "w.csv", WEBVID)
    whole = listed(path, preset="webvid")
    assert listed(path, first=3, preset="webvid") == whole[3:]
    assert listed(path, first=5, preset="webvid") == []


def test_parquet_and_jsonl_tables_and_relative_addresses(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"path": "a/1.mp4", "caption": "one", "keys": ["up", "down"], "start": 1.5, "end": 3.0},
        {"path": "s3://bucket/2.mp4", "caption": None, "keys": None, "start": None, "end": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "not json\n")
    one, two, broken = listed(tmp_path / "t.jsonl", columns={"text": "caption"})
    assert [one, two] == listed(tmp_path / "t.parquet", columns={"text": "caption"})
    assert (one[0].address, one[0].start_s, one[0].end_s) == (f"{tmp_path}/a/1.mp4", 1.5, 3.0)
    assert one[0].row["text"] == "one"
    assert one[0].row["keys"] == ["up", "down"]
    assert two[0].address == "s3://bucket/2.mp4"
    assert "JSON" in broken[0].row["error"]
    far = listed(tmp_path / "t.parquet", root="https://cdn.example.com/videos/")
    assert far[0][0].address == "https://cdn.example.com/videos/a/1.mp4"


def test_a_table_at_an_address(tmp_path: Path) -> None:
    data = write_csv(tmp_path / "w.csv", [{"url": "clips/1.mp4", "text": "one"}]).read_bytes()
    with served(**{"w.csv": content(data)}) as web:
        ((clip,),) = listed(web.url("/w.csv"))
        assert clip.address == web.url("/clips/1.mp4")
        with pytest.raises(ConfigError, match=r"gone\.csv"):
            listed(web.url("/gone.csv"))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kind": "tables"}, "tables"),
        ({"preset": "webvids"}, "webvids"),
        ({"preset": "panda70m"}, "url"),
        ({"columns": {"text": "captoin"}}, "captoin"),
        ({"columns": {"txt": "caption"}}, "txt"),
    ],
)
def test_wrong_settings_of_a_table_are_named(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "w.csv", [{"address": "1.mp4", "caption": "one"}])
    with pytest.raises(ConfigError, match=named):
        listed(path, **settings)


def test_wrong_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gone"):
        listed(tmp_path / "gone.csv")
    with pytest.raises(ConfigError, match="empty"):
        listed("")
    (tmp_path / "t.parquet").write_bytes(b"PAR1 not")
    with pytest.raises(ConfigError, match=r"t\.parquet"):
        listed(tmp_path / "t.parquet")
    write_csv(tmp_path / "n.csv", [{"a": "1", "b": "2"}])
    with pytest.raises(ConfigError, match=r"a, b"):
        listed(tmp_path / "n.csv")


def run_fetch(addresses: list[str], **settings: Any) -> list[dict[str, Any]]:
    import pyarrow as pa

    batch = pa.record_batch({"clip": [str(n) for n in range(len(addresses))], "address": addresses})
    return find_stage("fetch").make(robots="ignore", **settings)(batch).to_pylist()


def test_videos_of_shards_are_fetched_by_their_ranges(shard: Path, recorded: Path) -> None:
    videos = [path.read_bytes() for path in sorted(recorded.glob("*.mp4"))]
    data = shard.read_bytes()
    with served(**{"s-00.tar": ranges(data), "s-01.tar": ranges(data)}) as web:
        found = listed(web.url("/s-{00..01}.tar"), kind="webdataset", licence="cc0")
        sent = sum(len(data) for _ in web.asked)
        rows = run_fetch([clip.address for clips in found[:6] for clip in clips], allow_private=True)
        assert listed(web.url("/s-{00..01}.tar"), first=7, kind="webdataset", licence="cc0") == found[7:]
    assert len(found) == 2 * len(videos)
    assert sent > 0
    assert [row["video"] for row in rows] == videos
    assert found[2][0].row == {"text": "clip number 2"}
    assert found[2][0].licence == "cc0"
    local = listed(shard.parent / "*.tar", kind="webdataset")
    assert [clip.row for (clip,) in local] == [clip.row for (clip,) in found[:6]]
    assert [row["video"] for row in run_fetch([local[0][0].address], root=str(shard.parent))] == videos[:1]


def test_json_parts_of_shards_give_columns(tmp_path: Path) -> None:
    parts = {"a.mp4": b"\0" * 700, "a.json": b'{"caption": "x", "licence": "cc-by", "start": 1, "end": 2.5}',
             "b.mp4": b"\1", "b.json": b"{",
             "c.mp4": b"\2", "c.json": b'{"start": 1' + b"0" * 400 + b"}"}  # fmt: skip
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        for name, data in parts.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    (good,), (bad,), (far,) = listed(tmp_path / "s.tar", kind="webdataset", columns={"text": "caption"})
    assert (good.row, good.licence) == ({"caption": "x", "text": "x"}, "cc-by")
    assert (good.start_s, good.end_s) == (1.0, 2.5)
    assert "json" in bad.row["error"]
    assert bad.address == "", "the first stage drops it: its times and text are unknown"
    assert far.start_s is None
    (tmp_path / "s.tar").write_bytes(b"no tar")
    with pytest.raises(ConfigError, match=r"s\.tar"):
        listed(tmp_path / "s.tar", kind="webdataset")
    with pytest.raises(ConfigError, match="none"):
        listed(tmp_path / "none-*.tar", kind="webdataset")


def test_training_reads_shards_at_addresses(shard: Path) -> None:
    model = WorldModelConfig()
    with served(**{"s.tar": ranges(shard.read_bytes())}) as web:
        config = DataConfig({"far": SourceConfig("webdataset", web.url("/s.tar"))})
        near = DataConfig({"far": SourceConfig("webdataset", str(shard))})
        ours, theirs = (open_source("far", each, model) for each in (config, near))
        assert ours.size == theirs.size == 6
        one, other = (each.at(3).episode("rounds", 0, 3, 1) for each in (ours, theirs))
    assert one.actions == other.actions
    assert all((a == b).all() for a, b in zip(one.observations, other.observations, strict=True))
    with pytest.raises(ConfigError, match="no-such-host"):
        open_source(
            "far", DataConfig({"far": SourceConfig("webdataset", "http://no-such-host.invalid/s.tar")}), model
        )


def test_folders_with_texts_or_with_a_table(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.MP4").write_bytes(b"b")
    (tmp_path / "a.png").write_bytes(b"a")
    (tmp_path / "a.txt").write_text("an image\n")
    (tmp_path / "notes.pdf").write_bytes(b"")
    (first,), (second,) = found = listed(tmp_path, kind="folder")
    assert (first.address, first.row) == (f"{tmp_path}/a.png", {"text": "an image"})
    assert (second.address, second.row) == (f"{tmp_path}/deep/b.MP4", {})
    reading: Any = open_listing("mine", FlowSourceConfig("folder", str(tmp_path)), 0)
    assert next(reading) == found[0]
    (tmp_path / "e.png").write_bytes(b"e")
    for mark, rest in ((reading.bookmark(), found[1:]), (None, found), ({"files": "others"}, found)):
        again: Any = open_listing("mine", FlowSourceConfig("folder", str(tmp_path)), 1, mark)
        assert again.first == 2 - len(rest)
        assert [clips for clips in again if not clips[0].address.endswith("e.png")] == rest
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "deep/b.MP4", "text": "a video"}\n')
    ((clip,),) = listed(tmp_path, kind="folder")
    assert (clip.address, clip.row["text"]) == (second.address, "a video")
    with pytest.raises(ConfigError, match="nothing"):
        listed(tmp_path / "nothing", kind="folder")


def test_streamed_data_sets_name_addresses(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    write_csv(
        tmp_path / "train.csv", [{"url": f"https://example.com/{n}", "caption": f"t{n}"} for n in range(4)]
    )
    found = listed(tmp_path, kind="huggingface", columns={"text": "caption"})
    assert [clip.address for (clip,) in found] == [f"https://example.com/{n}" for n in range(4)]
    assert found[3][0].row == {"text": "t3"}
    assert listed(tmp_path, first=2, kind="huggingface", columns={"text": "caption"}) == found[2:]
    with pytest.raises(ConfigError, match="held"):
        listed(tmp_path, kind="huggingface", split="held")


def write_rows(folder: Path, rows: list[dict[str, Any]], sizes: list[int], **types: Any) -> None:
    """Write files of a data set with so many rows each, as `datasets` does."""
    from datasets import Dataset, Features

    folder.mkdir()
    dataset, first = Dataset.from_list(rows, features=Features(types)), 0
    for number, size in enumerate(sizes):
        dataset.select(range(first, first + size)).to_parquet(folder / f"train-{number:05d}.parquet")
        first += size


@pytest.fixture
def held(recorded: Path, tmp_path: Path) -> Path:
    """A data set of two files whose rows hold videos; row 2 holds text, and row 4 nothing."""
    datasets = pytest.importorskip("datasets")
    videos = [path.read_bytes() for path in sorted(recorded.glob("*.mp4"))][:5]
    videos[2], videos[4] = b"no video" * 100, None
    rows = [
        {"video": {"bytes": data, "path": f"{n}.mp4"} if data else None, "caption": f"t{n}", "year": 2000 + n}
        for n, data in enumerate(videos)
    ]
    types = {"video": datasets.Video(), "caption": datasets.Value("string"), "year": datasets.Value("int64")}
    write_rows(tmp_path / "held", rows, [3, 2], **types)
    return tmp_path / "held"


def test_rows_that_hold_videos_are_streamed(held: Path, recorded: Path) -> None:
    found = [clip for (clip,) in listed(held, kind="huggingface", licence="cc0")]
    videos = [path.read_bytes() for path in sorted(recorded.glob("*.mp4"))]
    assert [clip.content for clip in found] == [*videos[:2], b"no video" * 100, videos[3], None]
    assert [clip.address for clip in found] == [*(f"{held}/train#{n}" for n in range(4)), ""]
    assert [clip.row for clip in found[:4]] == [{"text": f"t{n}", "year": 2000 + n} for n in range(4)]
    assert found[0].licence == "cc0"
    assert "row 5" in found[4].row["error"]


def test_a_stream_resumes_at_its_bookmark_after_every_row(held: Path) -> None:
    config = FlowSourceConfig("huggingface", str(held))
    whole = listed(held, kind="huggingface")
    for cut in range(len(whole) + 1):
        assert listed(held, cut, kind="huggingface") == whole[cut:], "read over"
        reading: Any = open_listing("mine", config, 0)
        assert [next(reading) for _ in range(cut)] == whole[:cut]
        mark = json.loads(json.dumps(reading.bookmark()))
        again: Any = open_listing("mine", config, cut, mark)
        assert list(again) == whole[cut:]
        assert list(open_listing("mine", config, len(whole), again.bookmark())) == []


@pytest.mark.parametrize(
    ("columns", "settings", "found"),
    [
        ({"mp4": "binary", "txt": "string"}, {}, ("mp4", "txt")),
        ({"url": "string", "mp4": "binary"}, {}, ("mp4", None)),
        ({"url": "string", "mp4": "binary"}, {"columns": {"address": "url"}}, ("url", None)),
        ({"url": "string", "embedding": "binary"}, {}, ("url", None)),
        ({"blob": "large_binary", "prompt": "string"}, {}, ("blob", "prompt")),
        ({"thumb": "Image", "film": "Video"}, {}, ("film", None)),
        ({"photo": "Image", "caption": "string"}, {}, ("photo", "caption")),
    ],
)
def test_the_column_of_files_is_found_by_type_or_name(
    columns: dict[str, str], settings: dict[str, Any], found: tuple[str, str | None], tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    data = {
        "binary": b"1",
        "large_binary": b"1",
        "string": "one",
        "Image": {"bytes": b"1"},
        "Video": {"bytes": b"1"},
    }
    types = {
        name: getattr(datasets, kind)() if kind in ("Image", "Video") else datasets.Value(kind)
        for name, kind in columns.items()
    }
    row = {name: data[kind] for name, kind in columns.items()}
    write_rows(tmp_path / "set", [row], [1], **types)
    ((clip,),) = listed(tmp_path / "set", kind="huggingface", **settings)
    file, text = found
    assert (clip.content == b"1") == (columns[file] != "string")
    assert clip.row.get("text") == (text and "one")


def test_tables_may_hold_files_too(held: Path) -> None:
    path = held / "train-00000.parquet"
    found = [clip for (clip,) in listed(path, columns={"text": "caption"})]
    assert [clip.content for clip in found] == [c.content for (c,) in listed(held, kind="huggingface")[:3]]
    assert found[1].address == f"{path}#1"


def test_a_damaged_stream_is_named(held: Path) -> None:
    path = held / "train-00001.parquet"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ConfigError, match=r"sources\.mine\.path .*row 4"):
        listed(held, kind="huggingface")
