"""Clips of a user: frames and actions are aligned as in the table."""

import csv
import math
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from clip_tables import MODEL, open_table, write_table

from worldmodel import media
from worldmodel.actions import Action, action_kind
from worldmodel.config import ActionConfig, DataConfig, SourceConfig, WorldModelConfig
from worldmodel.data.clips import BrokenClip, Clip
from worldmodel.data.columns import track_of
from worldmodel.data.sources import Source, open_source
from worldmodel.data.tables import open_table as open_file
from worldmodel.episodes import DESCRIBE, Episode
from worldmodel.errors import ConfigError, InputError, OutputError
from worldmodel.shapes.source import KEYS
from worldmodel.worlds import get_world

COLUMNS = {"video": "path", "text": "text", "keys": "keys"}


def one(counting: Path, folder: Path, **row: Any) -> Source:
    """A table with one row about the counting clip."""
    row = {"path": str(counting), **row}
    columns = {"video": "path", **{field: field for field in row if field != "path"}}
    path = write_table(folder, [row], f"{len(list(folder.iterdir()))}.jsonl")
    return open_table(path, columns, root=str(counting.parent))


def counts(frames: np.ndarray) -> list[int]:
    """Read the numbers of the counting clip's frames."""
    return [round((float(frame.mean()) - 20) / 3) for frame in frames]


def rounds(source: Source, index: int, number: int = 2) -> tuple[list[int], list[Action], Episode]:
    """Return the frame numbers and actions of an episode, which must be one stretch of the clip."""
    episode = source.at(index).episode("rounds", 0, index, number)
    seen = [frame for clip in episode.observations for frame in counts(clip)]
    assert seen == list(range(seen[0], seen[0] + len(seen)))
    assert [len(clip) for clip in episode.observations] == [1] + [8] * len(episode.actions)
    return seen, list(episode.actions), episode


