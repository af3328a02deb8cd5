"""What Alembic runs to migrate over the connection that `migrate` passes."""

from alembic import context

from worldmodel.flow.migrations import VERSION_TABLE
from worldmodel.flow.schema import metadata

context.configure(
    context.config.attributes["connection"], target_metadata=metadata, version_table=VERSION_TABLE
)
with context.begin_transaction():
    context.run_migrations()
