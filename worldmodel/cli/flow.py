"""`worldmodel flow`: fetch, filter, caption and encode clips while a model trains on them."""

import argparse
import dataclasses
import json
import logging
import sys
import threading

from worldmodel import config as configs
from worldmodel.cli.parser import OVERRIDES_HELP, Parser
from worldmodel.config.flow import FlowConfig
from worldmodel.errors import InputError


def main(argv: list[str]) -> None:
    """Run one of the four."""
    args, train_overrides = _split(argv)
    parsed = _parser().parse_args(args)
    config = configs.load(parsed.config, parsed.overrides, FlowConfig)
    if parsed.what == "run":
        _run(config, parsed, train_overrides)
    elif parsed.what == "status":
        _status(config, parsed.json, parsed.stage)
    elif parsed.what == "retry":
        _retry(config, parsed.stage)
    else:
        _compact(config)


def _run(config: FlowConfig, parsed: argparse.Namespace, train_overrides: list[str]) -> None:
    from worldmodel.flow import run

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    train = run.train_command(config, parsed.train, parsed.processes, train_overrides) if parsed.train else []
    stop = threading.Event()
    with run.stopped_by_signals(stop):
        code = run.run_flow(config, train=train, stop=stop)
    print(f"log: {config.place('log')}")
    if code:
        sys.exit(code)


def _status(config: FlowConfig, as_json: bool, stage: str) -> None:
    from worldmodel.flow.status import StatusReader

    status = StatusReader(config).read()
    if as_json:
        print(json.dumps(dataclasses.asdict(status), indent=2))
        return
    print(f"listed {status.listed}{'' if status.all_listed else ' (more to list)'}")
    for each in status.stages:
        print(
            f"{each.name:12s} done {each.done} dropped {each.dropped} dead {each.dead} waiting {each.waiting}"
        )
    print(f"packed {status.packed} in {status.segments} segments")


def _retry(config: FlowConfig, stage: str) -> None:
    from worldmodel.flow.catalog import Catalog
    from worldmodel.flow.chain import Chain

    chain = Chain.of(config)
    if stage and stage not in chain.names:
        raise InputError(f"There is no stage {stage!r}; use one of {', '.join(chain.names[:-1])}.")
    catalog = Catalog(config.place("catalog"), chain)
    print(
        f"{catalog.retry([stage] if stage else [])} clips are tried again by the next `worldmodel flow run`"
    )


def _compact(config: FlowConfig) -> None:
    from worldmodel.flow.buffer import open_buffer
    from worldmodel.flow.catalog import Catalog
    from worldmodel.flow.chain import Chain

    catalog = Catalog(config.place("catalog"), Chain.of(config))
    freed = open_buffer(config.place("buffer")).compact(list(catalog.places()))
    print(f"{freed / 2**20:.1f} MiB of unused results removed")


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before and after `--`, which are those of the training."""
    return (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])


def _parser() -> Parser:
    parser = Parser(
        "worldmodel flow",
        "run: list, fetch, filter, caption, encode and pack clips; with --train, train on them meanwhile.\n"
        "status: say where every stage stands.\n"
        "retry: try dead letters again.\n"
        "compact: remove results in the buffer that nothing needs.",
        "worldmodel flow run web.yaml\n"
        "  worldmodel flow run web.yaml --train train.yaml -- stages.joint.steps=1000\n"
        "  worldmodel flow status web.yaml",
    )
    parser.add_argument("what", choices=("run", "status", "retry", "compact"), help="what to do")
    parser.add_argument("config", metavar="CONFIG", help="a YAML file that describes the flow")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES_HELP)
    parser.add_argument(
        "--train", metavar="CONFIG", help="run: train with this config beside it; its settings follow --"
    )
    parser.add_argument(
        "--processes", type=int, default=1, metavar="N", help="run: training processes (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="status: print JSON")
    parser.add_argument("--stage", default="", metavar="NAME", help="status, retry: one stage")
    return parser
