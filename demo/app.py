"""The web page of `worldmodel demo`, and the server that is started for it if none is given.

The page is a client of the HTTP API and loads no model. A server that is started for it has one model at a
time: another world takes the place of the one before, whose process ends first.
"""

import os
import signal
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

from worldmodel import signals
from worldmodel.demo.access import address_of, is_reachable, new_key, qr_code
from worldmodel.demo.local_server import LocalServer, served
from worldmodel.errors import ConfigError, pip_install
from worldmodel.worlds import get_world

if TYPE_CHECKING:
    import gradio as gr

    from worldmodel.config.flow import FlowConfig
    from worldmodel.demo.flow_reader import FlowReader

KEY_VARIABLE = "WORLDMODEL_API_KEY"
"""Environment variable with the API key of a running server; other users could read an argument."""


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
    host: str = "127.0.0.1",
    device: str | None = None,
) -> None:
    """Show the page until interrupted, for a running server or for one started with `model`.

    Args:
        model: Name or folder of the model to serve; None uses `server`.
        server: URL of a running server.
        port: Port of the page; None takes a free one.
        world: World whose actions are suggested; None takes that of `model`, and none for a `server`.
        flow: Flow whose clips a tab of the page shows.
        host: Address at which the page listens. Where other machines reach it, the page asks for a key, and
            the server of `model` listens there, too.
        device: Device of `model`; None takes CUDA where there is one.

    Raises:
        ConfigError: Gradio is not installed, the port is in use, or the key is too short.
        FlowError: the flow was not started yet.
        ModelError: the server for `model` does not start.
    """
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    try:
        from worldmodel.demo import page
    except ImportError:
        raise ConfigError(f"`worldmodel demo` needs Gradio; run {pip_install('demo')}.") from None
    access = new_key() if is_reachable(host) else None
    reader = None
    if flow is not None:
        from worldmodel.demo.flow_reader import FlowReader

        reader = FlowReader(flow)
    with served(model, host, access, device) if model else nullcontext(None) as own:
        if own is not None:
            blocks = build(own.url, access, world, reader, own)
        else:
            blocks = build(server or "", os.environ.get(KEY_VARIABLE), world, reader)
        try:
            address = page.launch(blocks, port, host, access)
        except OSError:
            raise ConfigError(f"Port {port} is in use; choose another with --port.") from None
        if access is not None:
            address = address_of(host, int(address.rstrip("/").rpartition(":")[2]), access)
            print(qr_code(address), flush=True)
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
    own: LocalServer | None = None,
) -> "gr.Blocks":
    """Return the page for the server at `client_url`; an `own` one is started again, also with other models.

    `world` names the world whose actions are suggested; None takes that of the own server's model.
    """
    from worldmodel.demo.page import Page
    from worldmodel.serving.client import AsyncClient

    catalog = get_world(world) if world else None
    return Page(AsyncClient(client_url, api_key), catalog, flow, own).blocks
