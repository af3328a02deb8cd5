"""Both distributions as pip and PyPI see them, and the package in the root of a clone."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tarfile
import time
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import yaml

import worldmodel

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PARTS = ("configs", "demo", "serving", "train")
"""Folders beside the package that are parts of it."""
FILES = ("worldmodel", *PARTS, "pretrained", "pyproject.toml", "README.md", "LICENSE")
LARGEST = {"openworldmodel": 60 * 2**20, "openworldmodel_worlds": 90 * 2**20}
"""Bytes of the wheels. PyPI takes 100 MB a file."""


def run(*command: str | Path, cwd: Path) -> str:
    """Run a program without the paths that this process was started with, and return what it prints."""
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=variables, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that are built, without what others were built there."""
    folder = tmp_path_factory.mktemp("clone")
    ignored = shutil.ignore_patterns("__pycache__", "build", "dist", "*.egg-info")
    for name in FILES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def built(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdists of both, and the wheels that are built from them."""
    pytest.importorskip("build", reason="build is not installed: openworldmodel[dev]")
    folder = tmp_path_factory.mktemp("dist")
    for project in (clone, clone / "pretrained"):
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, project, cwd=folder)
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> Callable[..., Path]:
    """Makes a virtual environment with packages and, behind them, what this one has."""

    def make(*installed: str | Path) -> Path:
        folder = tmp_path / "venv"
        venv.create(folder, symlinks=True)
        python = folder / "bin" / "python"
        site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path)
        # All but this package, which may be installed here, too. A path in a .pth file is searched last.
        others = tmp_path / "others"
        others.mkdir()
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if not path.name.startswith(("worldmodel", "openworldmodel", "__editable__")):
                (others / path.name).symlink_to(path)
        (Path(site.strip()) / "others.pth").write_text(str(others))
        if installed:
            pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
            run(*pip, "--no-index", "--no-deps", "--no-build-isolation", *installed, cwd=tmp_path)
        return folder / "bin"

    return make


def files_of(package: Path) -> set[str]:
    """Return the files of a package in the clone, those behind symbolic links, too."""
    return {
        os.path.relpath(Path(folder) / name, package.parent)
        for folder, _, names in os.walk(package, followlinks=True)
        for name in names
    }


@pytest.mark.parametrize(
    ("distribution", "package"),
    [("openworldmodel", "worldmodel"), ("openworldmodel_worlds", "pretrained/worldmodel_worlds")],
)
def test_a_wheel_has_every_file_of_its_package_and_nothing_else(
    clone: Path, built: Path, distribution: str, package: str
) -> None:
    (wheel,) = built.glob(f"{distribution}-*.whl")
    assert wheel.stat().st_size < LARGEST[distribution]
    expected = files_of(clone / package)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert sorted(name for name in names if ".dist-info/" not in name) == sorted(expected)
    assert [name for name in names if name.endswith("licenses/LICENSE")]
    (source,) = built.glob(f"{distribution}-*.tar.gz")
    with tarfile.open(source) as archive:
        members = [member for member in archive.getmembers() if not member.isdir()]
    assert all(member.isreg() for member in members)
    packed = [member.name.partition("/")[2] for member in members]
    assert len(set(packed)) == len(packed)
    assert expected <= set(packed)


def test_the_wheel_has_what_is_no_python_and_the_command(built: Path) -> None:
    (wheel,) = built.glob("openworldmodel-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entries,) = [name for name in names if name.endswith("entry_points.txt")]
        assert b"worldmodel = worldmodel.cli:main" in archive.read(entries)
    needed = ("py.typed", "configs/shapes_tiny.yaml", "demo/play.html", "demo/play.js", "demo/play.css")
    assert {f"worldmodel/{name}" for name in needed} <= names


def test_the_index_would_take_them(built: Path) -> None:
    pytest.importorskip("twine", reason="twine is not installed: openworldmodel[dev]")
    printed = run(
        sys.executable, "-m", "twine", "--no-color", "check", "--strict", *built.iterdir(), cwd=built
    )
    assert printed.count("PASSED") == 4


def test_both_wheels_work_in_an_empty_folder(
    built: Path, environment: Callable[..., Path], tmp_path: Path
) -> None:
    programs = environment(*built.glob("*.whl"))
    empty = tmp_path / "empty"
    empty.mkdir()
    where = run(programs / "python", "-c", "import worldmodel; print(worldmodel.__file__)", cwd=empty)
    assert Path(where).is_relative_to(programs.parent)
    assert run(programs / "worldmodel", "--version", cwd=empty) == f"worldmodel {worldmodel.__version__}\n"
    assert "shapes-chance" in run(programs / "worldmodel", "info", "shapes-chance", cwd=empty)
    frame = ROOT / "demo" / "first_frame.png"
    for model in ("shapes-tiny", "shapes-chance"):
        rollout = ["rollout", frame, "the red ball moves right", "--model", model, "--out", model]
        run(programs / "worldmodel", *rollout, cwd=empty)
        assert list((empty / model).glob("*.mp4"))


@pytest.mark.parametrize("how", ["not", "as a wheel", "editable"])
def test_the_package_is_whole_in_the_root_of_a_clone(
    how: str, clone: Path, environment: Callable[..., Path]
) -> None:
    installed: list[str | Path] = {"not": [], "as a wheel": [clone], "editable": ["--editable", clone]}[how]
    python = environment(*installed) / "python"
    assert run(python, "-m", "worldmodel", "--version", cwd=clone) == f"worldmodel {worldmodel.__version__}\n"
    torchrun = [python, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    assert "key=value" in run(*torchrun, "-m", "worldmodel.train.finetune", "--help", cwd=clone)
    modules = ("train.finetune", "serving.app", "demo.app", "configs")
    imports = "".join(f"import worldmodel.{module}\n" for module in modules)
    (clone / "script.py").write_text(
        f"{imports}from worldmodel.models.loading.location import resolve\n"
        "print(worldmodel.__file__, resolve('shapes-tiny'), resolve('shapes-smol'), sep='\\n')\n"
    )
    package, shipped, other = map(Path, run(python, "script.py", cwd=clone).splitlines())
    assert package == clone / "worldmodel" / "__init__.py"
    assert shipped == clone / "worldmodel" / "pretrained" / "shapes-tiny"
    assert other == clone / "pretrained" / "worldmodel_worlds" / "shapes-smol"
    if how == "editable":
        elsewhere = run(python, "-c", "import worldmodel.train as t; print(t.__file__)", cwd=python.parent)
        assert Path(elsewhere.strip()).resolve() == clone / "train" / "__init__.py"


def test_the_steps_of_the_container_make_a_server_that_its_probes_find_ready(
    environment: Callable[..., Path], tmp_path: Path
) -> None:
    """Without a builder of images: what is copied is built, installed, and started as the pod starts it."""
    lines = (ROOT / "deploy" / "Containerfile").read_text("utf-8").replace("\\\n", " ").splitlines()
    source, wheels, data = tmp_path / "source", tmp_path / "wheels", tmp_path / "data"
    source.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    for words in (line.split() for line in lines if line.startswith("COPY ") and "--from" not in line):
        for name in words[1:-1]:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / words[-1], symlinks=True, ignore=ignored)
            else:
                shutil.copy(ROOT / name, source / words[-1])
    (build,) = (line.split()[2:] for line in lines if line.startswith("RUN pip wheel "))
    assert "/wheels" in build
    build = [str(wheels) if word == "/wheels" else word for word in build]
    offline = ("--no-index", "--no-build-isolation", "--quiet")
    run(sys.executable, "-m", "pip", build[0], *offline, *build[1:], cwd=source)
    programs = environment(*wheels.glob("*.whl"))

    manifest = (ROOT / "deploy" / "kubernetes" / "serve.yaml").read_text("utf-8")
    (pod,) = (
        each["spec"]["template"]["spec"]
        for each in yaml.safe_load_all(manifest)
        if each["kind"] == "Deployment"
    )
    (container,) = pod["containers"]
    assert json.loads(next(line[4:] for line in lines if line.startswith("CMD "))) == container["args"][:2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    replaced = {"--port=8000": f"--port={port}", "--data-dir=/data": f"--data-dir={data}"}
    assert set(replaced) <= set(container["args"])
    command = [str(programs / "worldmodel"), *(replaced.get(word, word) for word in container["args"])]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    drops = ["setpriv", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]
    if shutil.which(drops[0]) and not subprocess.run([*drops, "true"], stderr=subprocess.DEVNULL).returncode:
        command = [*drops, *command]
    key = "a-key-of-the-secret-0123456789"
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            command, cwd=tmp_path, env={**variables, "WORLDMODEL_API_KEYS": key}, stdout=log, stderr=log
        )
    try:
        url, log = f"http://127.0.0.1:{port}", tmp_path / "log"

        def probe(name: str) -> bool:
            how = container[name]
            try:
                found = httpx.get(url + how["httpGet"]["path"], timeout=how.get("timeoutSeconds", 1))
            except httpx.HTTPError:
                return False
            return 200 <= found.status_code < 400

        starts = container["startupProbe"]
        until = time.monotonic() + starts["periodSeconds"] * starts["failureThreshold"]
        while not probe("startupProbe"):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.5)
        assert probe("livenessProbe")
        assert probe("readinessProbe")
        with httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=300) as client:
            frame = {"observation": (ROOT / "demo" / "first_frame.png").read_bytes()}  # a child decodes it
            world = client.post("/v1/worlds", files=frame)
            assert world.status_code == 200, world.text
            path = f"/v1/worlds/{world.json()['id']}/step"
            assert client.post(path, json={"step_id": 1, "action": "the red ball jumps"}).status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=pod["terminationGracePeriodSeconds"]) == 0
    finally:
        server.kill()
        server.wait()
