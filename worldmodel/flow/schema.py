"""Tables of the flow's database, for SQLite and PostgreSQL: the catalog, and the messages of SQL topics.

A change of a released table needs a revision in `migrations/versions`.
"""

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Float,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)

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
    Index("clip_order", "ordinal", "sub"),
    Index("clip_state", "state", "ordinal", "sub"),
    Index("clip_parent", "parent"),
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

attempt = Table(  # further attempts at clips, each alone: the first one was made in a batch
    "attempt",
    metadata,
    Column("clip", String(64), primary_key=True),
    Column("stage", String(64), primary_key=True),
    Column("key", String(64), primary_key=True),
    Column("number", Integer, nullable=False),
    Column("reason", Text),  # of the last failure
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

identity = Table(  # one row: what no other catalog is called, so that flows can share a broker
    "identity",
    metadata,
    Column("one", Integer, primary_key=True, autoincrement=False),
    Column("name", String(64), nullable=False),
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
    Column("seen_at", Float, nullable=False),
    Column("error", Text),
)

message = Table(
    "message",
    metadata,
    Column("topic", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("ordinal", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False, default=0),
    # Set while it is claimed or delayed, in seconds since 1970 of the database's clock; null while it waits.
    Column("hidden_since", Float),
    Column("hidden_until", Float),
    Column("owner", Text),
    # Rows are deleted as fast as they come; the default waits until a fifth of the table is dead.
    postgresql_with={"autovacuum_vacuum_scale_factor": 0.02},
)
_waits = message.c.hidden_until.is_(None)
for name, condition, columns in (
    ("message_waiting", _waits, ("ordinal", "key")),
    ("message_hidden_until", ~_waits, ("hidden_until",)),
    ("message_hidden_since", ~_waits, ("hidden_since",)),
):
    Index(
        name, message.c.topic, *(message.c[column] for column in columns),
        sqlite_where=condition, postgresql_where=condition,
    )  # fmt: skip
