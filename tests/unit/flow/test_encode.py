"""The stage encode: its files are what training computes, and a source gives episodes of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load, load_file, save_file

from worldmodel import media
from worldmodel.actions import Action
from worldmodel.config import SourceConfig, build
from worldmodel.config.flow import FlowConfig
from worldmodel.errors import ConfigError, InputError, ModelError
from worldmodel.flow.catalog.chain import Chain
from worldmodel.flow.catalog.clips import COLUMNS, ClipReader
from worldmodel.flow.stages import find_stage, weights
from worldmodel.media.tensors import to_tensor
from worldmodel.models.loading import location
from worldmodel.models.rounds import RoundEncoder
from worldmodel.models.world_model import WorldModel


def run(settings: dict[str, Any], clips: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run the stage as a worker does."""
    stage = find_stage("encode")
    columns = {name: pa.array([clip.get(name) for clip in clips]) for name in ("video", *COLUMNS)}
    batch = pa.record_batch({"clip": [str(index) for index in range(len(clips))], **columns})
    return stage.checked(batch, stage.make(**settings)(batch)).to_pylist()


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Videos of 25, 17 and 5 frames at the rate of the tiny model."""
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("videos") / "clip.mp4"

    def video(num_frames: int) -> bytes:
        small = rng.integers(0, 255, (num_frames, 4, 4, 3), dtype=np.uint8)
        media.write_video(small.repeat(8, axis=1).repeat(8, axis=2), path, 8, scale=1)
        return path.read_bytes()

    return [video(25), video(17), video(5), video(25)]


def test_latents_are_those_of_the_codec(model: WorldModel, model_folder: Path, videos: list[bytes]) -> None:
    model = WorldModel.from_pretrained(model_folder)
    rows = run({"model": str(model_folder), "dtype": "float32"}, [{"video": video} for video in videos])
    format, encoder = model.config, RoundEncoder.of(model)
    for video, row, rounds in zip(videos, rows, (3, 2, 0, 3), strict=True):
        assert (row["latents"] is None) == (not rounds)
        assert row["text_states"] is None  # our generator reads no text
        if not rounds:
            assert "5 frames" in row["drop"]
            continue
        frames = media.read_video(video, format.codec.image_size, format.fps, 1 + 8 * rounds)
        with torch.no_grad():
            expected = encoder.chunks(to_tensor([frames]))
        found = load(row["latents"])
        assert found.keys() == expected.keys() == {"first_context", "first_target"}
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name][0], rtol=0, atol=1e-6)


def test_a_part_of_a_file_is_encoded(model_folder: Path, videos: list[bytes]) -> None:
    whole, part, short = run(
        {"model": str(model_folder)},
        [
            {"video": videos[0]},
            {"video": videos[0], "start_s": 1.0, "end_s": 2.25},
            {"video": videos[0], "start_s": 1.0, "end_s": 1.5},
        ],
    )
    whole, part = load(whole["latents"]), load(part["latents"])
    assert whole["first_target"].dtype == torch.bfloat16
    assert torch.equal(part["first_target"], whole["first_target"][1:2])
    assert short["drop"] and not short["latents"]


def test_settings_are_checked(model_folder: Path) -> None:
    for wrong in ({"dtype": "int8"}, {"tasks": ["invent"]}, {"max_frames": 3}):
        with pytest.raises(ConfigError, match=r"int8|invent|is 3;"):
            run({"model": str(model_folder), **wrong}, [])


def test_the_file_of_the_stage_is_what_a_source_reads(
    model: WorldModel, model_folder: Path, videos: list[bytes]
) -> None:
    actions = [{"text": "push", "vector": [0.1, 0, 0]}, {"keys": ["left"]}, None]
    columns = {"actions": json.dumps(actions), "caption": "a scene", "row": {"licence": "cc0"}}
    (row,) = run({"model": str(model_folder)}, [{"video": videos[0], **columns}])
    reader = ClipReader("flow", SourceConfig("flow"), model.config)
    files = {name: row[name] for name in ("video", "latents") if row.get(name)}
    clip = reader.clip("0", columns, files)
    episode = clip.episode("rounds", 0, 0, 3)
    assert episode.actions == (Action("push", vector=(0.1, 0, 0)), Action(keys=("left",)), Action())
    assert not episode.observations
    assert episode.encoded and episode.encoded.target is not None
    assert episode.encoded.target.shape == (3, *model.config.latent_shape)
    plain = ClipReader("flow", SourceConfig("flow", precomputed=False), model.config)
    episode = plain.clip("0", columns, {**files, "video": videos[0]}).episode("rounds", 0, 0, 3)
    assert len(episode.observations) == 4 and episode.encoded is None


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"row": {"text": "own"}}, "own"),
        ({"row": {"text": "own"}, "caption": "caption"}, "caption"),
        ({"caption": "caption", "events": [{"start": 0.0, "end": 9.0, "text": "event"}]}, "event"),
        ({"caption": "caption", "events": []}, "caption"),
        ({"caption": "caption", "actions": ["action"] * 3}, "action"),
    ],
)
def test_the_text_of_a_clip(
    model: WorldModel, videos: list[bytes], columns: dict[str, Any], text: str
) -> None:
    reader = ClipReader("flow", SourceConfig("flow"), model.config)
    clip = reader.clip("0", columns, {"video": videos[0]})
    assert {action.text for action in clip.actions(3)} == {text}


def test_wrong_actions_are_the_clips_error(model: WorldModel) -> None:
    reader = ClipReader("flow", SourceConfig("flow"), model.config)
    for actions in ("{", 3, [3]):
        with pytest.raises(InputError, match="actions"):
            reader.clip("0", {"actions": actions}, {})


def test_other_weights_of_the_same_name_are_another_stage(model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)

    def key(name: str) -> str:
        config = build(FlowConfig, {"stages": {name: {"settings": {"model": str(folder)}}}})
        return Chain.of(config).link(name).key

    def change(file: str) -> None:
        state = load_file(folder / file)
        name = max(state, key=lambda each: state[each].numel())
        save_file({**state, name: state[name] + 1}, folder / file)

    keys = [(key("encode"), key("label_actions"))]
    assert keys == [(key("encode"), key("label_actions"))]
    for file in ("generator/model.safetensors", "codec/model.safetensors"):
        change(file)
        keys.append((key("encode"), key("label_actions")))
    config = json.loads((folder / "config.json").read_text())
    config["model"]["fps"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    keys.append((key("encode"), key("label_actions")))
    encode, label = zip(*keys, strict=True)
    assert encode[0] == encode[1]  # training of the generator leaves latents as they are
    assert len(set(encode)) == 3
    assert len(set(label)) == 4


def test_large_files_are_sampled_and_every_change_of_all_weights_is_seen(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    monkeypatch.setattr(weights, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(weights, "NUM_SAMPLES", 8)
    monkeypatch.setattr(weights, "SAMPLE_BYTES", 64)
    file = folder / "codec" / "model.safetensors"
    before = weights.weights_digest(str(folder), ["codec"])
    assert weights.weights_digest(str(folder), ["codec"]) == before
    state = load_file(file)
    save_file({name: tensor + 1 for name, tensor in state.items()}, file)
    assert weights.weights_digest(str(folder), ["codec"]) != before


def test_a_repository_is_known_by_its_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def snapshot_download(name: str, **options: Any) -> str:
        asked.append((name, options["allow_patterns"]))
        return str(tmp_path / ("a" * 40))

    monkeypatch.setattr(location, "snapshot_download", snapshot_download)
    assert weights.weights_digest("someone/model", ["codec"]) == "a" * 40
    assert asked == [("someone/model", ["config.json"])]  # no weights
    with pytest.raises(ModelError, match="nothing"):
        weights.weights_digest("nothing", ["codec"])
