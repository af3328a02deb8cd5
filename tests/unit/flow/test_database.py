"""Databases: their URLs, transactions and versions of the schema."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import func, inspect, select, text

from worldmodel.database import connect, transaction
from worldmodel.errors import ConfigError, DatabaseError
from worldmodel.flow.catalog.schema import lease, metadata, open_schema, version
from worldmodel.flow.errors import FlowError


def add(url: str, key: str) -> None:
    transaction(connect(url), lambda connection: connection.execute(lease.insert(), row_of(key)))


def row_of(key: str) -> dict[str, object]:
    return {"id": key, "renewed_at": 0.0, "expires_at": 0.0}


def count(url: str) -> int:
    query = select(func.count()).select_from(lease)
    return transaction(
        connect(url), lambda connection: connection.execute(query).scalar_one(), read_only=True
    )


def test_an_empty_database_gets_the_schema_once(database_url: str) -> None:
    engine = connect(database_url)
    open_schema(engine)
    add(database_url, "kept")
    open_schema(engine)
    assert set(metadata.tables) == set(inspect(engine).get_table_names())
    assert count(database_url) == 1


@pytest.mark.parametrize("number", [0, 2027])
def test_a_schema_of_another_version_is_refused(database_url: str, number: int) -> None:
    engine = connect(database_url)
    open_schema(engine)
    transaction(engine, lambda db: db.execute(version.update().values(number=number)))
    with pytest.raises(FlowError, match=f"schema {number} of another version"):
        open_schema(engine)


def test_processes_that_open_an_empty_database_at_once_create_one_schema(database_url: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: open_schema(connect(database_url)), range(8)))
    query = select(func.count()).select_from(version)
    assert transaction(connect(database_url), lambda db: db.execute(query).scalar_one()) == 1


def test_tables_of_another_program_are_left_alone(database_url: str) -> None:
    engine = connect(database_url)
    transaction(engine, lambda connection: connection.execute(text("CREATE TABLE clip (film text)")))
    with pytest.raises(FlowError, match="clip"):
        open_schema(engine)
    assert inspect(engine).get_table_names() == ["clip"]


def test_a_failed_transaction_leaves_nothing(database_url: str) -> None:
    open_schema(connect(database_url))
    with pytest.raises(ZeroDivisionError):
        transaction(
            connect(database_url),
            lambda connection: (
                connection.execute(lease.insert(), row_of("k")),
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
        open_schema(connect(f"sqlite:///{tmp_path}/notes.db"))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("a file, where a folder is needed")
    with pytest.raises(DatabaseError, match="notes"):
        open_schema(connect(f"sqlite:///{tmp_path}/notes/catalog.db"))


def test_a_full_disk_is_named_and_what_was_committed_stays(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/full.db"
    engine = connect(url)
    open_schema(engine)
    add(url, "kept")
    rows = [row_of(f"{index:0100}") for index in range(2000)]

    def fill(connection) -> None:
        connection.exec_driver_sql("PRAGMA max_page_count = 60")
        connection.execute(lease.insert(), rows)

    with pytest.raises(DatabaseError, match="full"):
        transaction(engine, fill)
    assert count(url) == 1


def test_a_server_that_stays_away_is_named_without_its_password() -> None:
    engine = connect("postgresql://worker:secret@127.0.0.1:1/flow")
    with pytest.raises(DatabaseError, match=r"127\.0\.0\.1") as caught:
        transaction(engine, lambda connection: connection.execute(text("SELECT 1")), retry_s=0.2)
    assert "secret" not in str(caught.value)
