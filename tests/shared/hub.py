"""A local HTTP server that answers as the Hub does to those who read the files of a dataset."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0" * 39 + "1"
DATASET = "owner/name"


class _Exchange(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "Hub"

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        path, options = unquote(address.path), parse_qs(address.query)
        api, resolve = f"/api/datasets/{DATASET}", f"/datasets/{DATASET}/resolve/"
        if path.startswith(f"{api}/tree/"):
            revision, _, folder = path.removeprefix(f"{api}/tree/").partition("/")
            self.server.revisions.add(revision)
            self._tree(folder or ".", options["recursive"] == ["true"])
        elif path.startswith(resolve):
            revision, _, name = path.removeprefix(resolve).partition("/")
            self.server.revisions.add(revision)
            self._file(name)
        elif path.startswith(api):
            self._json({"id": DATASET, "sha": COMMIT, "siblings": []})
        else:
            self._send(404, b"", **{"X-Error-Code": "RepoNotFound"})

    def do_HEAD(self) -> None:
        self.do_GET()

    def _tree(self, folder: str, recursive: bool) -> None:
        files = {name: {"type": "file", "size": len(data)} for name, data in self.server.files.items()}
        parents = {str(parent) for name in files for parent in PurePosixPath(name).parents} - {"."}
        entries: dict[str, Any] = {**{name: {"type": "directory"} for name in parents}, **files}
        inside = [
            {"path": name, "oid": name, **entry}
            for name, entry in entries.items()
            if folder in list(map(str, PurePosixPath(name).parents))[: None if recursive else 1]
        ]
        self._json(inside) if inside else self._file(folder)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), **{"Content-Type": "application/json"})

    def _file(self, name: str) -> None:
        data = self.server.files.get(name)
        if data is None:
            return self._send(404, b"", **{"X-Error-Code": "EntryNotFound"})
        if not (asked := self.headers.get("Range")):
            return self._send(200, data)
        self.server.reads.append((name, asked))
        first, _, last = asked.removeprefix("bytes=").partition("-")
        part = data[int(first) : int(last) + 1 if last else None]
        found = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
        return self._send(206, part, **{"Content-Range": found})

    def _send(self, code: int, data: bytes, **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(data)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Hub(ThreadingHTTPServer):
    """The server of one dataset, by the paths of its files; it keeps what it was asked for."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Exchange)
        self.files = files
        self.reads: list[tuple[str, str]] = []
        """Files and the ranges of bytes that were read of them."""
        self.revisions: set[str] = set()
        self.endpoint = f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serve_hub(files: dict[str, bytes]) -> Iterator[Hub]:
    """Serve the files of a dataset until the context ends."""
    server = Hub(files)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
