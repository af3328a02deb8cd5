"""Atomic writes: all of a file or folder, or nothing."""

import errno
from pathlib import Path

import pytest

from worldmodel.errors import InputError, OutputError
from worldmodel.io import TEMPORARY_PREFIX, atomic_file, atomic_folder, staged_files


@pytest.mark.parametrize("stop", [RuntimeError, KeyboardInterrupt])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, stop: type[BaseException]
) -> None:
    path = tmp_path / "result.txt"
    path.write_text("old")
    with pytest.raises(stop), atomic_file(path) as temporary:  # noqa: PT012
        temporary.write_text("half of the new")
        raise stop
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_writing_creates_folders_and_applies_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "result.txt"
    with atomic_file(path) as temporary:
        temporary.write_text("new")
        assert not path.exists()
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_a_full_disk_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No space left"), atomic_file(tmp_path / "big.txt"):
        Path("/dev/full").write_text("more than fits")
    assert not list(tmp_path.iterdir())


def test_a_durable_file_can_be_private(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "key.json", durable=True, mode=0o600) as temporary:
        assert temporary.name.startswith(TEMPORARY_PREFIX)
        assert temporary.suffix == ".json"
        temporary.write_bytes(b"{}")
    assert (tmp_path / "key.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["folder", "file/below"])
def test_a_path_that_cannot_be_written_is_an_output_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=name), atomic_file(tmp_path / name):
        pytest.fail("the block must not run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_folder_is_replaced_when_the_new_one_is_complete(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    for content in ("old", "new"):
        with atomic_folder(folder) as temporary:
            (temporary / content).touch()
            assert not (folder / content).exists()
    assert [path.name for path in folder.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("stop", [RuntimeError, KeyboardInterrupt])
def test_a_failed_folder_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, stop: type[BaseException]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "old").touch()
    with pytest.raises(stop), atomic_folder(folder) as temporary:  # noqa: PT012
        (temporary / "new").touch()
        raise stop
    assert [path.name for path in folder.iterdir()] == ["old"]
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_that_cannot_be_renamed_restores_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "old").touch()
    rename = Path.rename

    def fails(source: Path, target: Path) -> Path:
        if target == folder and not source.name.endswith(".old"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OutputError, match="model"), atomic_folder(folder):
        pass
    assert [path.name for path in folder.iterdir()] == ["old"]
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_does_not_replace_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="file"), atomic_folder(tmp_path / "file"):
        pytest.fail("the block must not run")


def test_staged_files_expand_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with staged_files("~/made") as staged:
        (staged / "one").write_text("1")
    assert (tmp_path / "made" / "one").read_text() == "1"


def test_staged_files_move_together_or_not_at_all(tmp_path: Path) -> None:
    with staged_files(tmp_path / "a/b") as staged:
        (staged / "one").write_text("1")
        assert not (tmp_path / "a/b/one").exists()
    assert [path.name for path in (tmp_path / "a/b").iterdir()] == ["one"]
    with pytest.raises(InputError), staged_files(tmp_path / "a/c") as staged:  # noqa: PT012
        (staged / "two").write_text("2")
        raise InputError("no")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    with pytest.raises(OutputError, match="one"), staged_files(tmp_path / "a/b/one"):
        pytest.fail("the block must not run")
