"""Bookmarks of streamed sources."""

import sqlalchemy as sa
from alembic import op

revision = "3"
down_revision = "2"


def upgrade() -> None:
    """Add the column `listing.bookmark`."""
    op.add_column("listing", sa.Column("bookmark", sa.JSON))
