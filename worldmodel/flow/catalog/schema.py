"""Tables of a flow's catalog, for SQLite and PostgreSQL."""

from pathlib import Path

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Connection,
    Double,
    Engine,
    Float,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    inspect,
    select,
)

from worldmodel.database import lock_schema, shown, transaction
from worldmodel.flow.errors import FlowError
from worldmodel.leases import lease_columns

VERSION = 2
"""Of the schema; it rises whenever a table changes. A catalog of another version is refused."""

metadata = MetaData()

clip = Table(
    "clip",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("source", String(128), nullable=False),
    Column("ordinal", BigInteger, nullable=False),  # position in the order of listing, over all sources
    Column("sub", Integer, nullable=False, default=0),  # position among the clips made of the same one
    Column("parent", String(64)),
    Column("address", Text, nullable=False),
    Column("licence", Text, nullable=False, default=""),
    Column("start_s", Float),
    Column("end_s", Float),
    Column("row", JSON, nullable=False, default=dict),  # what its source says: text, actions, provenance
    # The stage that it waits for, or `packed`, `dropped`, `dead`, `divided` or `replaced`.
    Column("state", String(64), nullable=False),
    Column("listed_at", Float, nullable=False),
    # The worker that works on it in this stage, and how many have; see claims.py.
    Column("holder", String(128)),
    Column("delivery", Integer, nullable=False, default=0),
    # Further attempts in this stage, each of the clip alone (the first one was made in a batch), and why the
    # last one failed.
    Column("attempts", Integer, nullable=False, default=0),
    Column("reason", Text),
    # Set while it waits for another attempt, in seconds since 1970 of the database's clock.
    Column("delayed_since", Double),
    Column("delayed_until", Double),
    Index("clip_order", "ordinal", "sub"),
    # Claims read its first entries, and no index has what they write: PostgreSQL then updates a row in
    # place, if its page has room.
    Index("clip_state", "state", "ordinal", "sub"),
    Index("clip_parent", "parent"),
    # Rows change several times in each stage; the default waits until a fifth of the table is dead.
    postgresql_with={"fillfactor": 80, "autovacuum_vacuum_scale_factor": 0.02},
)

outcome = Table(
    "outcome",
    metadata,
    Column("clip", String(64), primary_key=True),
    Column("stage", String(64), primary_key=True),
    Column("key", String(64), primary_key=True),
    Column("state", String(16), nullable=False),  # done, dropped or dead
    Column("reason", Text),
    Column("fields", JSON, nullable=False, default=dict),  # columns that are not binary
    Column("place", Text),  # of the binary columns in the buffer
    Column("seconds", Float, nullable=False, default=0.0),
    Column("finished_at", Float, nullable=False),
    Index("outcome_state", "stage", "key", "state", "finished_at"),
)

tally = Table(  # sums of outcomes, one row per worker: counting ten million rows takes seconds
    "tally",
    metadata,
    Column("stage", String(64), primary_key=True),
    Column("key", String(64), primary_key=True),
    Column("owner", String(128), primary_key=True),
    Column("done", BigInteger, nullable=False, default=0),
    Column("dropped", BigInteger, nullable=False, default=0),
    Column("dead", BigInteger, nullable=False, default=0),
    Column("retried", BigInteger, nullable=False, default=0),
    Column("added", BigInteger, nullable=False, default=0),  # clips that it made (split) or listed
    Column("seconds", Float, nullable=False, default=0.0),
    Column("updated_at", Float, nullable=False),
)

segment = Table(
    "segment",
    metadata,
    Column("key", String(64), primary_key=True),  # of the chain of stages
    Column("number", Integer, primary_key=True),
    Column("name", Text, nullable=False),
    Column("num_clips", Integer, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("last_ordinal", BigInteger, nullable=False),
    Column("last_sub", Integer, nullable=False),
    Column("index", JSON, nullable=False),  # what the segment's .json file holds
    Column("sealed_at", Float, nullable=False),
    Index("segment_sums", "key", "sealed_at", "num_clips"),  # the status reads nothing else of them
)

band = Table(  # parts of the fingerprints of packed clips; see duplicates.py
    "band",
    metadata,
    Column("key", String(64), primary_key=True),  # of the chain of stages
    Column("number", Integer, primary_key=True),
    Column("value", BigInteger, primary_key=True, autoincrement=False),
    Column("clip", String(64), primary_key=True),
)

listing = Table(
    "listing",
    metadata,
    Column("source", String(128), primary_key=True),
    Column("position", Integer, nullable=False),  # its place in the config
    Column("rows", BigInteger, nullable=False, default=0),  # rows of the source that are listed
    Column("finished", Integer, nullable=False, default=0),
    Column("bookmark", JSON),  # where its listing goes on, without reading over what is listed
    Column("digest", String(64)),  # of the settings that say what the source is
)

identity = Table(  # one row
    "identity",
    metadata,
    Column("one", Integer, primary_key=True, autoincrement=False),
    Column("name", String(64), nullable=False),  # what no other catalog is called: flows can share a broker
    Column("admitted", BigInteger, nullable=False, default=-1),  # clips up to this ordinal may be claimed
)

run = Table(
    "run",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("key", String(64), nullable=False),
    Column("host", String(255), nullable=False),
    Column("pid", Integer, nullable=False),
    Column("stages", JSON, nullable=False),  # names and keys, in order
    Column("started_at", Float, nullable=False),
    Column("error", Text),  # of one that has failed
)

lease = Table(
    "lease",
    metadata,
    *lease_columns(),
    Column("stage", String(64)),  # what the worker runs, or `pack` if it feeds; none of runs
    Column("host", String(255)),
)
"""Of workers, whose clips name them, and of runs."""

version = Table(
    "worldmodel_version",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=False),
)


def open_schema(engine: Engine, create: bool = True) -> None:
    """Create the tables in an empty database, or check that they are those of this version.

    Args:
        engine: the database.
        create: whether tables are created in an empty one.

    Raises:
        FlowError: another version wrote the schema, its tables are those of another program, or it is empty
        and
            not to be filled.
        DatabaseError: the database cannot be used.
    """
    file = engine.url.database if engine.dialect.name == "sqlite" else None
    if not create and file is not None and not Path(file).is_file():
        raise _missing(engine)  # connecting would create it
    transaction(engine, lambda db: _open(db, create))


def _open(db: Connection, create: bool) -> None:
    lock_schema(db)  # several processes may open an empty database at once
    database, found = shown(db.engine), set(inspect(db).get_table_names())
    if version.name in found:
        number = db.execute(select(version.c.number)).scalar_one()
        if number != VERSION:
            raise FlowError(
                f"The database {database} has the schema {number} of another version of worldmodel, and this "
                f"one has {VERSION}; use that version, or another database."
            )
        return
    if taken := sorted(found & set(metadata.tables)):
        raise FlowError(
            f"The database {database} has a table {taken[0]!r} of another program; use another database."
        )
    if not create:
        raise _missing(db.engine)
    metadata.create_all(db, checkfirst=False)
    db.execute(version.insert().values(number=VERSION))


def _missing(engine: Engine) -> FlowError:
    return FlowError(
        f"There is no catalog in {shown(engine)}; start the flow first: worldmodel flow run CONFIG."
    )
