"""Identities of catalogs and of their sources."""

import sqlalchemy as sa
from alembic import op

revision = "4"
down_revision = "3"


def upgrade() -> None:
    """Add the column `listing.digest` and the table `identity`."""
    op.add_column("listing", sa.Column("digest", sa.String(64)))
    op.create_table(
        "identity",
        sa.Column("one", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("name", sa.String(64), nullable=False),
    )
