"""Backbones by reference: LoRA weights in a model folder, and the name of their base model."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from peft import PeftModel
from runs import short_run
from safetensors.torch import load_file, save_file

from worldmodel import WorldModel
from worldmodel.cli.info import model_facts
from worldmodel.config import BackboneConfig, StageConfig, TrainConfig, TrainedConfig
from worldmodel.errors import ModelError
from worldmodel.models.backbone.causal_lm import Backbone
from worldmodel.models.backbone.merging import resolve as resolve_backbone
from worldmodel.models.backbone.reference import Reference, read
from worldmodel.models.loading import model_folder
from worldmodel.models.loading.location import resolve
from worldmodel.train import finetune
from worldmodel.train.checkpoint import checkpointer, export

STAGE = StageConfig(
    "state",
    steps=2,
    batch_size=2,
    tasks={"rounds": 1.0},
    lr=0.02,
    warmup_steps=1,
    rounds=1,
    train={"backbone": TrainedConfig(lora_rank=4, lora_alpha=8), "vision": TrainedConfig()},
)


def copy_of_base(folder: Path) -> Path:
    """A language model that was trained before."""
    return Path(shutil.copytree(resolve("shapes-tiny") / "backbone", folder / "base"))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """One that a test may move or damage."""
    return copy_of_base(tmp_path)


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run that tests share; they must not change it."""

    config: TrainConfig
    base: Path
    folder: Path
    """The model after two stages."""
    checkpoint: Path
    first: Path
    """The model after one stage."""


