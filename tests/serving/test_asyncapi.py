"""The generated AsyncAPI document describes every event with its fields."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from served import local

from worldmodel.models.world_model import WorldModel
from worldmodel.serving.realtime import asyncapi, events
from worldmodel.serving.realtime.connection import ROUTE


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return asyncapi.document(ROUTE)


def resolve(document: dict[str, Any], ref: str) -> Any:
    node: Any = document
    for part in ref.removeprefix("#/").split("/"):
        node = node[part]
    return node


def refs_of(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [ref for value in node.values() for ref in refs_of(value)]
    return [ref for value in node for ref in refs_of(value)] if isinstance(node, list) else []


def test_document_is_valid_asyncapi_3(document: dict[str, Any]) -> None:
    assert document["asyncapi"] == "3.0.0"
    assert {"title", "version"} <= document["info"].keys()
    assert document["channels"]["realtime"]["address"] == ROUTE
    refs = refs_of(document)
    assert len(refs) > 50
    for ref in refs:
        assert ref.startswith("#/")
        assert resolve(document, ref) is not None
    channel = document["channels"]["realtime"]["messages"]
    for operation in document["operations"].values():
        assert operation["action"] in {"send", "receive"}
        assert resolve(document, operation["channel"]["$ref"]) is document["channels"]["realtime"]
        assert all(ref["$ref"].rsplit("/", 1)[1] in channel for ref in operation["messages"])
    for message in document["components"]["messages"].values():
        assert message.keys() >= {"name", "summary", "contentType", "payload"}


def test_document_contains_every_event_with_its_fields(document: dict[str, Any]) -> None:
    for action, classes, binary in (
        ("receive", events.CLIENT_EVENT_CLASSES, "upload"),
        ("send", events.SERVER_EVENT_CLASSES, "media"),
    ):
        operation = document["operations"][action]["messages"]
        names = {ref["$ref"].rsplit("/", 1)[1] for ref in operation}
        assert names == {binary, *map(events.event_type, classes)}
        for event in classes:
            message = document["components"]["messages"][events.event_type(event)]
            schema = resolve(document, message["payload"]["$ref"])
            assert schema["properties"].keys() == event.model_fields.keys()
            assert schema["additionalProperties"] is False
            assert schema["properties"]["type"]["const"] == events.event_type(event)


def test_examples_are_valid_events(document: dict[str, Any]) -> None:
    examples = [
        example["payload"]
        for message in document["components"]["messages"].values()
        for example in message.get("examples", ())
    ]
    assert len(examples) > 3
    for example in examples:
        assert events.parse_event(json.dumps(example)).type == example["type"]


def test_served_document_equals_the_generated_one(
    document: dict[str, Any], model: WorldModel, tmp_path: Path
) -> None:
    with local(model, tmp_path) as client:
        response = client.get("/asyncapi.yaml")
    assert response.headers["content-type"].startswith("application/yaml")
    assert yaml.safe_load(response.text) == json.loads(json.dumps(document))
