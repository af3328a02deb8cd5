"""Conformance of responses to the published OpenAPI schema."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

EXAMPLES = 15
LEAKS = ("Traceback", "site-packages", ".py", "worldmodel.serving", "0x7f")


@pytest.fixture(scope="module")
def address(serve: Callable[..., str]) -> str:
    # Small limits keep what is asked for cheap; the answers to asking for more are in the schema, too.
    return serve(max_video_frames=16, max_queued_jobs=2, requests_per_minute=60_000)


@pytest.fixture(scope="module")
def schema(address: str) -> Any:
    schemathesis = pytest.importorskip("schemathesis")
    return schemathesis.openapi.from_url(f"{address}/openapi.json", wait_for_schema=60)


def probe(operation: Any, address: str, data_dir: Path, **fixed: Any) -> set[int]:
    """Send what the schema allows, and what it does not, and look at the answers; returns their statuses."""
    from schemathesis import GenerationMode  # slow to import, and all processes of tests would do it
    from schemathesis.specs.openapi import checks

    statuses = set()
    conformance = [
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_headers_conformance,
        checks.response_schema_conformance,
    ]

    def look(case: Any) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("num_inference_steps"), int):
            case.body["num_inference_steps"] = min(2, case.body["num_inference_steps"])
        response = case.call(base_url=address, timeout=600)
        statuses.add(response.status_code)
        assert response.status_code < 500 or operation.path == "/ready", response.text
        case.validate_response(response, checks=conformance)
        if response.status_code >= 400:
            assert not [leak for leak in (*LEAKS, str(data_dir)) if leak in response.text]

    limits = settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    limits(given(case=operation.as_strategy(**fixed))(look))()
    wrong = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE, **fixed)
    with suppress(Unsatisfiable):  # what takes no input cannot be given a wrong one
        limits(given(case=wrong)(look))()
    return statuses


@pytest.mark.slow
def test_schema_conformance_without_objects(
    schema: Any, address: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.getbasetemp()
    statuses = [probe(found.ok(), address, base) for found in schema.get_all_operations()]
    assert len(statuses) > 20
    assert set.union(*statuses) >= {200, 400, 404}


@pytest.mark.slow
def test_schema_conformance_for_a_live_world(
    schema: Any, address: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    statuses = set()
    for found in schema.get_all_operations():
        operation = found.ok()
        if "{world_id}" in operation.path:
            with httpx.Client(base_url=address, timeout=600) as client:
                world = client.post(
                    "/v1/worlds", json={"text": "a red ball", "num_inference_steps": 1}
                ).json()
                base = tmp_path_factory.getbasetemp()
                statuses |= probe(operation, address, base, path_parameters={"world_id": world["id"]})
                client.delete(f"/v1/worlds/{world['id']}")
    assert statuses >= {200, 400, 409}