def test_reading_from_the_middle_shows_what_reading_whole_shows(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    base = rng.integers(0, 256, (9, 16, 3), dtype=np.uint8).repeat(4, 0).repeat(4, 1)
    for suffix, codec, options in (
        ("mp4", "libx264", {"g": "24", "bf": "3"}),
        ("mkv", "libx264", {"g": "250", "bf": "16"}),
        ("avi", "mpeg4", {}),
        ("webm", "libvpx-vp9", {"deadline": "realtime", "cpu-used": "8"}),
    ):
        path = tmp_path / f"clip.{suffix}"
        with av.open(str(path), "w") as container:
            stream = container.add_stream(codec, rate=24, options=options)
            stream.width, stream.height, stream.pix_fmt = 64, 36, "yuv420p"
            for shift in range(120):
                frame = av.VideoFrame.from_ndarray(np.roll(base, shift, axis=1), format="rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
        whole, own = media.read_video(path, 32, 8, 1000), media.read_video(path, 32, None, 1000)
        assert len(own) == 120
        with media.open_video(path) as video:
            assert video.duration_s == pytest.approx(120 / 24, abs=0.05)
        for first in (0, 1, 13, 26, 37, len(whole) - 1):
            assert np.array_equal(media.read_video(path, 32, 8, 6, first / 8), whole[first : first + 6])
        for first in (5, 77):
            assert np.array_equal(media.read_video(path, 32, None, 6, first / 24), own[first : first + 6])
        with pytest.raises(InputError, match=" 9 s"):
            media.read_video(path, 32, 8, 6, 9.0)


def test_episodes_begin_with_the_frames_that_a_session_remembers(counting: Path, tmp_path: Path) -> None:
    model = replace(MODEL, context_latents=MODEL.chunk_latents + 2)
    source = open_table(
        write_table(tmp_path, [{"path": str(counting)}]),
        {"video": "path"},
        root=str(counting.parent),
        model=model,
    )
    wanted = model.context_latents * model.codec.temporal_factor
    starts = set()
    for index in range(40):
        before, *after = (
            counts(clip) for clip in source.at(index).episode("rounds", 0, index, 2).observations
        )
        assert [len(clip) for clip in (before, *after)] == [wanted, 8, 8]
        known = sorted(set(before))  # what is not known repeats the first frame that is
        assert before == [known[0]] * (wanted - len(known)) + known
        seen = [*known, *after[0], *after[1]]
        assert seen == list(range(seen[0], seen[0] + len(seen)))
        starts.add((len(known), seen[0] == 0))
    # Some are whole, some begin with the clip, and some as a session does from an image.
    assert {(wanted, False), (1, False)} < starts and any(clip for _, clip in starts)


def test_one_text_holds_anywhere_in_the_clip(counting: Path, tmp_path: Path) -> None:
    source = one(counting, tmp_path, text="it gets brighter", keys="left+jump", vector=[0.5, -1])
    assert source.size == 1
    firsts = set()
    for index in range(30):
        seen, actions, episode = rounds(source, index)
        firsts.add(seen[0])
        assert actions == [Action("it gets brighter", ("left", "jump"), (0.5, -1.0))] * 2
        assert "counting.mp4" in episode.name
    assert len(firsts) > 15
    assert max(firsts) <= 64 - 17
    again = source.at(3).episode("rounds", 0, 3, 2)
    assert np.array_equal(again.observations[1], rounds(source, 3)[2].observations[1])


def test_a_list_has_one_action_a_round(counting: Path, tmp_path: Path) -> None:
    texts = [f"round {i}" for i in range(7)]
    keys: list[list[str]] = [["left"], [], ["right", "jump"], [], [], [], ["jump"]]
    source = one(counting, tmp_path, text=texts, keys=keys)
    for index in range(20):
        seen, actions, _ = rounds(source, index)
        assert seen[0] % 8 == 0
        place = seen[0] // 8
        assert [action.text for action in actions] == texts[place : place + 2]
        assert [action.keys for action in actions] == [tuple(held) for held in keys[place : place + 2]]


@pytest.mark.parametrize(("count", "fits"), [(1, False), (6, False), (7, True), (8, True), (9, False)])
def test_a_list_of_another_length_than_the_clip_is_refused(
    counting: Path, tmp_path: Path, count: int, fits: bool
) -> None:
    """The clip has seven rounds and a part of one, which may have an action, too."""
    for field, value in (("keys", ["left"]), ("text", "go"), ("vector", [0, 1])):
        source = one(counting, tmp_path, **{field: [value] * count})
        if fits:
            assert len(rounds(source, 0, 9)[1]) == 7
        else:
            with pytest.raises(InputError, match=f"counting.mp4.*{field} has {count} .* 7 actions"):
                source.at(0).episode("rounds", 0, 0, 9)
    parts = replace(MODEL, action=replace(MODEL.action, per_round=2))
    path = write_table(tmp_path, [{"path": counting.name, "keys": [["left"], []] * 7}], "parts.jsonl")
    halves = open_table(path, {"video": "path", "keys": "keys"}, parts, root=str(counting.parent))
    assert len(halves.at(0).episode("rounds", 0, 0, 9).actions) == 7


def test_actions_with_times(counting: Path, tmp_path: Path) -> None:
    texts = [
        {"start": 1.5, "end": 2.5, "text": "one"},
        {"start": 2.5, "end": 3.4, "text": "two"},
        {"start": 5, "end": 6, "text": "three"},
    ]
    source = one(counting, tmp_path, text=texts)
    met = {}
    for index in range(20):
        seen, actions, _ = rounds(source, index)
        met[seen[0]] = [action.text for action in actions]
    # Rounds begin where a text does, and the frame at its start is what the action finds.
    assert met == {12: ["one", "two"], 20: ["two", None], 40: ["three", None]}
    keys = one(counting, tmp_path, keys=[{"start": 2, "end": 4, "keys": ["left"]}])
    for index in range(20):
        seen, actions, _ = rounds(keys, index)
        for place, action in enumerate(actions):
            start = (seen[0] + 8 * place) / 8
            overlaps = min(4, start + 1) - max(2, start) > 0
            assert action.keys == (("left",) if overlaps else ())


def test_start_and_end_bound_the_clip(counting: Path, tmp_path: Path) -> None:
    source = one(counting, tmp_path, text="x", start="0:00:02", end=5.0)
    for index in range(15):
        seen, _, _ = rounds(source, index)
        assert seen[0] >= 16
        assert seen[-1] < 40
    shorter = one(counting, tmp_path, text="x", start=2, end=3.5)
    seen, actions, _ = rounds(shorter, 0, number=3)
    assert len(actions) == 1
    assert seen[-1] < 28
    assert (shorter.cost(0, 3), source.cost(0, 3), source.cost(0, 1)) == (1, 2, 1)
    beyond = one(counting, tmp_path, text="x", start=2, end=60)  # the end of the file is earlier
    assert all(16 <= rounds(beyond, index)[0][0] <= 64 - 17 for index in range(15))
    with pytest.raises(InputError, match=r"counting.mp4.* 8 frames.*1 \+ 8"):
        rounds(one(counting, tmp_path, start=7, end=8.0), 0)


def test_a_text_is_described_and_imagined(counting: Path, tmp_path: Path) -> None:
    texts = [f"round {i}" for i in range(7)]
    source = one(counting, tmp_path, text=texts)
    assert source.tasks == ("rounds", "imagine", "describe", "inverse")
    assert one(counting, tmp_path, keys="left").tasks == ("rounds", "inverse")
    for index in range(5):
        episode = source.at(index).episode("describe", 0, index, 2)
        (clip,) = episode.observations
        assert (episode.prompt, episode.actions) == (DESCRIBE, ())
        assert episode.answer == texts[(counts(clip)[0] - 1) // 8]
        imagined = source.at(index).episode("imagine", 0, index, 2)
        empty, clip = imagined.observations
        assert empty.shape == (0, 32, 32, 3)
        begun, rest = divmod(counts(clip)[0], 8)  # with the first frame that the words are about
        assert (imagined.actions, rest, len(clip)) == ((Action(texts[begun]),), 0, 8)
    with pytest.raises(InputError, match="no text"):
        one(counting, tmp_path, text="").at(0).episode("describe", 0, 0, 1)


def test_questions_are_about_the_frames_that_they_belong_to(counting: Path, tmp_path: Path) -> None:
    answers = [f"round {i}" for i in range(7)]
    source = one(counting, tmp_path, question="which round is it?", answer=answers)
    assert source.tasks == ("rounds", "ask")
    for index in range(5):
        asked = source.at(index).episode("ask", 0, index, 2)
        (clip,) = asked.observations
        assert (asked.prompt, asked.actions, len(clip)) == ("which round is it?", (), 8)
        assert asked.answer == answers[(counts(clip)[0] - 1) // 8]
        assert len(source.at(index).episode("rounds", 0, index, 2).actions) == 2
    timed = [
        {"start": 2, "end": 3, "question": "[is] it late?"},
        {"start": 5, "end": 6, "question": "and now?"},
    ]
    later = one(counting, tmp_path, text="x", question=timed, answer="yes")
    assert later.tasks == ("rounds", "imagine", "describe", "inverse", "ask")
    asked = [later.at(index).episode("ask", 0, index, 1) for index in range(8)]
    assert {(episode.prompt, counts(episode.observations[0])[0]) for episode in asked} == {
        ("[is] it late?", 17),
        ("and now?", 41),
    }
    plain = one(counting, tmp_path, question="[is] it late?", answer="no")
    assert plain.at(0).episode("ask", 0, 0, 1).prompt == "[is] it late?"
    for row in ({"question": "", "answer": "no"}, {"question": "is it?", "answer": ""}):
        with pytest.raises(InputError, match=r"counting.mp4.*no question with an answer"):
            one(counting, tmp_path, **row).at(0).episode("ask", 0, 0, 1)


def test_a_recording_is_the_world_that_was_recorded(tmp_path: Path) -> None:
    get_world("shapes").record(tmp_path, 3, rounds=2, seed=4)
    with pytest.raises(OutputError, match="0"):
        get_world("shapes").record(tmp_path, 0)
    model = WorldModelConfig(action=ActionConfig(keys=KEYS))
    world = open_source("world", DataConfig({"world": SourceConfig("shapes")}), model)
    with pytest.raises(ConfigError, match=r"model\.codec\.image_size.*32.*64"):
        open_source("world", DataConfig({"world": SourceConfig("shapes")}), MODEL)
    source = open_table(tmp_path / "clips.jsonl", COLUMNS, model)
    assert source.size == 3
    for index in range(3):
        episode, true = (s.at(index).episode("rounds", 4, index, 2) for s in (source, world))
        assert episode.actions == true.actions
        for ours, theirs in zip(episode.observations, true.observations, strict=True):
            assert np.abs(ours.astype(int) - theirs).mean() < 4  # what H.264 loses


@pytest.mark.parametrize("name", ["clips.csv", "clips.jsonl", "clips.parquet"])
def test_table_formats_are_equivalent(recorded: Path, tmp_path: Path, name: str) -> None:
    rows = [
        {"path": f"clip-0000{i}", "text": f'he says "go, {i}"\nand goes', "keys": ["left"], "more": i}
        for i in range(5)
    ]
    if name.endswith("parquet"):
        arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: openworldmodel[data]")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / name, row_group_size=2)
    else:
        write_table(tmp_path, rows, name)
    for video in recorded.glob("*.mp4"):  # without its recording.json, which has other keys
        (tmp_path / video.name).symlink_to(video)
    source = open_table(tmp_path / name, COLUMNS)
    assert source.size == 5
    for index in (0, 3, 4, 7):
        clip = source.at(index)
        assert isinstance(clip, Clip)
        assert clip.text.values == (f'he says "go, {index % 5}"\nand goes',)
        assert clip.controls["keys"].values == (("left",),)
        assert len(clip.episode("rounds", 0, index, 1).observations) == 2
    source.close()


PUBLISHED = {
    "webvid": (
        "videoid,contentUrl,duration,page_dir,name\n"
        "21179416,https://example.org/a.mp4,PT00H00M11S,000001_000050,Aerial shot of a ship\n",
        "000001_000050/21179416.mp4",
        ["Aerial shot of a ship"],
    ),
    "panda70m": (
        "videoID,url,timestamp,caption,matching_score\n"
        "--0A,https://example.org/watch?v=--0A,\"[['0:00:01.000', '0:00:03.500'], "
        "['0:00:04.000', '0:00:08.000']]\",\"['A man\\'s dog runs.', 'It sits.']\",\"[0.4, 0.5]\"\n",
        "--0A.mp4",
        ["A man's dog runs.", "It sits."],
    ),
    "koala36m": (
        "videoID,url,timestamp,caption,clarity_score\n"
        "--0A_12,https://example.org/watch?v=--0A,\"['0:00:01.000', '0:00:03.500']\","
        "A man's [old] dog runs.,1.5\n",
        "--0A.mp4",
        ["A man's [old] dog runs."],
    ),
    "openvid": (
        "video,caption,aesthetic score,motion score,temporal consistency score,camera motion,frame,fps,"
        "seconds\n"
        'celeb_1.mp4,"A woman, smiling.",5.2,3.1,0.9,static,64,8.0,8.0\n',
        "celeb_1.mp4",
        ["A woman, smiling."],
    ),
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_published_tables_need_no_columns(counting: Path, tmp_path: Path, preset: str) -> None:
    text, file, captions = PUBLISHED[preset]
    (tmp_path / "table.csv").write_text(text)
    video = tmp_path / "videos" / file
    video.parent.mkdir(parents=True)
    video.write_bytes(counting.read_bytes())
    source = open_table(tmp_path / "table.csv", {}, preset=preset, root=str(tmp_path / "videos"))
    assert source.size == len(captions)
    episodes = [rounds(source, index, 1) for index in range(len(captions))]
    assert [actions[0].text for _, actions, _ in episodes] == captions
    if preset in ("panda70m", "koala36m"):
        assert 8 <= episodes[0][0][0] <= 28 - 9
        assert "--0A" in episodes[-1][2].name
    if preset == "panda70m":
        assert episodes[1][0][0] >= 32


def test_of_captions_of_key_frames_the_one_of_the_clip_is_read(counting: Path, tmp_path: Path) -> None:
    captions = [{"idx": "0", "content": "A dog sits."}, {"idx": "-1", "content": "A dog sits, then runs."}]
    rows = [{"video": str(counting), "captions": found} for found in (captions, captions[:1])]
    source = open_table(write_table(tmp_path, rows), {"video": "video", "text": "captions"}, root="/")
    clip, broken = source.at(0), source.at(1)
    assert isinstance(clip, Clip) and clip.text.values == ("A dog sits, then runs.",)
    assert isinstance(broken, BrokenClip) and "idx -1" in broken.reason


def test_an_address_names_a_file_that_is_there(counting: Path, tmp_path: Path) -> None:
    rows = [
        {"url": "https://example.org/x/counting.mp4?s=1", "id": 7},
        {"url": "https://e.org/y.mp4", "id": 8},
    ]
    (tmp_path / "8.mp4").write_bytes(counting.read_bytes())
    (tmp_path / "counting.mp4").write_bytes(counting.read_bytes())
    source = open_table(write_table(tmp_path, rows), {"video": "url", "name": "id"})
    assert [len(rounds(source, index)[1]) for index in (0, 1)] == [2, 2]


# Errors before training starts, or errors that name the clip


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"keys": ["left", "jmup"]}, "row 1.*'jmup'.*'jump'"),
        ({"vector": [1, 2, 3]}, "row 1: .*vector.* 3 .* 2"),
        ({"vector": [math.nan, 1]}, "row 1: .*vector.*not finite"),
        ({"vector": ["a", 1]}, "row 1: .*vector.*'a'"),
        ({"keys": [3]}, "row 1: .*keys.*3"),
        ({"start": 5, "end": 4}, "row 1.* 4 s"),
        ({"start": "soon"}, "row 1.*'soon'"),
        ({"text": [3]}, "row 1: .*text.* 3"),
        ({"question": "how many?", "answer": [3]}, "row 1.*text.* 3"),
        ({"text": [{"text": "x"}]}, "row 1.*start and end"),
        ({"rewards": "many", "terminated": True}, "row 1.*rewards 'many'"),
        ({"rewards": [1, math.nan], "terminated": True}, "row 1.*reward.*not a finite"),
        ({"rewards": [1], "terminated": "maybe"}, "row 1.*'maybe'"),
        ({"path": "gone"}, "row 1.*gone"),
        ({"path": ""}, "row 1.*no video"),
        ({"path": "../../etc/hostname"}, r"row 1.*\.\./etc/hostname"),
    ],
    ids=str,
)
def test_invalid_rows(counting: Path, tmp_path: Path, row: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        one(counting, tmp_path, **row)
    assert "data.sources.mine" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "more", "named"),
    [
        ({"video": "pathe"}, {}, "'pathe'.*'path'"),
        ({"film": "path"}, {}, "'film'.*video"),
        ({"video": "path", "question": "text"}, {}, "question and answer"),
        ({"video": "path", "rewards": "text"}, {}, "rewards and terminated"),
        ({}, {}, "columns.*path, text"),
        ({"video": "path"}, {"preset": "webvit"}, "'webvit'.*webvid, panda70m, koala36m, openvid"),
        ({"video": "path"}, {"root": "/no/such/folder"}, "/no/such/folder"),
    ],
)
def test_invalid_columns(
    counting: Path, tmp_path: Path, columns: dict[str, str], more: dict[str, str], named: str
) -> None:
    path = write_table(tmp_path, [{"path": str(counting), "text": "x"}])
    with pytest.raises(ConfigError, match=named):
        open_table(path, columns, **more)