@pytest.fixture(scope="module")
def trained(
    make_model: Callable[..., WorldModel], tokenizer_folder: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trained]:
    """A run of two stages that add to the first two layers of the base."""
    folder = tmp_path_factory.mktemp("reference")
    base = copy_of_base(folder)
    backbone = BackboneConfig(pretrained=str(base), num_layers=2)
    model = dataclasses.replace(make_model(image_size=64, world="shapes").config, backbone=backbone)
    config = dataclasses.replace(
        short_run(model, tokenizer_folder, folder / "run"),
        stages={"first": STAGE, "second": STAGE},
        sample_every=0,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        once = dataclasses.replace(config, stages={"first": STAGE}, run_dir=str(folder / "once"))
        first, model_folder = finetune.train(once), finetune.train(config)
        checkpoint = checkpointer.latest(Path(config.run_dir))
        assert checkpoint is not None
        yield Trained(config, base, model_folder, checkpoint, first)


@pytest.fixture
def copied(trained: Trained, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the model after one stage, which names the base that may be damaged, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = Path(shutil.copytree(trained.first, tmp_path / "copied"))
    named = folder / "backbone" / "base.json"
    named.write_text(named.read_text().replace(str(trained.base), str(base)))
    return folder


def weights(model: WorldModel) -> dict[str, torch.Tensor]:
    return dict(model.backbone.model.state_dict())


def test_a_model_by_reference_equals_the_one_that_was_trained(trained: Trained) -> None:
    folder, base = trained.folder, trained.base
    files = {path.name for path in (folder / "backbone").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "base.json"} <= files
    assert not {"model.safetensors", "tokenizer.json"} & files
    assert model_facts(str(folder))["base_model"] == f"{base}, 2 layers"

    before = weights(export.load_model(trained.config, trained.checkpoint))
    loaded = weights(WorldModel.from_pretrained(folder))
    untouched = Backbone.from_pretrained(base, num_layers=2).model.state_dict()
    assert before.keys() == loaded.keys() == untouched.keys()
    for name, tensor in before.items():  # the merged weights are stored in bf16
        torch.testing.assert_close(loaded[name], tensor, atol=0.02, rtol=0.02)
    moved = [name for name, tensor in before.items() if not torch.equal(tensor, untouched[name])]
    assert any("q_proj" in name for name in moved)
    assert all(".layers." in name and "norm" not in name for name in moved)


def test_peft_reads_it_and_without_it_the_base_is_untouched(trained: Trained) -> None:
    folder, base = trained.folder, trained.base
    untouched, adapted = (Backbone.from_pretrained(base, num_layers=2).model.eval() for _ in range(2))
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected = untouched(ids).logits
        model = PeftModel.from_pretrained(adapted, folder / "backbone")
        assert model.active_peft_config.base_model_name_or_path == str(base)
        on = model(ids).logits
        with model.disable_adapter():
            assert torch.equal(model(ids).logits, expected)
        merged = WorldModel.from_pretrained(folder).backbone
        ours = merged.logits(merged(merged.embed(ids)))
    assert not torch.allclose(on, expected, atol=1e-3)
    torch.testing.assert_close(ours, on, atol=0.2, rtol=0.1)


def test_a_base_is_found_by_its_commit(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshots = tmp_path / "hub" / "models--someone--base" / "snapshots"
    snapshots.mkdir(parents=True)
    base.rename(snapshots / commit)
    config = BackboneConfig(pretrained="someone/base", revision=commit, num_layers=2)
    Reference.of(config, {}).save(tmp_path / "backbone", torch.float32)
    again = read(tmp_path / "backbone")
    assert again is not None and (again.name, again.revision) == ("someone/base", commit)
    merged = Backbone.from_pretrained(resolve_backbone(tmp_path / "backbone")).model.state_dict()
    expected = Backbone.from_pretrained(snapshots / commit, num_layers=2).model.state_dict()
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in expected.items())
    (snapshots / commit).rename(snapshots / "elsewhere")
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(ModelError, match=commit):
        resolve_backbone(tmp_path / "backbone")


@pytest.mark.parametrize("rank", [None, 4, 10, 64])
def test_layers_of_different_ranks_are_saved_and_reduced(tmp_path: Path, rank: int | None) -> None:
    """A layer that was trained once beside one that was trained twice, and ranks above a layer's size."""
    draw = torch.Generator().manual_seed(0)
    factors = {
        name: (torch.randn(rows, few, generator=draw), torch.randn(few, 20, generator=draw))
        for name, rows, few in (("layers.0.q_proj", 20, 12), ("layers.0.k_proj", 8, 6))
    }
    whole = Reference("base", None, 1, {}, factors)
    (whole if rank is None else whole.reduced(rank)).save(tmp_path / "saved", torch.float32)
    saved = read(tmp_path / "saved")
    assert saved is not None
    for name, (up, down) in factors.items():
        product, (again_up, again_down) = up @ down, saved.factors[name]
        u, s, v = torch.linalg.svd(product, full_matrices=False)
        kept = len(s) if rank is None else rank
        torch.testing.assert_close(
            again_up @ again_down, u[:, :kept] * s[:kept] @ v[:kept], atol=1e-4, rtol=1e-4
        )


def test_saving_again_and_further_lora_keep_the_reference(trained: Trained, tmp_path: Path) -> None:
    folder = trained.folder
    again = WorldModel.from_pretrained(folder).save_pretrained(tmp_path / "again")
    first, second = (load_file(each / "backbone" / "adapter_model.safetensors") for each in (folder, again))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())

    further = dataclasses.replace(
        trained.config, init_from=str(folder), run_dir=str(tmp_path / "further"), stages={"third": STAGE}
    )
    third = finetune.train(further)
    reference = model_folder.reference.read(third / "backbone")
    assert reference is not None
    assert {down.shape[0] for _, down in reference.factors.values()} == {12}  # three stages of rank 4
    assert reference.name == str(trained.base)


@pytest.mark.parametrize(
    "train", [{"backbone": TrainedConfig()}, STAGE.train | {"backbone.model.model.norm": TrainedConfig()}]
)
def test_training_further_weights_ends_the_reference(
    trained: Trained, tmp_path: Path, train: dict[str, TrainedConfig]
) -> None:
    whole = dataclasses.replace(STAGE, train=train)
    further = dataclasses.replace(
        trained.config,
        init_from=str(trained.first),
        run_dir=str(tmp_path / "further"),
        stages={"all": whole},
    )
    assert (finetune.train(further) / "backbone" / "model.safetensors").is_file()


def test_of_a_frozen_backbone_the_name_is_saved_and_no_rank(trained: Trained, tmp_path: Path) -> None:
    frozen = dataclasses.replace(STAGE, train={"vision": TrainedConfig()})
    other = dataclasses.replace(trained.config, stages={"first": frozen}, run_dir=str(tmp_path / "frozen"))
    folder, base = finetune.train(other), trained.base
    assert [path.name for path in (folder / "backbone").iterdir()] == ["base.json"]
    untouched = Backbone.from_pretrained(base, num_layers=2).model.state_dict()
    model = WorldModel.from_pretrained(folder)
    for name, tensor in weights(model).items():
        torch.testing.assert_close(tensor, untouched[name], atol=0.02, rtol=0.02)
    again = model.save_pretrained(tmp_path / "again")
    assert (again / "backbone" / "base.json").read_bytes() == (folder / "backbone" / "base.json").read_bytes()
    checkpoint = checkpointer.latest(Path(other.run_dir))
    assert checkpoint is not None
    with pytest.raises(ModelError, match="--rank"):
        export.export(checkpoint, tmp_path / "none", 2)


def test_the_factors_of_all_stages_are_reduced_to_a_rank(trained: Trained, tmp_path: Path) -> None:
    whole, exact, least = (
        model_folder.reference.read(
            export.export(trained.checkpoint, tmp_path / str(rank), rank) / "backbone"
        )
        for rank in (None, 8, 2)
    )
    assert whole is not None and exact is not None and least is not None
    for name, (up, down) in whole.factors.items():
        change = up.float() @ down.float()
        same, near = (
            each.factors[name][0].float() @ each.factors[name][1].float() for each in (exact, least)
        )
        torch.testing.assert_close(same, change, atol=0.02 * float(change.abs().max()), rtol=0.02)
        assert least.factors[name][1].shape[0] == 2
        lost = torch.linalg.svdvals(change)[2:].square().sum().sqrt()
        torch.testing.assert_close((near - change).norm(), lost, rtol=0.1, atol=0.02 * float(change.norm()))


def test_factors_are_averaged_with_those_of_another_model(trained: Trained, tmp_path: Path) -> None:
    first, other = trained.folder, trained.first
    mean = export.export(trained.checkpoint, tmp_path / "mean", average_with=str(other))
    ours, theirs, both = (model_folder.reference.read(each / "backbone") for each in (first, other, mean))
    assert ours is not None and theirs is not None and both is not None
    for name, (up, down) in both.factors.items():
        changes = [(a.float() @ b.float()) for a, b in (ours.factors[name], theirs.factors[name])]
        assert not torch.equal(*changes)
        torch.testing.assert_close(up.float() @ down.float(), sum(changes) / 2, atol=2e-4, rtol=0.02)
    weights_of = [weights(WorldModel.from_pretrained(each)) for each in (first, other, mean)]
    for name, weight in weights_of[2].items():
        expected = (weights_of[0][name] + weights_of[1][name]) / 2
        torch.testing.assert_close(weight, expected, atol=0.01, rtol=0.01)


def test_errors_name_the_base_model(copied: Path, base: Path, tmp_path: Path) -> None:
    away = base.rename(tmp_path / "away")
    with pytest.raises(ModelError, match=r"needs its base language model.*base"):
        WorldModel.from_pretrained(copied)
    away.rename(base)
    file = base / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    next(iter(tensors.values())).add_(1)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match="other weights"):
        WorldModel.from_pretrained(copied)


