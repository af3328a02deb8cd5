"""The guide to replicas: its commands start two, its client moves a world, and its nginx pins worlds."""

import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from worldmodel.cli import serve
from worldmodel.serving.client import Client

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "how-to" / "replicas.md").read_text(encoding="utf-8")
NGINX = (ROOT / "deploy" / "replicas" / "nginx.conf").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ worldmodel (serve .*)$", GUIDE, flags=re.MULTILINE)


@contextmanager
def started(folder: Path) -> Iterator[list[str]]:
    """The servers of the guide, on free ports; yields their addresses."""
    processes: list[subprocess.Popen[str]] = []
    urls: list[str] = []
    try:
        for command in COMMANDS:
            words = shlex.split(re.sub(r"--port \d+", "--port 0", command))
            arguments = [sys.executable, "-P", "-m", "worldmodel", *words]
            process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=folder)
            processes.append(process)
            assert process.stdout is not None
            greeting = process.stdout.readline()
            urls += re.findall(r"http://127\.0\.0\.1:\d+", greeting)
        yield urls
    finally:
        for process in processes:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def proxy(urls: list[str], folder: Path) -> Iterator[str]:
    """The nginx of deploy/replicas in front of servers of this machine."""
    port, lines = free_port(), iter(urls)
    config = re.sub(r"resolver .*", "", NGINX)
    config = re.sub(
        r"server serve-\d:8000 (.*) resolve;", lambda line: f"server {next(lines)[7:]} {line[1]};", config
    )
    config = config.replace("listen 8000", f"listen 127.0.0.1:{port}").replace("/tmp/", f"{folder}/")
    (folder / "nginx.conf").write_text(f"daemon off;\n{config}", encoding="utf-8")
    command = ["nginx", "-c", str(folder / "nginx.conf"), "-e", str(folder / "log"), "-p", str(folder)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 30
        while True:
            assert process.poll() is None
            assert time.monotonic() < until
            try:
                httpx.get(f"http://127.0.0.1:{port}/health")
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def test_commands_are_parsed() -> None:
    parsed = [serve._parse(shlex.split(command)[1:]) for command in COMMANDS]
    assert len(parsed) == 2
    assert len({args.port for args in parsed}) == 2
    assert len({(args.database, args.data_dir) for args in parsed}) == 1


@pytest.mark.slow
def test_guide_runs_as_written(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```py\n(.*?)^```", GUIDE, flags=re.DOTALL | re.MULTILINE)
    with started(tmp_path) as urls:
        for port, url in zip((8001, 8002), urls, strict=True):
            code = code.replace(f"http://127.0.0.1:{port}", url)
        names: dict[str, Any] = {}
        exec(compile(code, "replicas.md", "exec"), names)
        with Client(urls[1]) as there:
            assert there.worlds.open(names["world"].id).round == 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_nginx_sends_a_world_to_one_replica(tmp_path: Path) -> None:
    with started(tmp_path) as urls, proxy(urls, tmp_path) as url, Client(url) as client:
        worlds = [client.worlds.create(text="a red ball") for _ in range(6)]
        for world in worlds:
            for index in (1, 2, 3):
                world.step("go")
                assert world.round == index

        def holders() -> list[set[str]]:
            return [{each["id"] for each in httpx.get(f"{each}/v1/worlds").json()["data"]} for each in urls]

        before = holders()
        assert set.union(*before) == {world.id for world in worlds}
        assert not set.intersection(*before)
        for world in worlds:
            world.step("go")
        assert holders() == before
