"""A process that claims clips, writes their ids to a file and records results, until none is left."""

import sys
import time
from contextlib import closing
from pathlib import Path

from flow_stages import flow_config

from worldmodel.flow.catalog.catalog import Catalog
from worldmodel.flow.catalog.chain import Chain
from worldmodel.flow.catalog.claims import Claims
from worldmodel.flow.catalog.records import Result

STAGE = "read"


def open_catalog(url: str) -> Catalog:
    """Open the catalog at a URL, of a flow with one stage."""
    return Catalog(url, Chain.of(flow_config(Path("unused"), Path("unused"), {STAGE: {}})))


def work(url: str, output: Path, lease_s: float, count: int = 8, work_s: float = 0.0) -> None:
    """Write one line per claim: its clip and the number of the delivery."""
    with closing(open_catalog(url)) as catalog, output.open("a", buffering=1) as file:
        claims = Claims(catalog, STAGE, lease_s)
        with claims.kept():
            while (found := claims.wait(count, wait_s=0.2)) or catalog.waiting_for(STAGE, (-1, -1), 1):
                file.writelines(f"{claim.clip} {claim.delivery}\n" for claim in found)
                time.sleep(work_s)
                catalog.record(STAGE, [Result(claim.clip) for claim in found])


def deliveries(outputs: list[Path]) -> list[tuple[str, int]]:
    """Return the clip and the delivery of everything that was claimed."""
    lines = [line.split() for path in outputs if path.exists() for line in path.read_text().splitlines()]
    return [(clip, int(delivery)) for clip, delivery in lines]


if __name__ == "__main__":
    url, output, lease_s, count, work_s = sys.argv[1:]
    work(url, Path(output), float(lease_s), int(count), float(work_s))
