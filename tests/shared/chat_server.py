"""A chat endpoint whose answers are the colours that it sees, and which can be told to fail."""

import base64
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from worldmodel import media

Fault = Callable[["Exchange", int], bool]
"""Gets an exchange and the number of the request, and returns whether it has answered."""


class ChatServer(ThreadingHTTPServer):
    """The server; `asked` lists the bodies of all requests."""

    daemon_threads = True

    def __init__(self, fault: Fault) -> None:
        super().__init__(("127.0.0.1", 0), Exchange)
        self.fault, self.lock = fault, threading.Lock()
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.busy = self.busiest = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Exchange(BaseHTTPRequestHandler):
    server: ChatServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            number = len(self.server.asked)
            self.server.asked.append(body)
            self.server.keys.add(self.headers.get("Authorization", ""))
            self.server.busy += 1
            self.server.busiest = max(self.server.busiest, self.server.busy)
        try:
            if not self.server.fault(self, number):
                self.complete(answer(body))
        finally:
            with self.server.lock:
                self.server.busy -= 1

    def complete(self, text: str) -> None:
        """Send a completion."""
        message = {"role": "assistant", "content": text}
        self.send({"choices": [{"message": message}], "usage": {"total_tokens": 10}})

    def send(self, content: Any, status: int = 200, **headers: str) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def answer(body: dict[str, Any]) -> str:
    """Name the colours that a message shows, or those of its notes; in JSON where it asks for it."""
    parts = body["messages"][0]["content"]
    text = " ".join(part["text"] for part in parts if part["type"] == "text")
    seen = [name for part in parts if part["type"] != "text" for name in colours(part)]
    if not seen:
        seen = re.findall(r"\] (?:from \w+ to )?(\w+)", text)
    if "response_format" not in body:
        return seen[0] if len(seen) == 1 else f"from {seen[0]} to {seen[-1]}"
    events = [
        {
            "start": i,
            "end": i + 1,
            "text": f"It turns {name}.",
            "actor": "the frame",
            "action": f"turn {name}",
        }
        for i, name in enumerate(seen)
    ]
    caption = ", then ".join(seen)
    return json.dumps({"caption": caption, "camera_motion": "static", "events": events})


def colours(part: dict[str, Any]) -> list[str]:
    """Return the colours of an image's or a video's frames, each once."""
    kind = part["type"]
    data = base64.b64decode(part[kind]["url"].split(",", 1)[1])
    frames = [frame for _, frame in media.sample_frames(data, None, 1024)]
    cells = [
        cell for frame in frames for row in np.array_split(frame, 4) for cell in np.array_split(row, 4, 1)
    ]
    means = [cell.reshape(-1, 3).mean(axis=0) for cell in cells]
    return list(
        dict.fromkeys(("red", "green", "blue")[int(mean.argmax())] for mean in means if mean.max() > 99)
    )


@contextmanager
def chat_server(fault: Fault = lambda exchange, number: False) -> Iterator[ChatServer]:
    """Run a server during the block."""
    with ChatServer(fault) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
