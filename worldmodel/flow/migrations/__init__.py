"""Versions of the database's schema."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, inspect

from worldmodel.database import lock_schema, shown, transaction
from worldmodel.flow.errors import FlowError
from worldmodel.flow.schema import metadata

FOLDER = Path(__file__).parent
VERSION_TABLE = "worldmodel_version"


def migrate(engine: Engine, create: bool = True) -> None:
    """Create the tables of an empty database, or bring those of an earlier version up to date.

    Args:
        engine: the database.
        create: whether tables are created in an empty one.

    Raises:
        FlowError: a newer version wrote the schema, its tables are those of another program, or it is empty
            and not to be filled.
        DatabaseError: the database cannot be used.
    """
    file = engine.url.database if engine.dialect.name == "sqlite" else None
    if not create and file is not None and not Path(file).is_file():
        raise _missing(engine)  # connecting would create it
    transaction(engine, lambda connection: _migrate(connection, create))


def _migrate(connection: Connection, create: bool) -> None:
    lock_schema(connection)
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
            raise _missing(connection.engine)
        metadata.create_all(connection, checkfirst=False)
        command.stamp(config, "head")
    elif found not in known:
        raise FlowError(
            f"The database {database} has the schema {found!r} of a newer version; update worldmodel."
        )
    elif found != scripts.get_current_head():
        command.upgrade(config, "head")


def _missing(engine: Engine) -> FlowError:
    return FlowError(
        f"There is no catalog in {shown(engine)}; start the flow first: worldmodel flow run CONFIG."
    )