def test_actions_that_the_model_does_not_take(counting: Path, tmp_path: Path) -> None:
    path = write_table(tmp_path, [{"path": counting.name, "vector": [1.0]}])
    with pytest.raises(ConfigError, match="vector"):
        open_table(path, {"video": "path", "vector": "vector"}, WorldModelConfig(), root=str(counting.parent))


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("gone.csv", None, "gone.csv"),
        ("clips.txt", "x", "clips.txt.*.csv"),
        ("clips.csv", "path,text\n", "no rows"),
        ("clips.csv", "", "no rows"),
        ("clips.jsonl", "{broken\n", "not valid JSON"),
        ("clips.jsonl", "[1]\n", "not a JSON object"),
    ],
)
def test_invalid_tables(tmp_path: Path, name: str, content: str | None, named: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=named):
        open_table(tmp_path / name, {"video": "path"})


def test_a_broken_row_among_good_ones_is_a_bad_clip(counting: Path, tmp_path: Path) -> None:
    path = tmp_path / "clips.csv"
    path.write_text(f"path,text\n{counting.name},fine\n{counting.name},one,too many\n{counting.name},fine\n")
    source = open_table(path, {"video": "path", "text": "text"}, root=str(counting.parent))
    assert isinstance(source.at(1), BrokenClip)
    with pytest.raises(InputError, match=r"row 2.* 3 .* 2"):
        source.at(1).episode("rounds", 0, 1, 1)
    assert rounds(source, 2)[1][0].text == "fine"


