"""`worldmodel demo`: a page on which a person steers a world.

The page talks to a server over HTTP, one that runs already or one that it starts for itself. It listens on
this machine only, and holds no model.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING

from worldmodel.cli.parser import Parser
from worldmodel.errors import ConfigError, ModelError
from worldmodel.worlds import World, get_world

if TYPE_CHECKING:
    import gradio as gr

KEY_VARIABLE = "WORLDMODEL_API_KEY"
"""Environment variable with the key of a running server; as an argument others could read it."""
START_S = 300.0
STOP_S = 40.0


def main(argv: list[str] | None = None) -> int:
    """Show the demo until interrupted and return the exit code."""
    parser = Parser(
        "worldmodel demo",
        "Open a page on which a person steers a world, by words or by suggestions, back and forth.",
        "worldmodel demo shapes-tiny\n  worldmodel demo --server http://127.0.0.1:8000",
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help="what to serve (default: shapes-tiny)")
    parser.add_argument("--server", metavar="URL", help=f"a running server; its key stands in {KEY_VARIABLE}")
    parser.add_argument(
        "--world", metavar="NAME", help="world whose start images and actions are suggested (the model's)"
    )
    parser.add_argument("--port", type=int, help="port of the page (default: a free one from 7860)")
    args = parser.parse_args(argv)
    if args.model and args.server:
        raise ConfigError("Name a MODEL to serve or the --server that runs already, not both.")
    # Told to stop, it ends as with Ctrl-C: the server of its own must not outlive it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    try:
        from worldmodel.demo import page
    except ImportError:
        raise ConfigError("The demo needs Gradio; run `pip install 'worldmodel[demo]'`.") from None
    model = None if args.server else args.model or "shapes-tiny"
    world = args.world or (world_of(model) if model else None)
    with served(model) if model else nullcontext(args.server) as url:
        blocks = build(url, os.environ.get(KEY_VARIABLE) if args.server else None, world)
        try:
            address = page.launch(blocks, args.port, block=False)
        except OSError:
            raise ConfigError(f"Port {args.port} is taken; choose another with --port.") from None
        print(f"Open {address} in a browser; Ctrl-C ends.", flush=True)
        try:
            threading.Event().wait()
        finally:
            blocks.close(verbose=False)
    return 0


def build(client_url: str, api_key: str | None = None, world: str | None = None) -> "gr.Blocks":
    """Return the page for the server at `client_url`; `page.launch` shows it.

    Args:
        client_url: Address of the server.
        api_key: Key of the server.
        world: Name of the world whose start images and actions the page suggests.

    Raises:
        ConfigError: There is no such world.
    """
    from worldmodel.demo.page import Page
    from worldmodel.serving.client import AsyncClient

    return Page(AsyncClient(client_url, api_key), get_world(world) if world else World()).blocks


def world_of(model: str) -> str | None:
    """Return the name of a model's world."""
    from worldmodel import hub

    return hub.read_config(hub.resolve(model)).world


@contextmanager
def served(model: str) -> Iterator[str]:
    """Serve a model on a free port of this machine while the block runs; gives the address.

    Raises:
        ModelError: the server does not come up, for the reason that it tells.
    """
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    # A key in the environment would be asked of this page too; nobody else reaches this server.
    environment = {name: value for name, value in os.environ.items() if name != "WORLDMODEL_API_KEYS"}
    with (
        tempfile.TemporaryDirectory() as folder,
        (Path(folder) / "log.txt").open("w+", errors="replace") as log,
    ):
        options = ["--host", "127.0.0.1", "--port", str(port), "--data-dir", str(Path(folder) / "data")]
        # All visitors share the one name of callers without a key.
        options += ["--max-worlds-per-key", "64"]
        process = subprocess.Popen(  # noqa: S603 -- our own command
            [sys.executable, "-P", "-m", "worldmodel", "serve", model, *options],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches this process, which ends the server
        )
        try:
            print(f"Loading {model} …", flush=True)
            _await_ready(process, url, log)
            yield url
        finally:
            _stop(process)


def _await_ready(process: "subprocess.Popen[bytes]", url: str, log: IO[str]) -> None:
    from worldmodel.serving.client import Client

    until = time.monotonic() + START_S
    with Client(url, timeout_s=5) as client:
        while not client.ready():
            if process.poll() is not None:
                log.seek(0)
                told = [line for line in log.read().splitlines() if line.startswith("error: ")]
                raise ModelError(
                    told[-1].removeprefix("error: ")
                    if told
                    else "The server ended as it began; run `worldmodel serve` to see why."
                )
            if time.monotonic() > until:
                raise ModelError(
                    f"The server is not ready after {START_S:.0f} s; run `worldmodel serve` and use --server."
                )
            time.sleep(0.2)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
