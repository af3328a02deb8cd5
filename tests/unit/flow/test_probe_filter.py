"""The stages probe and filter, on videos that are rendered here."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from worldmodel import media
from worldmodel.errors import ConfigError
from worldmodel.flow.stages import find_stage

FPS = 8
Edit = Callable[[Image.Image], Image.Image]


def run(
    name: str, videos: list[bytes | None], settings: dict[str, Any], **columns: Any
) -> list[dict[str, Any]]:
    """Run a stage as a worker does."""
    stage, size = replace(find_stage(name), settings=settings), len(videos)
    data: dict[str, Any] = {
        "clip": [str(n) for n in range(size)],
        "video": pa.array(videos, pa.large_binary()),
    }
    for column in stage.inputs[1:]:
        data[column] = pa.array(columns.get(column, [None] * size), pa.float64())
    batch = pa.record_batch(data)
    return stage.function()(batch).to_pylist()


@pytest.fixture(scope="module")
def scene() -> list[Image.Image]:
    """Two seconds of a camera that moves 2 pixels in every frame over a bright texture."""
    rng = np.random.default_rng(0)
    ground = Image.fromarray(rng.integers(60, 255, (24, 48, 3), dtype=np.uint8))
    ground = ground.resize((48 * 8, 24 * 8), Image.Resampling.BICUBIC)
    return [ground.crop((2 * i, 0, 2 * i + 320, 192)) for i in range(16)]


@pytest.fixture(scope="module")
def rendered(scene: list[Image.Image], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Edit], bytes]:
    path = tmp_path_factory.mktemp("scene") / "scene.mp4"

    def render(edit: Edit) -> bytes:
        media.write_video(np.stack([np.array(edit(frame.copy())) for frame in scene]), path, FPS, scale=1)
        return path.read_bytes()

    return render


def titled(frame: Image.Image) -> Image.Image:
    draw = ImageDraw.Draw(frame)
    style = {"font": ImageFont.load_default(20), "fill": "white", "stroke_width": 2, "stroke_fill": "black"}
    for y in (40, 95, 150):
        draw.text((30, y), "Subscribe to the channel!", **style)
    return frame


def boxed(frame: Image.Image) -> Image.Image:
    frame.paste("black", (0, 0, 320, 48))
    frame.paste("black", (0, 144, 320, 192))
    return frame


def test_lengths_sizes_and_codec_are_those_of_the_file(counting: Path, tmp_path: Path) -> None:
    gif = tmp_path / "a.gif"
    frames = [Image.new("RGB", (48, 32), (shade, 0, 0)) for shade in (0, 90, 250)]
    frames[0].save(gif, save_all=True, append_images=frames[1:], duration=500)
    png = io.BytesIO()
    frames[0].save(png, "PNG")
    videos = [counting.read_bytes(), gif.read_bytes(), png.getvalue()]
    video, animation, image = run("probe", videos, {})
    assert video == {
        "clip": "0", "duration_s": 8.0, "fps": 8.0, "width": 32, "height": 32, "num_frames": 64,
        "codec": "h264", "drop": None, "retry": None, "retry_after_s": None,
    }  # fmt: skip
    assert (animation["num_frames"], animation["width"], animation["codec"]) == (3, 48, "gif")
    assert animation["duration_s"] == pytest.approx(1.5)
    assert (image["num_frames"], image["duration_s"], image["fps"], image["codec"]) == (1, 0, None, "png")
    (quick,) = run("probe", videos[:1], {"decode": False})
    assert quick == video


def test_damaged_files_are_dropped_with_the_reason(counting: Path) -> None:
    video = counting.read_bytes()
    noisy = bytearray(video)
    start = video.index(b"mdat") + 500
    noisy[start : start + 400] = np.random.default_rng(0).bytes(400)
    bad = [video[: len(video) // 2], b"", b"<html>", None, bytes(noisy), video[:40] + bytes(4000)]
    rows = run("probe", bad, {})
    assert [bool(row["drop"]) for row in rows] == [True] * len(bad)
    assert "cut off" in rows[0]["drop"]
    assert "web page" in rows[2]["drop"]
    assert all(row["num_frames"] is None for row in rows)


def test_segments_that_are_not_in_the_file_are_dropped(counting: Path) -> None:
    video = counting.read_bytes()
    starts, ends = [0.0, 9.0, 3.0, 2.0], [3.0, 12.0, 3.0, None]
    rows = run("probe", [video] * 4, {}, start_s=starts, end_s=ends)
    assert [bool(row["drop"]) for row in rows] == [False, True, True, False]
    assert "9 s" in rows[1]["drop"]


def test_good_clips_pass_and_each_defect_is_named(
    rendered: Callable[[Edit], bytes], scene: list[Image.Image]
) -> None:
    edits: dict[str, Edit] = {
        "": lambda frame: frame,
        "motion": lambda _: scene[0].copy(),
        "sharpness": lambda frame: frame.filter(ImageFilter.GaussianBlur(20)),
        "black": lambda _: Image.new("RGB", (320, 192)),
        "letterbox": boxed,
        "text_area": titled,
    }
    rows = run("filter", [rendered(edit) for edit in edits.values()], {}, duration_s=[2.0] * len(edits))
    for name, row in zip(edits, rows, strict=True):
        assert (name in row["drop"]) if name else row["drop"] is None, (name, row)
    good, _, _, black, box, text = rows
    assert good["motion"] == pytest.approx(2 * FPS / 320, rel=0.25)  # frame sides per second
    assert (good["black"], black["black"]) == (0, 1)
    assert box["letterbox"] == pytest.approx(0.5, abs=0.03)
    assert (good["letterbox"], good["text_area"]) == (0, 0)
    assert text["text_area"] > 0.1
    (dark,) = run("filter", [rendered(lambda frame: frame.point(lambda v: v * 0.4))], {}, duration_s=[2.0])
    assert dark["drop"] is None
    assert dark["sharpness"] == pytest.approx(good["sharpness"], rel=0.5)


def test_thresholds_are_settings_and_reasons_name_them(rendered: Callable[[Edit], bytes]) -> None:
    video = rendered(lambda frame: frame)
    (fast,) = run("filter", [video], {"max_motion": 0.01}, duration_s=[2.0])
    assert "above 0.01" in fast["drop"]
    assert fast["motion"] > 0.01  # the scores are there whatever the verdict
    (short,) = run("filter", [video], {"min_s": 3.0}, duration_s=[2.0])
    assert "length 2 is below 3" in short["drop"]
    none = dict.fromkeys(("min_motion", "min_sharpness", "max_black", "max_letterbox", "max_text_area"))
    (dark,) = run("filter", [rendered(lambda _: Image.new("RGB", (320, 192)))], none, duration_s=[2.0])
    assert dark["drop"] is None


def test_the_length_is_judged_without_the_stage_probe(
    rendered: Callable[[Edit], bytes], scene: list[Image.Image]
) -> None:
    video, png = rendered(lambda frame: frame), io.BytesIO()
    scene[0].save(png, "PNG")
    short, image = run("filter", [video, png.getvalue()], {"min_s": 3.0})
    (part,) = run("filter", [video], {"min_s": 1.5}, start_s=[1.0])
    assert "length 2 is below 3" in short["drop"]
    assert image["drop"] is None
    assert "length 1 is below 1.5" in part["drop"]


def test_only_the_clip_in_its_file_is_judged(
    rendered: Callable[[Edit], bytes], scene: list[Image.Image]
) -> None:
    shown = iter(range(16))
    video = rendered(lambda frame: frame if next(shown) < 8 else Image.new("RGB", (320, 192)))
    lively, dark = run(
        "filter", [video] * 2, {}, duration_s=[2.0] * 2, start_s=[None, 1.0], end_s=[1.0, None]
    )  # fmt: skip
    assert (lively["black"], lively["drop"]) == (0, None)
    assert dark["black"] == 1


def test_images_are_judged_but_not_by_motion_or_length(scene: list[Image.Image]) -> None:
    png = io.BytesIO()
    scene[0].save(png, "PNG")
    (image,) = run("filter", [png.getvalue()], {"min_s": 1.0}, duration_s=[0.0])
    assert (image["motion"], image["drop"]) == (None, None)
    assert image["sharpness"] > 0.02


def test_a_scorer_of_ones_own_is_a_column(
    rendered: Callable[[Edit], bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "own_scorer.py").write_text("def score(frames):\n    return frames.shape[-1] + 0.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    settings = {"scorer": "own_scorer:score", "min_aesthetic": 4.0}
    (row,) = run("filter", [rendered(lambda frame: frame)], settings, duration_s=[2.0])
    assert row["aesthetic"] == 3.5
    assert "aesthetic 3.5 is below 4" in row["drop"]
    for wrong in ({"scorer": "own_scorer:gone"}, {"min_aesthetic": 1.0}, {"max_frames": 0}):
        with pytest.raises(ConfigError):
            find_stage("filter").make(**wrong)
