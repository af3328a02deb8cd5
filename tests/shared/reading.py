"""Notes which files of the repository a Python process opens, and which folders it lists.

`record.py` copies this file as `sitecustomize.py` into a folder of its own and puts that on the path of
the process of a test file. Python then imports it at the start of that process, and of all Python
processes that it starts, also of those that get none of its other variables. Beside the copy lie
`root`, the folder that counts, and the notes.

Imported modules are files that were opened. What other programs open is not seen, except files of their
command line.
"""

import os
import sys
from contextlib import suppress
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
NOTES = os.path.join(FOLDER, "read")
LISTS = ("os.listdir", "os.scandir")
IMPORTS = "<frozen importlib._bootstrap_external>"


def watch(root: str) -> None:
    """Note from now on what this process, and what it forks, reads below a folder."""
    noted: set[str] = set()

    def note(path: Any, mark: str = "") -> None:
        # A process opens its own files by number, and a test's own folders by other paths.
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        # The sandbox of the decoder can open no file, so no notes either; a test may remove its folder.
        with suppress(OSError):
            name = os.path.abspath(os.fsdecode(path)) + mark
            if name in noted or not name.startswith(root):
                return
            noted.add(name)
            # Written at once, because processes are killed, and opened anew, because tests count open files.
            file = os.open(NOTES, os.O_WRONLY | os.O_APPEND)
            os.write(file, os.fsencode(name) + b"\n")
            os.close(file)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            note(arguments[0])
        elif event in LISTS and sys._getframe(1).f_code.co_filename != IMPORTS:
            note(arguments[0] or ".", "/")
        elif event == "subprocess.Popen" and not isinstance(arguments[1], (str, bytes)):
            for argument in arguments[1]:
                note(argument)

    sys.addaudithook(hook)


if __name__ == "sitecustomize":
    with open(os.path.join(FOLDER, "root"), encoding="utf-8") as file:
        watch(file.read())
