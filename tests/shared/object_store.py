"""An S3 server for tests."""

from collections.abc import Iterator
from contextlib import contextmanager

import boto3
import pytest
import s3fs
from moto.server import ThreadedMotoServer

BUCKET = "bucket"


@contextmanager
def object_store(ip: str = "127.0.0.1") -> Iterator[str]:
    """Run a server with one bucket and yield the address of the bucket; the environment names the server."""
    server = ThreadedMotoServer(ip_address=ip, port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",  # Lance's
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield f"s3://{BUCKET}"
        server.stop()
    s3fs.S3FileSystem.clear_instance_cache()