def moved(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy a model to another machine: another working folder, and an empty cache."""
    there = tmp_path / "there"
    there.mkdir()
    monkeypatch.chdir(there)
    monkeypatch.setenv("XDG_CACHE_HOME", str(there / "cache"))
    return Path(shutil.copytree(folder, there / "model"))


def test_a_model_is_loaded_elsewhere_with_the_folder_of_its_base(
    trained: Trained, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    relative = dataclasses.replace(trained.config.model.backbone, pretrained="base")
    model = dataclasses.replace(trained.config.model, backbone=relative)
    config = dataclasses.replace(
        trained.config, model=model, stages={"first": STAGE}, run_dir=str(tmp_path / "run")
    )
    folder = finetune.train(config)
    expected = weights(WorldModel.from_pretrained(folder))
    copy = moved(folder, tmp_path, monkeypatch)
    found = weights(WorldModel.from_pretrained(copy))  # by its absolute path
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    shutil.rmtree(tmp_path / "there" / "cache")
    away = base.rename(tmp_path / "away")
    with pytest.raises(ModelError, match="--base"):
        WorldModel.from_pretrained(copy)
    other = Path(shutil.copytree(away, tmp_path / "other"))
    tensors = {name: tensor.clone() for name, tensor in load_file(away / "model.safetensors").items()}
    next(iter(tensors.values())).add_(1)
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"other weights.*other"):
        WorldModel.from_pretrained(copy, base=other)
    found = weights(WorldModel.from_pretrained(copy, base=away))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert weights(WorldModel.from_pretrained(copy)).keys() == expected.keys()  # now in the cache


COMMIT = "89abcdef0123456789abcdef0123456789abcdef"


def test_a_base_in_the_cache_of_the_hub_is_known_by_its_commit(base: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--some--base-1b" / "snapshots" / COMMIT
    snapshot.parent.mkdir(parents=True)
    base.rename(snapshot)
    found = Reference.of(BackboneConfig(pretrained=str(snapshot)), {})
    assert (found.name, found.revision, found.folder) == ("some/base-1b", COMMIT, str(snapshot))
    assert found.title == f"some/base-1b at commit {COMMIT}"


def test_a_downloaded_base_has_its_commit_and_the_repository_of_the_config(base: Path) -> None:
    notes = base / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    (notes / "model.safetensors.metadata").write_text(f"{COMMIT}\nabc\n1.5\n")
    named = Reference.of(BackboneConfig(pretrained=str(base), repository="some/base"), {})
    assert (named.name, named.revision, named.folder) == ("some/base", COMMIT, str(base))
    unnamed = Reference.of(BackboneConfig(pretrained=str(base)), {})
    assert (unnamed.name, unnamed.revision) == (str(base), None)
    assert named == unnamed  # the same weights


@pytest.mark.parametrize("name", ["base.json", "adapter_model.safetensors"])
def test_damaged_files(copied: Path, name: str) -> None:
    (copied / "backbone" / name).write_text("{")
    with pytest.raises(ModelError, match=r"damaged|cannot be read"):
        WorldModel.from_pretrained(copied)


def test_factors_of_other_layers(copied: Path) -> None:
    file = copied / "backbone" / "base.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_layers": 1}))
    with pytest.raises(ModelError, match=r"layers\.1.*do not fit"):
        WorldModel.from_pretrained(copied)
