"""Databases of each kind, and a record of what stages are called for."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from flow_stages import CALLS
from postgres import PostgresServer


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A server that tests share; they must not kill it."""
    server = PostgresServer()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The address of a bucket on a server that tests share."""
    from object_store import object_store  # needs packages that the environment of Ray and Spark is without

    with object_store() as address:
        yield address


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'flow.db'}"
    return request.getfixturevalue("postgres").database()


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in which the stages of `flows` note what they are called for."""
    path = tmp_path / "calls"
    path.touch()
    monkeypatch.setenv(CALLS, str(path))
    return path
