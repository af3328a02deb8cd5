"""An index of fingerprints."""

import sqlalchemy as sa
from alembic import op

revision = "2"
down_revision = "1"


def upgrade() -> None:
    """Add the table `band`."""
    op.create_table(
        "band",
        sa.Column("key", sa.String(64), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("value", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("clip", sa.String(64), primary_key=True),
    )
