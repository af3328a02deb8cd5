"""Start a server, and steer two worlds through its client."""

import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from worldmodel import Client

ROOT = Path(__file__).parents[1]

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
address = f"http://127.0.0.1:{port}"
with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, "-m", "worldmodel", "serve", "shapes-tiny", "--port", str(port)]
    server = subprocess.Popen([*command, "--data-dir", folder])
    try:
        for _ in range(240):
            try:
                if httpx.get(f"{address}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        with (
            Client(address) as client,
            client.worlds.create(ROOT / "demo" / "first_frame.png", seed=0) as world,
        ):
            print(world.step("the red ball moves right").frames.shape)
            other = world.fork()
            world.step({"keys": ["blue", "explode"]})
            other.step("the blue box turns green")
            print(world.describe(), "|", other.describe(), sep="\n")
    finally:
        server.terminate()
        server.wait(30)
