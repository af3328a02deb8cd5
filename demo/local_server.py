"""The server of one model that the demo starts for itself, in a process of its own."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from worldmodel.demo.access import is_reachable
from worldmodel.errors import ModelError
from worldmodel.processes import end

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 40.0


@contextmanager
def served(
    model: str, host: str = "127.0.0.1", key: str | None = None, device: str | None = None
) -> "Iterator[LocalServer]":
    """Serve a model on a free port during the block, again if the server ends; yields the server.

    Raises:
        ModelError: the server does not start; the message is the server's own.
    """
    with tempfile.TemporaryDirectory() as folder:
        server = LocalServer(model, Path(folder), host, key, device)
        try:
            print(f"Loading {model} …", flush=True)
            server.start()
            threading.Thread(target=server.watch, daemon=True).start()
            yield server
        finally:
            server.stop()


class LocalServer:
    """A server of one model in a process of its own, which is started again when it ends by itself."""

    def __init__(
        self,
        model: str,
        folder: Path,
        host: str = "127.0.0.1",
        key: str | None = None,
        device: str | None = None,
    ) -> None:
        """Prepare the server of a model, which writes into `folder`; with a key, it requires that one.

        `device` is that of this and of later models; None takes CUDA where there is one.
        """
        self.model, self.host, self.key, self.device = model, host, key, device
        self.port = _free_port(host)
        # This process reaches a server of every address by the loopback one.
        local = host in ("0.0.0.0", "::") or not is_reachable(host)  # noqa: S104
        self.url = f"http://{'127.0.0.1' if local else host}:{self.port}"
        self.log = folder / "log.txt"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._starting = threading.RLock()
        """Held while a process takes the place of another."""

    @property
    def command(self) -> list[str]:
        """Command that serves the model, with a data folder of its own."""
        data = tempfile.mkdtemp(dir=self._folder)
        options = ["--host", self.host, "--port", str(self.port), "--data-dir", data]
        # All visitors of the page count as one caller.
        options += ["--max-worlds-per-key", "64"]
        if self.device is not None:
            options += ["--device", self.device]
        return [sys.executable, "-P", "-m", "worldmodel", "serve", self.model, *options]

    def start(self) -> None:
        """Start the process and wait until the server is ready."""
        environment = {name: value for name, value in os.environ.items() if name != "WORLDMODEL_API_KEYS"}
        if self.key is not None:
            environment["WORLDMODEL_API_KEYS"] = self.key
        with self._starting:
            if self._stopping.is_set():
                return
            with self.log.open("w", errors="replace") as log:
                self._process = subprocess.Popen(  # noqa: S603 -- this package's own command
                    self.command,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,  # Ctrl-C reaches only this process, which then stops the server
                )
            self._await_ready(self._process)

    def switch(self, model: str) -> None:
        """Serve another model instead: the process of the one before ends first, and frees its memory.

        Raises:
            ModelError: the other one cannot be served; the one before is served again.
        """
        with self._starting:
            assert self._process is not None
            before, self.model = self.model, model
            end(self._process, STOP_TIMEOUT_S)
            try:
                self.start()
            except ModelError:
                self.model = before
                self.start()
                raise

    def watch(self) -> None:
        """Start the server again whenever it ends; without success, interrupt this process."""
        while not self._stopping.is_set():
            process = self._process
            assert process is not None
            code = process.wait()
            with self._starting:
                if self._stopping.is_set():
                    return
                if process is not self._process:
                    continue  # another world has taken its place
                print(f"The server has ended (exit code {code}) and is started again.", flush=True)
                try:
                    self.start()
                except ModelError as error:
                    print(f"error: {error}", file=sys.stderr, flush=True)
                    os.kill(os.getpid(), signal.SIGINT)
                    return

    def stop(self) -> None:
        """End the process, also one that is being started."""
        self._stopping.set()
        with self._starting:
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


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
