"""`worldmodel flow`: fetch, filter, caption and encode clips while a model trains on them."""

import argparse
import contextlib
import dataclasses
import json
import logging
import sys
import threading
from typing import TYPE_CHECKING

from worldmodel import config as configs
from worldmodel.cli.parser import OVERRIDES_HELP, Parser, option
from worldmodel.config.flow import FEED, FlowConfig
from worldmodel.errors import InputError

if TYPE_CHECKING:
    from worldmodel.flow.catalog.catalog import Catalog

COMMANDS = ("run", "work", "status", "retry", "backfill", "export", "compact", "prune")


def main(argv: list[str]) -> None:
    """Run one of the commands."""
    args, train_overrides = _split(argv)
    parsed = _parser().parse_args(args)
    if parsed.what == "export":
        if not parsed.overrides or "=" in parsed.overrides[0]:
            raise InputError(
                "Name a folder or a .parquet file to export to: worldmodel flow export CONFIG OUT."
            )
        parsed.out = parsed.overrides.pop(0)
    config = configs.load(parsed.config, parsed.overrides, FlowConfig)
    if parsed.stages and parsed.what != "work":
        raise InputError(f"--stages is of `flow work`, not of `flow {parsed.what}`.")
    if parsed.what == "run" and parsed.dry_run:
        _plan(config)
    elif parsed.what == "run":
        _run(config, parsed, train_overrides)
    elif parsed.what == "work":
        parts = [name.strip() for name in parsed.stages.split(",") if name.strip()]
        if not parts and not parsed.train:
            raise InputError(
                f"Say what this machine does: --stages with some of {', '.join([*config.stages, FEED])}, "
                "separated by commas, or --train CONFIG."
            )
        _run(config.only(parts), parsed, train_overrides)
    elif parsed.what == "status":
        _status(config, parsed)
    elif parsed.what == "retry":
        _retry(config, parsed.stage)
    elif parsed.what == "backfill":
        _backfill(config, parsed)
    elif parsed.what == "export":
        _export(config, parsed.out)
    elif parsed.what == "compact":
        _compact(config)
    else:
        _prune(config, parsed.delete, parsed.older_than)


def _run(config: FlowConfig, parsed: argparse.Namespace, train_overrides: list[str]) -> None:
    from worldmodel.cli.flow_table import progress
    from worldmodel.flow.log.status import StatusReader
    from worldmodel.flow.work import run

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    train = None
    if parsed.train:
        train = run.train_program(config, parsed.train, parsed.processes, train_overrides)
    stop = threading.Event()
    with contextlib.ExitStack() as stack:
        stack.enter_context(run.stopped_by_signals(stop))
        reader = stack.enter_context(contextlib.closing(StatusReader(config, create=True)))
        if parsed.metrics_port is not None:
            from worldmodel.flow.log.metrics import metrics_server

            server = metrics_server(reader.read, parsed.metrics_host, parsed.metrics_port)
            print(f"metrics: http://{parsed.metrics_host}:{stack.enter_context(server)}/metrics", flush=True)
        watch = stack.enter_context(progress(reader.read))
        code = run.run_flow(config, watch, train, stop)
    print(f"log: {config.place('log')}")
    if code:
        sys.exit(code)


def _status(config: FlowConfig, parsed: argparse.Namespace) -> None:
    from worldmodel.cli import flow_table
    from worldmodel.flow.log.status import StatusReader

    with contextlib.closing(StatusReader(config)) as reader:
        if parsed.stage:
            verdicts, retried = reader.verdicts(parsed.stage), reader.retried(parsed.stage)
            if parsed.json:
                print(json.dumps([dataclasses.asdict(verdict) for verdict in verdicts], indent=2))
            else:
                flow_table.print_verdicts(parsed.stage, verdicts, retried)
        elif parsed.json:
            status = reader.read()
            tiers = [dataclasses.asdict(tier) for tier in status.tiers]
            found = {**dataclasses.asdict(status), "end_s": status.end_s, "tiers": tiers}
            print(json.dumps(found, indent=2))
        elif parsed.watch:
            flow_table.watch(reader.read)
        else:
            flow_table.print_status(reader.read())


def _retry(config: FlowConfig, stage: str) -> None:
    with _catalog(config) as catalog:
        names = catalog.chain.names
        if stage and stage not in names:
            raise InputError(f"There is no stage {stage!r}; use one of {', '.join(names[:-1])}.")
        count = catalog.retry([stage] if stage else [])
    print(f"{count} clips are tried again by the next `worldmodel flow run`")


def _plan(config: FlowConfig) -> None:
    from worldmodel.flow.catalog.again import Planner

    with _catalog(config) as catalog:
        for stage in Planner(catalog).stages():
            print(f"{stage.name}: {stage.num_kept} results are kept, at most {stage.num_open} clips are open")
        for name in config.sources:
            print(f"{name}: {catalog.listed(name).rows} rows are listed, and further ones would follow")
    print("nothing was changed")


