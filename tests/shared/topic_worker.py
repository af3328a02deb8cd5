"""A process that claims messages, writes their keys to a file and acknowledges them, until none is left."""

import sys
import time
from pathlib import Path

from worldmodel.flow.topics import open_topic


def work(url: str, name: str, output: Path, lease_s: float, count: int = 8, work_s: float = 0.0) -> None:
    """Write one line per delivered message: its key and the number of the attempt."""
    topic = open_topic(url, name)
    with output.open("a", buffering=1) as file:
        while (claims := topic.claim(count, lease_s, wait_s=0.2)) or topic.depth():
            file.writelines(f"{claim.message.key} {claim.attempt}\n" for claim in claims)
            time.sleep(work_s)
            topic.ack(claims)
    topic.close()


def deliveries(outputs: list[Path]) -> list[tuple[str, int]]:
    """Return the key and the attempt of everything that was delivered."""
    lines = [line.split() for path in outputs if path.exists() for line in path.read_text().splitlines()]
    return [(key, int(attempt)) for key, attempt in lines]


if __name__ == "__main__":
    url, name, output, lease_s, count, work_s = sys.argv[1:]
    work(url, name, Path(output), float(lease_s), int(count), float(work_s))
