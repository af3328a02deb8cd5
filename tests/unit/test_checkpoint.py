"""Checkpoints: complete or absent, exact, and refused if they are of another model."""

import hashlib
import json
import multiprocessing
import random
import shutil
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from worldmodel.errors import ModelError, OutputError
from worldmodel.train.checkpoint import checkpointer, manifest
from worldmodel.train.checkpoint.checkpointer import (
    Checkpoints,
    load,
    load_optimizer_state,
    module_state,
    optimizer_state,
)
from worldmodel.train.checkpoint.manifest import TICK_NS, Manifest, sha256_of, verify

PROGRESS = {"stage": "state", "step": 3, "data": {"epoch": 0}}


class Net(nn.Module):
    """Matrices for Muon, vectors, a scalar, an empty one, a tied one, a buffer, and one that never moves."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 5)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.randn(0, 4))
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("mean", torch.randn(2, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(seed))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.scale * self.head(hidden)


def optimizers_of(net: Net) -> dict[str, torch.optim.Optimizer]:
    matrices = [layer.weight for layer in net.layers]
    rest = [p for p in net.parameters() if not any(p is m for m in matrices)]
    return {
        "adamw": torch.optim.AdamW([{"params": rest[:2]}, {"params": rest[2:]}], lr=1e-2),
        "muon": torch.optim.Muon(matrices, lr=1e-2),
    }


def train(net: Net, optimizers: dict[str, torch.optim.Optimizer], steps: int, seed: int) -> list[float]:
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        ids = torch.randint(7, (4, 6), generator=generator)
        loss = nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def state_of(net: Net, optimizers: dict[str, torch.optim.Optimizer]) -> checkpointer.State:
    return module_state(net) | optimizer_state(optimizers, net)


def saved(run: Path, name: str = "state-3", lasting: bool = False, seed: int = 0) -> Path:
    net = Net(seed)
    optimizers = optimizers_of(net)
    train(net, optimizers, 1, seed=seed)
    with Checkpoints(run) as checkpoints:
        return checkpoints.save(name, state_of(net, optimizers), PROGRESS, lasting).result()


def folders(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_training_resumes_bit_for_bit(tmp_path: Path) -> None:
    net = Net(1)
    optimizers = optimizers_of(net)
    train(net, optimizers, 3, seed=1)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save("state-3", state_of(net, optimizers), PROGRESS)
        straight = train(net, optimizers, 4, seed=2)  # while it is written

    again = Net(2)
    anew = optimizers_of(again)
    newest = checkpointer.latest(tmp_path)
    assert newest is not None and newest.name == "00001-state-3"
    assert load(newest, module_state(again)) == PROGRESS
    load_optimizer_state(newest, anew, again)
    assert train(again, anew, 4, seed=2) == straight
    assert all(
        torch.equal(a, b) for a, b in zip(net.state_dict().values(), again.state_dict().values(), strict=True)
    )
    here, there = optimizer_state(optimizers, net), optimizer_state(anew, again)
    assert here.keys() == there.keys()
    assert all(torch.equal(tensor, there[name]) for name, tensor in here.items())


def asynchronous() -> DefaultStager:
    """The copying class for GPUs, without streams and pinned memory."""
    return DefaultStager(StagingOptions(False, False, use_async_staging=True, use_non_blocking_copy=False))


def test_weights_are_copied_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer, "pinned_stager", asynchronous)
    nets = [Net(1), Net(1)]
    both = [optimizers_of(net) for net in nets]
    for net, optimizers in zip(nets, both, strict=True):
        train(net, optimizers, 2, seed=1)
    copy, release = DefaultStager._stage, threading.Event()

    def slow(self: DefaultStager, state: Any, **more: Any) -> Any:
        assert release.wait(60)
        return copy(self, state, **more)

    monkeypatch.setattr(DefaultStager, "_stage", slow)
    with Checkpoints(tmp_path) as checkpoints:
        saved = checkpoints.save("state-3", state_of(nets[0], both[0]), PROGRESS)
        assert not saved.done()  # and yet `save` has returned
        release.set()
        checkpoints.wait_until_staged()
        train(nets[0], both[0], 1, seed=2)
        again = Net(3)
        load(saved.result(), module_state(again))
    assert torch.equal(again.layers[0].weight, nets[1].layers[0].weight)
    assert not torch.equal(again.layers[0].weight, nets[0].layers[0].weight)


def test_optimizer_state_is_named_by_parameter(tmp_path: Path) -> None:
    names = set(Manifest.read(saved(tmp_path)).tensors)
    assert {"model.embed.weight", "model.mean", "optimizer.adamw.embed.weight.exp_avg"} <= names
    assert "optimizer.muon.layers.1.weight.momentum_buffer" in names
    assert "model.head.weight" not in names  # one tensor with the embedding
    assert not any(name.startswith("optimizer.adamw.unused") for name in names)  # it never moved


def test_one_owner_is_loaded_alone(tmp_path: Path) -> None:
    folder, net = saved(tmp_path), Net(5)
    weights = module_state(net)
    load(folder, weights)
    assert torch.equal(net.head.weight, net.embed.weight)
    with safe_open(next(folder.glob("*.safetensors")), "pt") as file:  # by whatever reads safetensors
        assert torch.equal(file.get_tensor("model.scale"), net.scale)
    assert load(folder, {}) == PROGRESS


# Removal of old checkpoints


def test_old_checkpoints_are_removed_and_lasting_ones_kept(tmp_path: Path) -> None:
    net = Net()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save("codec-9", module_state(net), {}, lasting=True)
        for step in range(1, 5):
            checkpoints.save(f"state-{step}", module_state(net), {"step": step})
    assert folders(tmp_path) == ["00001-codec-9", "00004-state-3", "00005-state-4"]


def test_no_checkpoint_is_overwritten(tmp_path: Path) -> None:
    first = saved(tmp_path, seed=1)
    before = {path.name: path.read_bytes() for path in first.iterdir()}
    second = saved(tmp_path, seed=2)
    assert [first.name, second.name] == folders(tmp_path) == ["00001-state-3", "00002-state-3"]
    assert {path.name: path.read_bytes() for path in first.iterdir()} == before


def test_an_unfinished_folder_is_not_a_checkpoint(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    left = folder.with_name(".writing")
    shutil.copytree(folder, left)
    (left / "manifest.json").unlink()
    assert checkpointer.latest(tmp_path) == folder
    saved(tmp_path)
    assert folders(tmp_path) == ["00001-state-3", "00002-state-3"]


def test_a_run_may_have_no_checkpoint(tmp_path: Path) -> None:
    assert checkpointer.latest(tmp_path) is None
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() is None
    assert not any(tmp_path.iterdir())


def save_for_ever(run: Path) -> None:
    net = Net()
    checkpoints = Checkpoints(run)
    newest = checkpoints.latest()
    step = Manifest.read(newest).progress["step"] if newest else 0
    while True:
        step += 1
        net.scale.data.fill_(step)
        checkpoints.save(f"state-{step}", module_state(net), {"step": step})


@pytest.mark.slow
def test_a_process_killed_at_any_time_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    chance, reached = random.Random(0), [0]
    for _ in range(200):
        process = multiprocessing.get_context("fork").Process(target=save_for_ever, args=(tmp_path,))
        process.start()
        time.sleep(chance.uniform(0.05, 0.4))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        with warnings.catch_warnings(action="error"):  # as would a damaged one that is skipped
            newest = checkpointer.latest(tmp_path)
        if newest:
            net = Net()
            reached.append(load(newest, module_state(net))["step"])
            assert net.scale.item() == reached[-1]
        if len(set(reached)) > 5:
            break
    assert reached == sorted(reached)
    assert len(set(reached)) > 5


# Damage


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def damage_data(folder: Path) -> None:
    flip(next(folder.glob("*.safetensors")), -3)


def damage_header(folder: Path) -> None:
    flip(next(folder.glob("*.safetensors")), 40)


def damage_progress(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    assert '"step": 3' in text
    (folder / "manifest.json").write_text(text.replace('"step": 3', '"step": 7'))


def cut_short(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])


def remove_file(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()


def add_file(folder: Path) -> None:
    shutil.copy(next(folder.glob("*.safetensors")), folder / "more.safetensors")


def empty_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]")


def remove_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


DAMAGES = [
    damage_data,
    damage_header,
    damage_progress,
    cut_short,
    remove_file,
    add_file,
    empty_manifest,
    remove_manifest,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path: Path, damage: Any) -> None:
    whole, broken = saved(tmp_path, "state-3"), saved(tmp_path, "state-6")
    verify(broken)
    damage(broken)
    with pytest.raises(ModelError):
        verify(broken)
    with pytest.warns(UserWarning, match="00002-state-6"):
        assert checkpointer.latest(tmp_path) == whole
    assert saved(tmp_path, "state-6").name == "00003-state-6"
    assert broken.is_dir()


def test_every_changed_byte_is_detected(tmp_path: Path) -> None:
    """No single changed byte of a manifest goes unseen."""
    folder = saved(tmp_path)
    path = folder / "manifest.json"
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        if whole[place : place + 1].isspace():
            continue  # between values it says nothing
        flip(path, place)
        with pytest.raises(ModelError):
            verify(folder)
        path.write_bytes(whole)


def test_a_file_is_read_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, digest = [], hashlib.file_digest

    def counted(handle: Any, kind: str) -> Any:
        reads.append(handle.name)
        return digest(handle, kind)

    monkeypatch.setattr(manifest.hashlib, "file_digest", counted)
    file = tmp_path / "a"
    file.write_bytes(b"one")
    expected = hashlib.sha256(b"one").hexdigest()
    assert sha256_of(file) == expected  # it may still change within the tick in which it was written
    time.sleep(2 * TICK_NS / 1e9)
    assert sha256_of(file) == expected
    assert len(reads) == 2
    moved = file.rename(tmp_path / "b")
    time.sleep(2 * TICK_NS / 1e9)
    assert sha256_of(moved) == expected
    before = len(reads)
    assert sha256_of(moved) == expected
    assert len(reads) == before
    moved.write_bytes(b"two")
    assert sha256_of(moved) == hashlib.sha256(b"two").hexdigest()


def test_processes_check_the_files_of_a_checkpoint_together(tmp_path: Path) -> None:
    files = []
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(name.encode())
        files.append(manifest.File.of(tmp_path / name))
    Manifest(PROGRESS, False, {}, files).write(tmp_path)
    (tmp_path / "b").write_bytes(b"x")
    verify(tmp_path, slice(0, None, 2))
    with pytest.raises(ModelError, match="b is damaged"):
        verify(tmp_path, slice(1, None, 2))


def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    outside = shutil.copy(next(folder.glob("*.safetensors")), tmp_path / "outside.safetensors")
    manifest = Manifest.read(folder)
    manifest.files[0] = type(manifest.files[0])(
        "../../outside.safetensors", *list(vars(manifest.files[0]).values())[1:]
    )
    manifest.write(folder)
    assert Path(outside).is_file()
    with pytest.raises(ModelError):
        verify(folder)


# Another model


def test_loading_into_another_model_changes_nothing(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    wider, missing, narrower = Net(3), Net(3), Net(3)
    wider.layers[0] = nn.Linear(6, 6)
    missing.added = nn.Parameter(torch.zeros(1))
    del narrower.scale
    for net, named in ((wider, "layers.0.bias"), (missing, "added"), (narrower, "scale")):
        before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        with pytest.raises(ModelError, match=named):
            load(folder, module_state(net))
        assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    with pytest.raises(ModelError, match="bfloat16"):
        load(folder, module_state(Net().bfloat16()))


def test_optimizers_of_another_kind_are_refused(tmp_path: Path) -> None:
    folder, net = saved(tmp_path), Net()
    with pytest.raises(ModelError, match="muon"):
        load_optimizer_state(folder, {"adamw": torch.optim.AdamW(net.parameters())}, net)


# Places that cannot be written


def test_a_failed_write_is_raised_by_the_next_save(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save("state-1", module_state(Net()), {})
    with pytest.raises(OutputError, match="state-1"):
        checkpoints.save("state-2", module_state(Net()), {})
    checkpoints.close()


def test_progress_is_json(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    assert json.loads((folder / "manifest.json").read_text())["progress"] == PROGRESS
