"""Versions of the database's schema."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, inspect, text

from worldmodel.flow.database import missing, shown, transaction
from worldmodel.flow.errors import FlowError
from worldmodel.flow.schema import metadata

FOLDER = Path(__file__).parent
VERSION_TABLE = "worldmodel_version"
LOCK = 5_171_802_011
"""Number of the advisory lock under which PostgreSQL's schema is changed."""


def migrate(engine: Engine, create: bool = True) -> None:
    """Create the tables of an empty database, or bring those of an earlier version up to date.

    Args:
        engine: the database.
        create: whether tables are created in an empty one.

    Raises:
        FlowError: a newer version wrote the schema, its tables are those of another program, or it is empty
            and not to be filled.
    """
    transaction(engine, lambda connection: _migrate(connection, create))


def _migrate(connection: Connection, create: bool) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
    config = Config()
    config.set_main_option("script_location", str(FOLDER).replace("%", "%%"))
    config.attributes["connection"] = connection
    scripts = ScriptDirectory.from_config(config)
    found = MigrationContext.configure(
        connection, opts={"version_table": VERSION_TABLE}
    ).get_current_revision()
    known = {script.revision for script in scripts.walk_revisions()}
    database = shown(connection.engine)
    if found is None:
        if taken := sorted(set(inspect(connection).get_table_names()) & set(metadata.tables)):
            raise FlowError(
                f"The database {database} has a table {taken[0]!r} of another program; use another database."
            )
        if not create:
            raise missing(connection.engine.url)
        metadata.create_all(connection, checkfirst=False)
        command.stamp(config, "head")
    elif found not in known:
        raise FlowError(
            f"The database {database} has the schema {found!r} of a newer version; update worldmodel."
        )
    elif found != scripts.get_current_head():
        command.upgrade(config, "head")
