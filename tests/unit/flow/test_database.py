"""Databases: their URLs, transactions and versions of the schema."""

import shutil
from contextlib import closing
from pathlib import Path

import pytest
from flow_stages import flow_config
from sqlalchemy import func, inspect, select, text

from worldmodel.database import connect, transaction
from worldmodel.errors import ConfigError, DatabaseError
from worldmodel.flow import migrations
from worldmodel.flow.catalog import Catalog
from worldmodel.flow.chain import Chain
from worldmodel.flow.errors import FlowError
from worldmodel.flow.migrations import VERSION_TABLE, migrate
from worldmodel.flow.schema import listing, message, metadata


def add(url: str, key: str) -> None:
    row = {"topic": "t", "key": key, "ordinal": 0}
    transaction(connect(url), lambda connection: connection.execute(message.insert(), row))


def count(url: str) -> int:
    query = select(func.count()).select_from(message)
    return transaction(
        connect(url), lambda connection: connection.execute(query).scalar_one(), read_only=True
    )


def test_an_empty_database_gets_the_schema_once(database_url: str) -> None:
    engine = connect(database_url)
    migrate(engine)
    add(database_url, "kept")
    migrate(engine)
    assert set(metadata.tables) < set(inspect(engine).get_table_names())
    assert count(database_url) == 1


def test_a_schema_of_an_earlier_version_is_brought_up_to_date(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = connect(database_url)
    migrate(engine)
    add(database_url, "kept")
    folder = tmp_path / "100 %" / "migrations"
    shutil.copytree(migrations.FOLDER, folder)
    (folder / "versions" / "second.py").write_text(
        "from alembic import op\nimport sqlalchemy as sa\n"
        "revision, down_revision = 'newest', '4'\n"
        "def upgrade(): op.add_column('message', sa.Column('priority', sa.Integer))\n"
    )
    monkeypatch.setattr(migrations, "FOLDER", folder)
    for _ in range(2):
        migrate(engine)
        assert "priority" in {column["name"] for column in inspect(engine).get_columns("message")}
    assert count(database_url) == 1


def test_a_catalog_without_bookmarks_and_identities_gets_them(database_url: str, tmp_path: Path) -> None:
    engine = connect(database_url)
    migrate(engine)
    statements = (
        "ALTER TABLE listing DROP COLUMN bookmark",
        "ALTER TABLE listing DROP COLUMN digest",
        "DROP TABLE identity",
        f"UPDATE {VERSION_TABLE} SET version_num = '2'",
        "INSERT INTO listing (source, position, rows, finished) VALUES ('web', 0, 7, 0)",
    )
    transaction(engine, lambda connection: [connection.execute(text(each)) for each in statements])
    migrate(engine)
    row = transaction(engine, lambda connection: connection.execute(select(listing)).one())
    assert (row.rows, row.bookmark, row.digest) == (7, None, None)
    chain, topics = Chain.of(flow_config(tmp_path, tmp_path)), set()
    for _ in range(2):
        with closing(Catalog(database_url, chain)) as catalog:
            topics.add(catalog.chain.links[0].topic)
    assert len(topics) == 1
    assert topics != {chain.links[0].topic}


def test_a_schema_of_a_newer_version_is_refused(database_url: str) -> None:
    engine = connect(database_url)
    migrate(engine)
    newer = text(f"UPDATE {VERSION_TABLE} SET version_num = 'from2027'")
    transaction(engine, lambda connection: connection.execute(newer))
    with pytest.raises(FlowError, match="from2027"):
        migrate(engine)


def test_tables_of_another_program_are_left_alone(database_url: str) -> None:
    engine = connect(database_url)
    transaction(engine, lambda connection: connection.execute(text("CREATE TABLE clip (film text)")))
    with pytest.raises(FlowError, match="clip"):
        migrate(engine)
    assert inspect(engine).get_table_names() == ["clip"]


def test_a_failed_transaction_leaves_nothing(database_url: str) -> None:
    migrate(connect(database_url))
    with pytest.raises(ZeroDivisionError):
        transaction(
            connect(database_url),
            lambda connection: (
                connection.execute(message.insert(), {"topic": "t", "key": "k", "ordinal": 0}),
                1 // 0,
            ),
        )
    assert count(database_url) == 0


@pytest.mark.parametrize("url", ["catalog.db", "mysql://host/database", "sqlite://", "sqlite:///:memory:"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        connect(url)


def test_a_file_that_is_not_a_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.db").write_text("not a database, but long enough to look like one" * 100)
    with pytest.raises(DatabaseError, match=r"notes\.db"):
        migrate(connect(f"sqlite:///{tmp_path}/notes.db"))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("a file, where a folder is needed")
    with pytest.raises(DatabaseError, match="notes"):
        migrate(connect(f"sqlite:///{tmp_path}/notes/catalog.db"))


def test_a_full_disk_is_named_and_what_was_committed_stays(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/full.db"
    engine = connect(url)
    migrate(engine)
    add(url, "kept")
    rows = [{"topic": "t", "key": f"{index:0100}", "ordinal": 0} for index in range(2000)]

    def fill(connection) -> None:
        connection.exec_driver_sql("PRAGMA max_page_count = 60")
        connection.execute(message.insert(), rows)

    with pytest.raises(DatabaseError, match="full"):
        transaction(engine, fill)
    assert count(url) == 1


def test_a_server_that_stays_away_is_named_without_its_password() -> None:
    engine = connect("postgresql://worker:secret@127.0.0.1:1/flow")
    with pytest.raises(DatabaseError, match=r"127\.0\.0\.1") as caught:
        transaction(engine, lambda connection: connection.execute(text("SELECT 1")), retry_s=0.2)
    assert "secret" not in str(caught.value)
