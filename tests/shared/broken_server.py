"""A server whose model breaks when a file appears: `python broken_server.py fails|hangs FILE serve ...`."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worldmodel.cli import main
from worldmodel.serving.worlds.service import WorldService


def breaks(finished: Callable[..., Any], how: str, flag: Path) -> Callable[..., Any]:
    """Return the last call of a round, which fails or never returns once the flag is there."""

    def finish(service: WorldService, rows: Any) -> Any:
        if flag.exists():
            if how == "hangs":
                time.sleep(1e6)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return finished(service, rows)

    return finish


if __name__ == "__main__":
    WorldService._finished = breaks(WorldService._finished, sys.argv[1], Path(sys.argv[2]))  # type: ignore[method-assign]
    sys.exit(main(sys.argv[3:]))
