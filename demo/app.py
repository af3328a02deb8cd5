"""The web page of `worldmodel demo`, and the server that is started for it if none is given.

The page is a client of the HTTP API: it listens on this machine only and loads no model.
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
from typing import TYPE_CHECKING

from worldmodel import signals
from worldmodel.errors import ConfigError, ModelError, pip_install
from worldmodel.processes import end
from worldmodel.worlds import World, get_world

if TYPE_CHECKING:
    import gradio as gr

    from worldmodel.config.flow import FlowConfig
    from worldmodel.demo.flow_reader import FlowReader

KEY_VARIABLE = "WORLDMODEL_API_KEY"
"""Environment variable with the API key of a running server; other users could read an argument."""
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 40.0


def _interrupt(number: int) -> None:
    raise KeyboardInterrupt


# SIGTERM ends the demo as Ctrl-C does, so that its own server does not outlive it.
@signals.handled(_interrupt, [signal.SIGTERM])
def run(
    model: str | None = None,
    server: str | None = None,
    port: int | None = None,
    world: str | None = None,
    flow: "FlowConfig | None" = None,
) -> None:
    """Show the page until interrupted, for a running server or for one started with `model`.

    Args:
        model: Name or folder of the model to serve; None uses `server`.
        server: URL of a running server.
        port: Port of the page; None takes a free one.
        world: World whose actions are suggested; None takes that of `model`, and none for a `server`.
        flow: Flow whose clips a tab of the page shows.

    Raises:
        ConfigError: Gradio is not installed, or the port is in use.
        FlowError: the flow was not started yet.
        ModelError: the server for `model` does not start.
    """
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    try:
        from worldmodel.demo import page
    except ImportError:
        raise ConfigError(f"`worldmodel demo` needs Gradio; run {pip_install('demo')}.") from None
    if model and not world:
        from worldmodel.models.loading import model_folder

        world = model_folder.read_config(model_folder.resolve(model)).world
    reader = None
    if flow is not None:
        from worldmodel.demo.flow_reader import FlowReader

        reader = FlowReader(flow)
    with served(model) if model else nullcontext(server or "") as url:
        key = None if model else os.environ.get(KEY_VARIABLE)
        blocks = build(url, key, world, reader, restarts=model is not None)
        try:
            address = page.launch(blocks, port)
        except OSError:
            raise ConfigError(f"Port {port} is in use; choose another with --port.") from None
        print(f"Open {address} in a browser; press Ctrl-C to stop.", flush=True)
        try:
            while True:  # a signal delivered to another thread does not interrupt a wait without a timeout
                time.sleep(1)
        finally:
            blocks.close(verbose=False)


def build(
    client_url: str,
    api_key: str | None = None,
    world: str | None = None,
    flow: "FlowReader | None" = None,
    restarts: bool = False,
) -> "gr.Blocks":
    """Return the page for the server at `client_url`, which is started again if it `restarts`."""
    from worldmodel.demo.page import Page
    from worldmodel.serving.client import AsyncClient

    catalog = get_world(world) if world else World()
    return Page(AsyncClient(client_url, api_key), catalog, flow, restarts).blocks


@contextmanager
def served(model: str) -> Iterator[str]:
    """Serve a model on a free local port during the block, again if the server ends; yields its URL.

    Raises:
        ModelError: the server does not start; the message is the server's own.
    """
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        options = ["--host", "127.0.0.1", "--port", str(port), "--data-dir", str(Path(folder) / "data")]
        # All visitors of the page count as one caller without a key.
        options += ["--max-worlds-per-key", "64"]
        command = [sys.executable, "-P", "-m", "worldmodel", "serve", model, *options]
        server = LocalServer(command, f"http://127.0.0.1:{port}", Path(folder) / "log.txt")
        try:
            print(f"Loading {model} …", flush=True)
            server.start()
            threading.Thread(target=server.watch, daemon=True).start()
            yield server.url
        finally:
            server.stop()


class LocalServer:
    """A server in a process of its own, which is started again when it ends by itself."""

    def __init__(self, command: list[str], url: str, log: Path) -> None:
        """Prepare the server that `command` starts at `url`; its output goes to `log`."""
        self.command, self.url, self.log = command, url, log
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()

    def start(self) -> None:
        """Start the process and wait until the server is ready."""
        # The server is local and private; with keys in its environment it would require one from this page.
        environment = {name: value for name, value in os.environ.items() if name != "WORLDMODEL_API_KEYS"}
        with self.log.open("w", errors="replace") as log:
            self._process = subprocess.Popen(  # noqa: S603 -- this package's own command
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches only this process, which then stops the server
            )
        self._await_ready(self._process)

    def watch(self) -> None:
        """Start the server again whenever it ends; without success, interrupt this process."""
        while not self._stopping.is_set():
            assert self._process is not None
            code = self._process.wait()
            if self._stopping.is_set():
                return
            print(f"The server has ended (exit code {code}) and is started again.", flush=True)
            try:
                self.start()
                if self._stopping.is_set():
                    self.stop()
            except ModelError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGINT)
                return

    def stop(self) -> None:
        """End the process."""
        self._stopping.set()
        if self._process is not None:
            end(self._process, STOP_TIMEOUT_S)

    def _await_ready(self, process: "subprocess.Popen[bytes]") -> None:
        from worldmodel.serving.client import Client

        deadline = time.monotonic() + START_TIMEOUT_S
        with Client(self.url, timeout_s=5) as client:
            while not client.ready() and not self._stopping.is_set():
                if process.poll() is not None:
                    said = "The server exited during startup; run `worldmodel serve` to see why."
                    for line in self.log.read_text(errors="replace").splitlines():
                        if line.startswith("error: "):
                            said = line.removeprefix("error: ")
                    raise ModelError(said)
                if time.monotonic() > deadline:
                    raise ModelError(
                        f"The server was not ready after {START_TIMEOUT_S:.0f} s; run `worldmodel serve` and "
                        "pass its URL as --server."
                    )
                time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
