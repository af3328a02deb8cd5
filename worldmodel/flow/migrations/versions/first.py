"""The schema of the first release."""

revision = "1"
down_revision = None


def upgrade() -> None:
    """Do nothing: new databases are created from `worldmodel.flow.schema`."""
