"""Model folders: saving, loading, the Hub, and errors for damaged folders."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from worldmodel import config as configs
from worldmodel.errors import ConfigError, ModelError, OutputError
from worldmodel.models.loading import deferred, location
from worldmodel.models.loading import model_folder as folders
from worldmodel.models.world_model import WorldModel

PARTS = ("backbone", *(name for name in folders.COMPONENTS if name != "outcome"))


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def change_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_fp32_comes_back_bit_for_bit(model: WorldModel, model_folder: Path, image: np.ndarray) -> None:
    loaded = WorldModel.from_pretrained(model_folder)
    assert loaded.config == model.config
    assert not loaded.training
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    played = []
    for each in (model, loaded):
        session = each.session()
        session.reset(image)
        played.append((session.step("the red ball moves left").frames, session.describe()))
    assert np.array_equal(played[0][0], played[1][0])
    assert played[0][1] == played[1][1]


def test_bf16_comes_back_close_and_is_half_the_size(
    model: WorldModel, model_folder: Path, tmp_path: Path
) -> None:
    folder = model.save_pretrained(tmp_path / "half")
    loaded = WorldModel.from_pretrained(folder)
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, model.state_dict()[name], atol=0, rtol=2**-8)
    sizes = [
        sum(file.stat().st_size for file in path.rglob("*.safetensors")) for path in (folder, model_folder)
    ]
    assert 0.4 < sizes[0] / sizes[1] < 0.65


def test_files_of_a_model_folder(model: WorldModel, model_folder: Path) -> None:
    values = json.loads((model_folder / "config.json").read_text())
    assert values["format"] == folders.FORMAT
    assert configs.build(configs.WorldModelConfig, values["model"]) == model.config
    assert sorted(path.name for path in model_folder.iterdir()) == sorted(
        [*PARTS, "README.md", "config.json", "tokens.safetensors"]
    )
    assert not [path for path in model_folder.rglob("*") if path.suffix in folders.PICKLE_SUFFIXES]
    tokens = load_file(model_folder / "tokens.safetensors")
    assert set(tokens) == {"queries", "blank_latents", "prompt_marker", "answer_marker"}


def test_training_and_card_are_kept(model: WorldModel, tmp_path: Path) -> None:
    folder = model.save_pretrained(tmp_path / "m", training={"seed": 3}, card="# Shapes\n")
    assert json.loads((folder / "config.json").read_text())["training"] == {"seed": 3}
    assert (folder / "README.md").read_text() == "# Shapes\n"


@pytest.mark.parametrize(
    "name", ["backbone/model.safetensors", "state/model.safetensors", "tokens.safetensors"]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(
    model_folder: Path, tmp_path: Path, name: str, value: float
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "broken")
    tensors = load_file(folder / name)
    key = sorted(tensors)[-1]
    tensors[key].view(-1)[0] = value
    save_file(tensors, folder / name, {"format": "pt"})
    with pytest.raises(ModelError, match=f"broken.*finite.*{key.rpartition('.')[2]}"):
        WorldModel.from_pretrained(folder)


def test_load_weights_copies_a_saved_model(
    make_model: Callable[..., WorldModel], model: WorldModel, model_folder: Path
) -> None:
    other = make_model(seed=5)
    folders.load_weights(other, model_folder)
    deferred.load_shards(other)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in other.state_dict().items())
    with pytest.raises(ModelError, match=model_folder.name):
        folders.load_weights(make_model(image_size=64), model_folder)


def test_device_and_dtype_can_be_chosen(folder: Path, image: np.ndarray) -> None:
    loaded = WorldModel.from_pretrained(folder, device="cpu", dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in loaded.backbone.model.parameters()} == {torch.bfloat16}
    assert (loaded.device.type, loaded.dtype) == ("cpu", torch.float32)
    session = loaded.session()
    session.reset(image)
    assert session.step("the red ball moves left").frames.shape == (8, 32, 32, 3)
    with pytest.raises(ConfigError, match="float16"):
        WorldModel.from_pretrained(folder, dtype=torch.float16)


def test_a_repository_on_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def snapshot_download(name: str, **options: Any) -> str:
        asked.append({"name": name, **options})
        return str(folder)

    monkeypatch.setattr(location, "snapshot_download", snapshot_download)
    WorldModel.from_pretrained("someone/model", revision="v1", token="secret", cache_dir="cache")
    assert asked[0]["name"] == "someone/model"
    assert (asked[0]["revision"], asked[0]["token"], asked[0]["cache_dir"]) == ("v1", "secret", "cache")
    assert not any(pattern in {"*", "*.py", "*.bin"} for pattern in asked[0]["allow_patterns"])


def test_a_model_is_pushed_to_the_hub_with_its_card(
    model: WorldModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: dict[str, tuple[set[str], str, dict[str, Any] | None]] = {}

    class Api:
        def __init__(self, token: str | None = None) -> None: ...

        def create_repo(self, repo_id: str, **_: Any) -> Any:
            return SimpleNamespace(repo_id=repo_id)

        def upload_folder(self, repo_id: str, folder_path: Path, **_: Any) -> str:
            names = {path.name for path in folder_path.iterdir()}
            training = json.loads((folder_path / "config.json").read_text())["training"]
            pushed[repo_id] = (names, (folder_path / "README.md").read_text(), training)
            return "https://hub/commit"

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Api)
    assert model.push_to_hub("someone/model") == "https://hub/commit"
    names, card, training = pushed["someone/model"]
    assert names == {*PARTS, "README.md", "config.json", "tokens.safetensors"}
    assert "Not measured." in card
    assert training is None

    folder = model.save_pretrained(tmp_path / "measured", card="# Measured: 93 %", training={"stages": {}})
    WorldModel.from_pretrained(folder).push_to_hub("someone/measured")
    assert pushed["someone/measured"][1:] == ("# Measured: 93 %", {"stages": {}})


# Invalid folders


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[:8] = b"\xff" * 8
    path.write_bytes(data)


def remove(path: Path) -> None:
    path.unlink()


def widen(path: Path) -> None:
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if tensors[name].dim() > 0)
    save_file({**tensors, name: torch.cat([tensors[name]] * 2)}, path, metadata={"format": "pt"})


def lose_one(path: Path) -> None:
    tensors = load_file(path)
    tensors.pop(sorted(tensors)[-1])
    save_file(tensors, path, metadata={"format": "pt"})


FILES = [*(f"{part}/model.safetensors" for part in PARTS), "tokens.safetensors"]


@pytest.mark.parametrize("damage", [truncate, flip_header, remove, widen, lose_one])
@pytest.mark.parametrize("file", FILES)
def test_damaged_weights_are_one_sentence(folder: Path, file: str, damage: Callable[[Path], None]) -> None:
    damage(folder / file)
    with pytest.raises(ModelError) as caught:
        WorldModel.from_pretrained(folder)
    assert "\n" not in str(caught.value)


def test_extra_weights_are_refused(folder: Path) -> None:
    path = folder / "codec" / "model.safetensors"
    save_file({**load_file(path), "surprise": torch.zeros(1)}, path)
    with pytest.raises(ModelError, match="'surprise'"):
        WorldModel.from_pretrained(folder)


@pytest.mark.parametrize("name", ["weights.bin", "codec/model.pt", "backbone/x.pkl", "deep/er/a.ckpt"])
def test_pickles_are_refused_before_anything_is_read(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"\x80\x04.")
    (folder / "config.json").write_text("not even JSON")
    with pytest.raises(ModelError, match="pickled"):
        WorldModel.from_pretrained(folder)


@pytest.mark.parametrize(
    "name",
    ["no-such-model", "", "a" * 5000, "nul\0", "../shapes-tiny", "https://host/model"],
    ids=lambda n: n[:12],
)
def test_unknown_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError):
        WorldModel.from_pretrained(name)


def test_a_folder_without_config_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        WorldModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        '{"format": 1}',
        '{"format": 0, "model": {}}',
        '{"format": 2, "model": {}}',
        '{"format": 1, "model": []}',
        "\x00",
    ],
)
def test_an_invalid_config_is_a_model_error(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        WorldModel.from_pretrained(folder)


def test_a_config_with_an_unknown_key_or_a_wrong_value(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())["model"]
    for wrong in ({**values, "fqs": 8}, {**values, "fps": "fast"}, {**values, "chunk_frames": 7}):
        change_json(folder / "config.json", model=wrong)
        with pytest.raises(ConfigError) as caught:
            WorldModel.from_pretrained(folder)
        assert "\n" not in str(caught.value)


def test_a_setting_beside_the_model_is_named(folder: Path) -> None:
    change_json(folder / "config.json", guidance_scale=2.0)
    with pytest.raises(ConfigError, match="guidance_scale"):
        WorldModel.from_pretrained(folder)


@pytest.mark.parametrize("model_type", ["mamba", "no_such_family", None])
def test_only_known_backbones_are_loaded(folder: Path, model_type: str | None) -> None:
    change_json(folder / "backbone" / "config.json", model_type=model_type)
    with pytest.raises((ModelError, ConfigError)) as caught:
        WorldModel.from_pretrained(folder)
    assert "\n" not in str(caught.value)


def test_code_beside_a_backbone_does_not_run(folder: Path, tmp_path: Path) -> None:
    (folder / "backbone" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: ...\n")
    change_json(
        folder / "backbone" / "config.json",
        model_type="evil",
        auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"},
    )
    with pytest.raises((ModelError, ConfigError)):
        WorldModel.from_pretrained(folder)
    assert not (tmp_path / "ran").exists()


# Saving


def test_saving_again_replaces_the_model(model: WorldModel, tmp_path: Path) -> None:
    first = model.save_pretrained(tmp_path / "m", card="one")
    model.save_pretrained(tmp_path / "m", card="two")
    assert (first / "README.md").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_saving_keeps_folders_without_a_model(model: WorldModel, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("five years")
    with pytest.raises(OutputError, match="a model"):
        model.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("config", ['{"my": "settings"}', '{"model": {}, "stages": {}}', "[1]", "damaged"])
def test_saving_keeps_folders_with_the_config_of_something_else(
    model: WorldModel, tmp_path: Path, config: str
) -> None:
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "checkpoint").write_text("of a run")
    with pytest.raises(OutputError, match="choose a new folder"):
        model.save_pretrained(tmp_path)
    assert (tmp_path / "checkpoint").read_text() == "of a run"


def test_a_folder_that_cannot_be_written(model: WorldModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file", tmp_path / "file" / "m"):
        with pytest.raises(OutputError):
            model.save_pretrained(place)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error")])
def test_a_failure_on_the_way_leaves_the_old_model(
    model: WorldModel, folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    monkeypatch.setattr(folders, "save_file", fail)
    with pytest.raises(OutputError):
        model.save_pretrained(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_the_card_of_an_unmeasured_model_lists_its_components(model: WorldModel, tmp_path: Path) -> None:
    training = {"stages": {"state": {"objective": "state", "steps": 12}}}
    file = model.save_pretrained(tmp_path / "mine", training=training) / "README.md"
    data: Any = ModelCard.load(file).data
    card = file.read_text()
    assert (data.library_name, data.license, data.eval_results) == ("worldmodel", None, None)
    assert "# mine" in card
    assert "| backbone | qwen3 |" in card
    assert "text, keys, vector" in card
    assert "| state | state | 12 |" in card
    assert "Not measured." in card
