"""Firefox, headless, by WebDriver BiDi: Playwright drives only a Firefox of its own."""

import json
import re
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from websockets.sync.client import connect

ANSWERS_WITHIN_S = 120.0


class Firefox:
    """A browser with one tab.

    Source: https://www.w3.org/TR/webdriver-bidi/
    """

    def __init__(self, executable: str, profile: Path) -> None:
        command = [executable, "--headless", "--no-remote", "--profile", str(profile)]
        self.process = subprocess.Popen(
            [*command, "--remote-debugging-port", "0"],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stderr is not None
        lines = (re.search(r"WebDriver BiDi listening on (ws://\S+)", line) for line in self.process.stderr)
        found = next(filter(None, lines), None)
        assert found is not None, "Firefox did not start"
        self.socket = connect(f"{found[1]}/session", max_size=None)
        self.count = 0
        self.send("session.new", capabilities={})
        self.tab = self.send("browsingContext.getTree")["contexts"][0]["context"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()
        self.process.terminate()
        self.process.wait(timeout=60)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command; return its result."""
        self.count += 1
        self.socket.send(json.dumps({"id": self.count, "method": method, "params": params}))
        while True:  # events come between
            answer = json.loads(self.socket.recv(timeout=ANSWERS_WITHIN_S))
            if answer.get("id") == self.count:
                assert answer["type"] == "success", answer
                return answer["result"]

    def goto(self, address: str) -> None:
        """Load a page."""
        self.send("browsingContext.navigate", context=self.tab, url=address, wait="complete")

    def evaluate(self, function: str, argument: Any = None) -> Any:
        """Call a JavaScript function with a JSON value; return what it gives as one."""
        answer = self.send(
            "script.evaluate",
            expression=f"Promise.resolve(({function})({json.dumps(argument)})).then(JSON.stringify)",
            target={"context": self.tab},
            awaitPromise=True,
        )
        assert answer["type"] == "success", answer["exceptionDetails"]["text"]
        return json.loads(answer["result"].get("value", "null"))
