"""The stage label_actions: it says what the model says about each round."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from worldmodel import media
from worldmodel.flow.catalog.clips import COLUMNS
from worldmodel.flow.stages import find_stage
from worldmodel.models.world_model import WorldModel
from worldmodel.worlds import get_world


def run(clips: list[dict[str, Any]], **settings: Any) -> list[dict[str, Any]]:
    """Run the stage as a worker does."""
    stage = find_stage("label_actions")
    columns = {name: pa.array([clip.get(name) for clip in clips]) for name in ("video", *COLUMNS)}
    batch = pa.record_batch({"clip": [str(index) for index in range(len(clips))], **columns})
    return stage.checked(batch, stage.make(model="shapes-tiny", **settings)(batch)).to_pylist()


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips of the shapes world, of two rounds each."""
    return get_world("shapes").record(tmp_path_factory.mktemp("shapes"), 2, rounds=2)


def test_rounds_get_the_actions_that_a_session_infers(table: Path) -> None:
    model = WorldModel.from_pretrained("shapes-tiny")
    paths = sorted(table.parent.glob("*.mp4"))
    clips = [{"video": path.read_bytes(), "caption": "shapes"} for path in paths]
    given = {"video": clips[0]["video"], "row": {"keys": ["red", "left"]}}
    *labelled, kept = run([*clips, given])
    assert kept["actions"] is None
    for path, row in zip(paths, labelled, strict=True):
        actions = json.loads(row["actions"])
        assert len(actions) == 2
        assert run([{"video": path.read_bytes()}], max_rows=1)[0]["actions"] == row["actions"]
        config = model.config
        frames = media.read_video(path, config.codec.image_size, config.fps, 1 + config.chunk_frames)
        session = model.session()
        session.reset(frames[:1])
        session.observe(frames[1:])
        assert actions[0] == session.infer_action().as_dict()


def test_short_clips_are_dropped(table: Path) -> None:
    video = sorted(table.parent.glob("*.mp4"))[0].read_bytes()
    (row,) = run([{"video": video, "start_s": 0.0, "end_s": 0.3}])
    assert "a round needs" in row["drop"]
    assert row["actions"] is None