NASTY = [
    ["plain", "x"],
    ['5" nail', 'and a 3" one'],
    ['he says "go",\nand "goes"', ""],
    ["", '"'],
    ['a,"b', 'a\n\n"'],
    ['""', ',",'],
    ['6" more', "x"],
]


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_quotes_in_csv_split_no_row_and_join_none(tmp_path: Path, quoting: Any) -> None:
    path = tmp_path / "clips.csv"
    with path.open("w", newline="") as file:
        csv.writer(file, quoting=quoting).writerows([["path", "text"], *NASTY])
        if quoting == csv.QUOTE_MINIMAL:
            file.write('7" nail,written by hand\nlast,one\n')
    found = open_file(path)
    with path.open(newline="") as file:
        wanted = list(csv.reader(file))[1:]
    assert [list(found.row(number).values()) for number in range(len(found))] == wanted
    found.close()


def test_a_table_is_not_kept_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "clips.csv"
    path.write_text("path,text\n" + "".join(f"{i}.mp4,{'words ' * 40}\n" for i in range(40_000)))
    tracemalloc.start()
    try:
        found = open_file(path)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 9e6
    assert kept < 12 * len(found) + 1e5  # where each row starts
    assert peak < 24 * len(found) + 1e5
    assert found.row(39_999)["path"] == "39999.mp4"
    found.close()


