"""Replicas in Ray Serve: `serve run worldmodel.cli.ray_serve:app model=MODEL database=URL`."""

from typing import Any

from fastapi import FastAPI
from ray import serve

from worldmodel.cli.serve import parse_values, served
from worldmodel.errors import ConfigError
from worldmodel.serving.replicas.ray_serve import application
from worldmodel.serving.server import load_app

PROXY = ("host", "port", "tls_certificate", "tls_key")
"""Options of `worldmodel serve` that are Ray's in its config, since its proxy listens."""


def app(args: dict[str, Any]) -> serve.Application:
    """Return the application.

    Args:
        args: Options of `worldmodel serve` by their names with underscores, as in its `--config` file, and
            `num_replicas` (2), `num_cpus` (1) and `num_gpus` (0) of each.

    Raises:
        ConfigError, InputError, ModelError: an option has a wrong value, or there are no database and keys.
    """
    values = dict(args)
    num_replicas = int(values.pop("num_replicas", 2))
    actor = {name: float(values.pop(name, default)) for name, default in (("num_cpus", 1), ("num_gpus", 0))}
    if found := [name for name in PROXY if name in values]:
        raise ConfigError(f"{found[0]} is set, but Ray's proxy listens; set it in http_options of Ray Serve.")
    if "database" not in values:
        raise ConfigError("The replicas share no database; set database (see `worldmodel serve --help`).")
    if not served(parse_values(values, "Ray Serve"))["config"].keys:
        raise ConfigError(
            "There is no API key, and Ray's proxy may be open to other machines; set WORLDMODEL_API_KEYS or "
            "keys_file."
        )

    async def load() -> FastAPI:  # in each replica, which reads its keys itself
        return (await load_app(**served(parse_values(values, "Ray Serve"))))[0]

    return application(load, num_replicas, actor)
