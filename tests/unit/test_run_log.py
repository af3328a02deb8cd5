"""Metrics of a run reach the tracker that the config names."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch

from worldmodel.actions import Action
from worldmodel.episodes import Episode
from worldmodel.errors import ConfigError
from worldmodel.media import contact_sheet
from worldmodel.train.run import log as log_module
from worldmodel.train.run import publish
from worldmodel.train.run.log import RunLog, SampleRound
from worldmodel.train.stage import sample_round, sample_rounds


def log_steps(run: Path, tracker: str) -> None:
    log = RunLog(run, "state", 4, 0, True, 2, tracker)
    for step in range(4):
        log.step(step, "rounds", {"loss": 1.0 / (step + 1)}, {"samples": 3.0}, 0.0, {"mfu": 0.5})
    log.scalars(4, {"validation/loss": 0.25})
    log.close()


def test_metrics_reach_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: openworldmodel[wandb]")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log_steps(tmp_path / "run", "wandb")
    wandb.teardown()
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*-run-state/*.wandb")
    content = file.read_bytes()
    for name in (b"state/rounds/loss", b"state/mfu", b"state/validation/loss"):
        assert name in content


def test_metrics_reach_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="trackio is not installed: openworldmodel[trackio]")
    log_steps(tmp_path / "run", "trackio")
    assert list((tmp_path / "trackio").iterdir())


def test_samples_reach_the_run_and_its_tracker_as_an_image_and_a_video(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, dict[str, Any]]] = []
    session = SimpleNamespace(log=lambda values, step: sent.append((step, values)), finish=lambda: None)
    package = SimpleNamespace(
        init=lambda **_: session, Image=lambda path: ("image", path), Video=lambda path: ("video", path)
    )
    monkeypatch.setitem(sys.modules, "wandb", package)
    truth = np.random.default_rng(0).integers(0, 255, (2, 4, 32, 48, 3), dtype=np.uint8)
    log = RunLog(tmp_path / "run", "state", 4, 0, True, 2, "wandb")
    log.write_samples(2, [SampleRound(clip, clip[::-1], clip[:1], "left") for clip in truth], fps=8)
    log.close()
    samples = tmp_path / "run" / "samples"
    image, video = samples / "state-000002.png", samples / "state-000002.mp4"
    with av.open(video) as film:
        frames = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
    assert len(frames) == 4
    height, width, _ = frames[0].shape  # small frames are enlarged
    assert (height / 64, width / 96) == (height // 64, height // 64)
    values = {"state/sample_image": ("image", str(image)), "state/sample_video": ("video", str(video))}
    assert sent == [(2, values)]
    assert image.stat().st_size


def test_samples_of_single_frames_are_rows_of_before_truth_and_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[np.ndarray] = []
    captions: list[str] = []

    def draw(drawn: list[np.ndarray], said: list[str]) -> Any:
        rows.extend(drawn)
        captions.extend(said)
        return contact_sheet(drawn, said)

    monkeypatch.setattr(log_module, "contact_sheet", draw)
    before, truth, predicted = (np.full((1, 32, 32, 3), value, np.uint8) for value in (10, 120, 240))
    samples = [SampleRound(truth, predicted, before, "keys left"), SampleRound(truth, predicted, before[:0])]
    log = RunLog(tmp_path / "run", "state", 4, 0, True, 2)
    log.write_samples(2, samples, fps=8)
    log.close()
    assert [row[:, 0, 0, 0].tolist() for row in rows] == [[10, 120, 240], [120, 240]]
    assert captions == ["keys left: before | truth | state, step 2", "truth | state, step 2"]
    assert [path.name for path in (tmp_path / "run" / "samples").iterdir()] == ["state-000002.png"]


def test_the_truth_of_a_sample_is_the_recording(image: np.ndarray) -> None:
    """The codec's picture of it is shown where there is no other, as of encoded data."""
    clips = np.stack([image, image // 2])[:, None]
    decoded, predicted = clips[1] + 1, clips[1] + 2
    episode = Episode("x", tuple(clips), (Action("jump"),))
    made = sample_round(episode, (decoded, predicted))
    assert (made.truth is episode.observations[1], made.action) == (True, "jump")
    assert np.array_equal(made.before, clips[0])
    for unseen in (replace(episode, observations=()), replace(episode, observations=(clips[0][:, :16],))):
        made = sample_round(unseen, (decoded, predicted))
        assert made.truth is decoded
        assert not len(made.before)


def test_frames_of_a_codec_are_of_no_round(image: np.ndarray) -> None:
    """Its preview has two rows for an episode."""
    clips = torch.from_numpy(np.stack([image, 255 - image])[:, None]).movedim(-1, -3) / 127.5 - 1
    made = sample_rounds([Episode("x", (image[None],) * 2, (Action("jump"),))], (clips, clips), False)
    assert [(each.truth.shape, len(each.before), each.action) for each in made] == [
        ((1, 32, 32, 3), 0, "")
    ] * 2
    assert np.array_equal(made[0].truth[0], image)


def test_a_tracker_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"tracker is 'wandb'.*worldmodel\[wandb\]"):
        log_steps(tmp_path / "run", "wandb")


def test_records_of_one_step_are_one(tmp_path: Path) -> None:
    from worldmodel.train.run.log import read_metrics

    log_steps(tmp_path / "run", "none")
    records = read_metrics(tmp_path / "run")["state"]
    assert list(records) == [2, 4]
    assert records[4]["validation/loss"] == 0.25
    assert records[4]["rounds/loss"] == (1 / 3 + 1 / 4) / 2
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    assert all(json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())


def test_the_time_of_a_run_is_that_of_its_steps(tmp_path: Path) -> None:
    """Ten records of 20 steps of 20 s, which one more follows after a day; the last line was cut off."""
    records = [
        {"stage": "state", "step": 20 * number, "time": 400.0 * number, "step_s": 20.0}
        for number in range(1, 11)
    ]
    records.append(records[-1] | {"step": 220, "time": 1e5})
    lines = [*map(json.dumps, records), '{"stage": "sta']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    origin = {"command": "worldmodel train", "commit": None, "num_processes": 2}
    stages = {"state": {"objective": "state", "steps": 220}}
    (tmp_path / "config.json").write_text(json.dumps({"origin": origin, "stages": stages}))
    record = publish.training_record(tmp_path)
    assert record["minutes"] == record["stages"]["state"]["minutes"] == round(11 * 20 * 20 / 60, 1)


@pytest.mark.usefixtures("whole_runs")
@pytest.mark.filterwarnings("error")
def test_a_run_without_losses_yet_is_plotted_without_warnings(tmp_path: Path) -> None:
    RunLog(tmp_path, "codec", 1, 0, True, 2, "none").close()
    assert not (tmp_path / "losses.png").exists()
    for stage, losses in {"codec": [], "state": [0.0, 0.5], "joint": [float("nan")]}.items():
        log = RunLog(tmp_path, stage, 4, 0, True, 1, "none")
        log.scalars(0, {"learning_rate": 0.1})
        for step, loss in enumerate(losses):
            log.step(step, "rounds", {"loss": loss}, {}, 0.0)
        log.close()
    assert (tmp_path / "losses.png").exists()