def test_a_broken_row_of_many_clips_is_one_bad_clip(counting: Path, tmp_path: Path) -> None:
    head, good = PUBLISHED["panda70m"][0].splitlines()
    (tmp_path / "table.csv").write_text("\n".join([head, good, "no,cells", '--0A,u,,"[]",', good]) + "\n")
    (tmp_path / "--0A.mp4").write_bytes(counting.read_bytes())
    source = open_table(tmp_path / "table.csv", {}, preset="panda70m")
    assert source.size == 6
    captions = PUBLISHED["panda70m"][2]
    for index, caption in zip((0, 1, 4, 5), captions * 2, strict=True):
        assert rounds(source, index, 1)[1][0].text == caption
    for index, named in ((2, "row 2: .* 2 "), (3, "row 3")):
        with pytest.raises(InputError, match=named):
            rounds(source, index, 1)
    source.close()


def test_a_damaged_part_of_a_parquet_file_is_bad_clips(counting: Path, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: openworldmodel[data]")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "clips.parquet"
    rows = [{"path": counting.name, "text": f"{'long-text-' * 50}{i}"} for i in range(40)]
    parquet.write_table(arrow.Table.from_pylist(rows), path, row_group_size=20, compression="gzip")
    data = bytearray(path.read_bytes())
    column = parquet.ParquetFile(path).metadata.row_group(1).column(1)
    start, end = (
        column.dictionary_page_offset + 40,
        column.dictionary_page_offset + column.total_compressed_size,
    )
    data[start:end] = bytes(end - start)
    path.write_bytes(data)
    source = open_table(path, {"video": "path", "text": "text"}, root=str(counting.parent))
    assert rounds(source, 19, 1)[1][0].text == rows[19]["text"]
    with pytest.raises(InputError, match="row 31"):
        rounds(source, 30, 1)
    source.close()


def test_cells_are_read_as_written() -> None:
    assert track_of("[wind] howls", action_kind("text")).values == ("[wind] howls",)
    assert track_of('["a", null]', action_kind("text")).values == ("a", None)
    assert track_of("left + up", action_kind("keys")).values == (("left", "up"),)
    assert track_of("[]", action_kind("keys")).values == ()
    assert track_of("0.5", action_kind("vector")).values == ((0.5,),)
    with pytest.raises(InputError, match=r"vector.*\[1,"):
        track_of("[1,", action_kind("vector"))
