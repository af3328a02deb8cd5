"""The demo's tab Data: pictures, verdicts and reasons of a flow's clips, and nothing written."""

import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from worldmodel.config import build
from worldmodel.config.flow import FlowConfig
from worldmodel.demo import data_tab, flow_reader
from worldmodel.errors import ConfigError
from worldmodel.flow.catalog.records import BEGINNING
from worldmodel.flow.errors import FlowError
from worldmodel.flow.work.run import run_flow
from worldmodel.media import write_video

GREEN = (20, 200, 40)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> FlowConfig:
    """A flow of 5 videos: green ones that are packed, a black one, one that is cut off, and no video."""
    folder = tmp_path_factory.mktemp("flow")
    videos = folder / "videos"
    noise = np.random.default_rng(0).integers(-19, 20, (6, 48, 64, 3))
    for number in range(2):
        frames = np.clip(noise * (1 - number) + np.roll(noise, 7) * number + GREEN, 0, 255).astype(np.uint8)
        write_video(frames, videos / f"{number}-green.mp4", fps=8)
    write_video(np.zeros((6, 48, 64, 3), np.uint8), videos / "2-black.mp4", fps=8)
    (videos / "3-cut.mp4").write_bytes((videos / "0-green.mp4").read_bytes()[:300])
    (videos / "4-<img src=x onerror=alert(1)>.mp4").write_bytes(b"<html>404</html>")
    stages = {
        "fetch": {"settings": {"root": str(videos)}},
        "probe": {},
        "filter": {"settings": {"max_text_area": None, "min_sharpness": None, "min_motion": None}},
    }
    flow = {
        "folder": str(folder / "flow"), "executor": "threads", "stages": stages,
        "sources": {"mine": {"kind": "folder", "path": str(videos)}}, "segment_size": 2,
    }  # fmt: skip
    built = build(FlowConfig, flow)
    run_flow(built)
    return built


def test_clips_have_the_picture_that_their_stage_saw(config: FlowConfig) -> None:
    reader = flow_reader.FlowReader(config)
    found, more = reader.page(BEGINNING, None, "", "")
    assert not more
    verdicts = [(entry.verdict, entry.stage) for entry, _ in found]
    assert verdicts[:3] == [("packed", None), ("packed", None), ("dropped", "filter")]
    assert {stage for _, stage in verdicts[3:]} <= {"fetch", "probe"}
    images = [None if picture is None else Image.open(io.BytesIO(picture)) for _, picture in found]
    assert images[0] is not None
    assert images[2] is not None
    assert np.abs(np.asarray(images[0]).mean((0, 1)) - GREEN).max() < 12
    assert np.asarray(images[2]).max() < 20
    assert images[3] is None
    assert images[4] is None
    assert all(image is None or image.format == "JPEG" for image in images)


def test_pages_follow_each_other_and_go_back(config: FlowConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_reader, "PAGE", 2)
    reader = flow_reader.FlowReader(config)
    (first, more), names = reader.page(BEGINNING, None, "", ""), []
    while True:
        names += [Path(entry.address).name[0] for entry, _ in first]
        if not more:
            break
        first, more = reader.page(first[-1][0].place, None, "", "")
    assert names == ["0", "1", "2", "3", "4"]
    ((black, _),), more = reader.page(BEGINNING, "dropped", "filter", "black")
    assert Path(black.address).name == "2-black.mp4"


def test_the_gallery_has_verdicts_and_reasons_and_runs_no_text_of_others(config: FlowConfig) -> None:
    reader = flow_reader.FlowReader(config)
    html = data_tab.gallery(reader.page(BEGINNING, None, "", "")[0])
    assert html.count("<figure") == 5
    assert html.count("src='data:image/jpeg;base64,") == 3
    assert "dropped in filter" in html
    assert "<img src=x" not in html
    assert re.findall(r"<img(?! src='data:image)", html) == []
    table = data_tab.counts(reader.status.read(), reader.status.verdicts("filter"))
    assert re.findall(r"<td>([\d,]+)</td>", table)[-4:] == ["2", "0", "0", "0"]  # of `pack`
    assert "black" in table
    assert "<figure" not in data_tab.gallery([])


def test_looking_changes_no_file(config: FlowConfig) -> None:
    folder = Path(config.folder)
    before = {path: path.stat().st_mtime_ns for path in (folder / "buffer").rglob("*")}
    reader = flow_reader.FlowReader(config)
    reader.page(BEGINNING, None, "", "")
    assert {path: path.stat().st_mtime_ns for path in (folder / "buffer").rglob("*")} == before


def test_a_flow_that_was_not_started_is_an_error(config: FlowConfig, tmp_path: Path) -> None:
    stages = {"fetch": {}}
    with pytest.raises(FlowError):
        flow_reader.FlowReader(build(FlowConfig, {"folder": str(tmp_path / "none"), "stages": stages}))
    with pytest.raises(ConfigError):
        flow_reader.FlowReader(build(FlowConfig, {"folder": str(tmp_path / "none")}))
    assert not (tmp_path / "none").exists()
