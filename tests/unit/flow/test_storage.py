"""Storages that cannot be used: errors that name the file and the remedy."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import s3fs

from worldmodel.errors import OutputError
from worldmodel.flow.errors import FlowError
from worldmodel.flow.storage import Storage


@pytest.fixture(params=["unreachable", "without credentials"])
def lost(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    """A store on S3 that cannot be used."""
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    for name, value in keys.items():
        if request.param == "unreachable":
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    yield Storage("s3://bucket/flow")
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (lambda storage: storage.exists("a"), FlowError),
        (lambda storage: storage.read("a"), FlowError),
        (lambda storage: storage.files(), FlowError),
        (lambda storage: storage.delete("a"), FlowError),
        (lambda storage: storage.write("a", b"x"), OutputError),
    ],
)
def test_a_store_that_does_not_answer_is_an_error(
    lost: Storage, use: Callable[[Storage], Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"s3://bucket/flow.*check the store"):
        use(lost)


def test_what_a_store_does_not_have_is_no_error(s3: str) -> None:
    storage = Storage(f"{s3}/storage")
    assert not storage.exists("a/b")
    storage.write("a/b", b"x")
    assert storage.exists("a/b")
    assert not storage.exists("a"), "a folder is not a file"
    assert not Storage("s3://no-such-bucket/flow").exists("a")
