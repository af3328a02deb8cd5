"""Fixtures of servers: processes of their own, and databases that they share."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from postgres import PostgresServer

from worldmodel.media import encoding

if TYPE_CHECKING:  # imported below where it is used: the environment of vLLM lacks packages of servers
    from served import Processes


@pytest.fixture
def servers(tmp_path: Path) -> "Iterator[Processes]":
    """Starts servers on one data folder."""
    from served import processes

    with processes(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Address of an empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'server.db'}"
    return request.getfixturevalue("postgres").database()


@pytest.fixture(scope="module")
def png(image: np.ndarray) -> bytes:
    return encoding.encode_png(image)
