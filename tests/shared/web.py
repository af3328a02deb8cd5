"""A local HTTP server whose paths behave as servers of the internet do, well or badly."""

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[["Exchange"], None]


class Exchange(BaseHTTPRequestHandler):
    """One request; `pages` of the server maps paths to functions that answer."""

    protocol_version = "HTTP/1.1"
    server: "Web"

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.server.asked.append((path, dict(self.headers)))
        self.number = self.server.counts[path]
        self.server.counts[path] += 1
        with suppress(ConnectionError):  # the client had enough
            self.server.pages.get(path, status(404))(self)

    def reply(self, code: int, data: bytes = b"", **headers: str) -> None:
        """Send a whole response."""
        self.head(code, **{"Content-Length": str(len(data)), **headers})
        self.wfile.write(data)

    def head(self, code: int, **headers: str) -> None:
        """Send a status and headers; `_` in a name is `-`."""
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def handle(self) -> None:
        with suppress(ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        pass


class Web(ThreadingHTTPServer):
    """The server; `asked` lists paths and headers of the requests."""

    daemon_threads = True

    def __init__(self, host: str = "127.0.0.1") -> None:
        super().__init__((host, 0), Exchange)
        self.pages: dict[str, Answer] = {}
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.counts: Counter[str] = Counter()
        self.closing = threading.Event()

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.server_address[1]}{path}"


@contextmanager
def served(ip: str = "127.0.0.1", /, **pages: Answer) -> Iterator[Web]:
    """Run a server with pages: `name` is at `/name`."""
    with Web(ip) as web:
        web.pages = {f"/{name}": answer for name, answer in pages.items()}
        thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield web
        finally:
            web.closing.set()
            web.shutdown()
            thread.join()


def status(code: int, **headers: str) -> Answer:
    return lambda exchange: exchange.reply(code, **headers)


def content(data: bytes, **headers: str) -> Answer:
    """Answer with a file, without support of byte ranges."""
    return lambda exchange: exchange.reply(200, data, **headers)


def ranges(data: bytes, breaks_after: int = 0, etag: str = '"v1"') -> Answer:
    """Answer with byte ranges of a file; the connection breaks after so many bytes."""

    def answer(exchange: Exchange) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", exchange.headers.get("Range", ""))
        matches = exchange.headers.get("If-Range", etag) == etag
        start, end = (
            (int(found[1]), int(found[2] or len(data) - 1)) if found and matches else (0, len(data) - 1)
        )
        end = min(end, len(data) - 1)
        headers = {"Content-Length": str(end + 1 - start), "ETag": etag}
        if found and matches:
            exchange.head(206, Content_Range=f"bytes {start}-{end}/{len(data)}", **headers)
        else:
            exchange.head(200, **headers)
        exchange.wfile.write(data[start : end + 1][: breaks_after or None])
        exchange.close_connection = True

    return answer


def drip(start: bytes, pause_s: float) -> Answer:
    """Answer with a byte now and then, without end (slow loris)."""

    def answer(exchange: Exchange) -> None:
        exchange.head(200, Transfer_Encoding="chunked")
        for byte in [*start] * 10_000:
            exchange.wfile.write(b"1\r\n%c\r\n" % byte)
            exchange.wfile.flush()
            if exchange.server.closing.wait(pause_s):
                return

    return answer


def endless(start: bytes) -> Answer:
    """Answer with bytes without end, as fast as they are read."""

    def answer(exchange: Exchange) -> None:
        exchange.head(200, Transfer_Encoding="chunked")
        block = start + bytes(65_536)
        while not exchange.server.closing.is_set():
            exchange.wfile.write(b"%x\r\n%s\r\n" % (len(block), block))

    return answer