def _backfill(config: FlowConfig, parsed: argparse.Namespace) -> None:
    from worldmodel.flow.catalog.again import Planner

    first, _, last = parsed.range.partition(":")
    if not parsed.stage or not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise InputError(
            "Name a stage, and a range of the column `ordinal` of an export to clips.parquet: "
            "worldmodel flow backfill CONFIG --stage NAME --range 100:200."
        )
    with _catalog(config) as catalog:
        planner = Planner(catalog)
        names = ", ".join(link.name for link in planner.readers(parsed.stage))
        if parsed.dry_run:
            found = planner.within(int(first), int(last))
        else:
            found = planner.forget(parsed.stage, int(first), int(last))
    print(
        f"{found.num_open} clips pass {names} again"
        + (" in a run without --dry-run" if parsed.dry_run else "")
    )
    if found.num_packed:
        print(
            f"{found.num_packed} are in segments, which never change; another version or setting of "
            f"{parsed.stage} begins a new log"
        )


def _export(config: FlowConfig, out: str) -> None:
    from worldmodel.flow.log.export import TABLE, export_clips, export_log

    if out.endswith(".parquet"):
        with _catalog(config) as catalog:
            print(f"{export_clips(catalog, out)} clips: {out}")
        return
    shards, clips = export_log(config.place("log"), out)
    print(f"{clips} clips in {shards} shards: {out}/*.tar, {out}/{TABLE}")


def _compact(config: FlowConfig) -> None:
    from worldmodel.flow.buffer import open_buffer

    with _catalog(config) as catalog:
        freed = open_buffer(config.place("buffer")).compact(catalog.places())
    print(f"{freed / 2**20:.1f} MiB of unused results removed")


def _prune(config: FlowConfig, delete: bool, days: float) -> None:
    from worldmodel.flow.buffer import open_buffer
    from worldmodel.flow.catalog.prune import Pruner

    with _catalog(config) as catalog:
        pruner = Pruner(catalog, open_buffer(config.place("buffer")))
        former, age_s = pruner.former(), days * 24 * 3600.0
        ended = pruner.ended(age_s) if days > 0 else []
        for each in former:
            size = f"{each.num_bytes / 2**20:.1f} MiB"
            print(f"{each.stage} {each.key}: {each.num_results} results, {size}")
        if delete and former:
            print(f"removed; the buffer shrank by {pruner.remove(former) / 2**20:.1f} MiB")
        for each in ended:
            print(f"{each.stage} {each.key}: {each.num_results} results of clips that have ended")
        if delete and ended:
            print(f"removed; the buffer shrank by {pruner.remove_ended(age_s) / 2**20:.1f} MiB")
    if not former and not ended:
        print("there is nothing to remove")
    elif not delete:
        print("nothing is removed yet: add --delete")


def _catalog(config: FlowConfig) -> contextlib.closing["Catalog"]:
    """Return the catalog of a flow that was started."""
    from worldmodel.flow.catalog.catalog import Catalog
    from worldmodel.flow.catalog.chain import Chain

    return contextlib.closing(Catalog(config.place("catalog"), Chain.of(config), create=False))


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before `--`, and the training's arguments after it."""
    return (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])


def _parser() -> Parser:
    parser = Parser(
        "worldmodel flow",
        "run: list, fetch, filter, caption, encode and pack clips; with --train, train on them meanwhile.\n"
        "work: do a part of it on this machine: the stages of --stages, list and pack (feed), or --train.\n"
        "status: show where every stage stands, and why clips were dropped.\n"
        "retry: try dead letters again.\n"
        "backfill: let a stage, and those that read it, work again on clips of a range that are not packed.\n"
        "export: write the packed clips to the folder OUT, as tar shards and a table; or all clips\n"
        "and their verdicts to OUT.parquet.\n"
        "compact: remove results in the buffer that nothing needs.\n"
        "prune: list the results of former versions and settings of stages, and with --older-than old files\n"
        "of clips that have ended; with --delete, remove them.",
        "worldmodel flow run web.yaml\n"
        "  worldmodel flow run web.yaml --train train.yaml -- stages.joint.steps=1000\n"
        "  worldmodel flow work web.yaml --stages feed,fetch,probe\n"
        "  worldmodel flow status web.yaml --stage filter\n"
        "  worldmodel flow export web.yaml OUT\n"
        "  worldmodel flow export web.yaml clips.parquet",
    )
    parser.add_argument("what", choices=COMMANDS, help="what to do")
    parser.add_argument("config", metavar="CONFIG", help="a YAML file that describes the flow")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help=f"{OVERRIDES_HELP}; export: first the folder or file OUT",
    )
    option(
        parser,
        "--train",
        "run, work: train with this config beside it; its settings follow --",
        metavar="CONFIG",
    )
    option(parser, "--stages", "work: names of stages, and feed, with commas between", "", metavar="NAMES")
    option(parser, "--processes", "run, work: training processes", 1)
    option(
        parser, "--metrics-port", "run, work: serve Prometheus metrics at /metrics", kind=int, metavar="PORT"
    )
    option(parser, "--metrics-host", "run, work: their address", "127.0.0.1", metavar="HOST")
    parser.add_argument("--watch", action="store_true", help="status: show it until interrupted")
    parser.add_argument("--json", action="store_true", help="status: print JSON")
    parser.add_argument("--delete", action="store_true", help="prune: remove what is listed")
    option(parser, "--older-than", "prune: also files older than so many days of clips that have ended", 0.0)
    parser.add_argument(
        "--dry-run", action="store_true", help="run, backfill: only say how much is kept and how much is open"
    )
    option(
        parser,
        "--stage",
        "status: why it dropped clips; retry: only this stage; backfill: the stage",
        "",
        metavar="NAME",
    )
    option(
        parser, "--range", "backfill: which clips, by the column `ordinal` of the export", "", metavar="N:M"
    )
    return parser
