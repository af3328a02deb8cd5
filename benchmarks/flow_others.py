"""The same graph in our data flow, Ray Data and DataChain: fetch, filter, encode, and batches to a consumer.

Videos come from the slow web server of `flow.py`. Every engine runs the same functions with the same
parallelism: as many connections as `--connections`, one process that filters, one that encodes with the codec
of shapes-tiny, and batches of 8 latents for a consumer that takes `--consume-ms` for each. Each engine is run
alone, in an environment that has it beside worldmodel: `pip install . "ray[data]"`, or datachain. Times begin
before an engine is imported and started; the videos are recorded and served before.
"""

import argparse
import itertools
import json
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
from flow import BATCH, add_network, flow_config, recorded, run, server

MODEL = {"model": "shapes-tiny", "columns": {"text": "text", "keys": "keys"}}


def fetch(address: str) -> bytes:
    """Download a file."""
    with urllib.request.urlopen(address, timeout=60) as answer:  # noqa: S310 -- of this machine
        return answer.read()


def fetch_batch(batch: pa.Table) -> pa.Table:
    """Download the files of a batch, one after another."""
    videos = [fetch(address) for address in batch.column("address").to_pylist()]
    return batch.append_column("video", pa.array(videos, pa.large_binary()))


class Stage:
    """A stage of worldmodel as a function of tables; clips that it drops are left out."""

    def __init__(self, name: str, settings: dict[str, Any] | None = None) -> None:
        from worldmodel.flow.stages import find_stage

        self.stage = find_stage(name)
        self.function = self.stage.make(**settings or {})

    def __call__(self, table: pa.Table) -> pa.Table:
        for column in {"start_s", "end_s", *self.stage.inputs} - set(table.column_names):
            kind = pa.float64() if column.endswith("_s") else pa.string()
            table = table.append_column(column, pa.nulls(table.num_rows, kind))
        batches = table.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], table.schema)]
        found = pa.Table.from_batches([self.function(batches[0])])
        kept = pa.array([reason is None for reason in found.column("drop").to_pylist()], pa.bool_())
        table, found = table.filter(kept), found.filter(kept)
        for name in set(self.stage.outputs) & set(found.column_names) - set(table.column_names):
            table = table.append_column(name, found.column(name))
        return table


class Select(Stage):
    """The stages probe and filter, one after the other."""

    def __init__(self) -> None:
        self.stages = [Stage("probe"), Stage("filter")]

    def __call__(self, table: pa.Table) -> pa.Table:
        for stage in self.stages:
            table = stage(table)
        return table


def consume(batches: Iterable[Any], began: float, args: argparse.Namespace) -> None:
    """Take batches as a training does, and print when the first and the last one came."""
    first, count = 0.0, 0
    for batch in batches:
        first = first or time.time() - began
        count += len(batch)
        time.sleep(args.consume_ms / 1000)
    print(f"{args.engine}: first batch {first:.1f} s, all {count} clips {time.time() - began:.1f} s")


def with_worldmodel(work: Path, videos: Path, root: str, args: argparse.Namespace, began: float) -> None:
    """Run our flow, and read its log while it grows."""
    from worldmodel import config as configs
    from worldmodel.data import loader

    config = flow_config(work / "flow.yaml", work / "flow", videos, root, args, segment_size=BATCH)
    runner = threading.Thread(target=run, args=("flow", "run", str(config)))
    runner.start()
    while not (work / "flow" / "log" / "log.json").exists():
        time.sleep(0.02)
    source = configs.SourceConfig("flow", str(work / "flow" / "log"))
    data = configs.DataConfig({"web": source}, timeout_s=600)
    stage = configs.StageConfig(steps=args.clips // BATCH, batch_size=BATCH, rounds=2, tasks={"rounds": 1.0})
    model = configs.load("shapes_tiny").model
    with loader.batches(data, model, stage, 0) as steps:
        numbered = zip(range(args.clips // BATCH), steps, strict=False)
        consume((step[0].episodes for _, step in numbered), began, args)
    runner.join()


def with_ray(work: Path, videos: Path, root: str, args: argparse.Namespace, began: float) -> None:
    """Run Ray Data: tasks that fetch, an actor that filters, one that encodes, and prefetched batches."""
    import ray

    ray.init(num_cpus=args.connections + 2, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = read_rows(videos, root)
    arrow: dict[str, Any] = {"batch_format": "pyarrow", "num_cpus": 1}
    one = ray.data.ActorPoolStrategy(size=1)
    data = (
        ray.data.from_items(rows, override_num_blocks=-(-len(rows) // BATCH))
        .map_batches(fetch_batch, **arrow, batch_size=2, compute=ray.data.TaskPoolStrategy(args.connections))
        .map_batches(Select, **arrow, batch_size=8, compute=one)
        .map_batches(Stage, fn_constructor_args=("encode", MODEL), **arrow, batch_size=4, compute=one)
    )  # fmt: skip
    batches = data.iter_batches(batch_size=BATCH, batch_format="pyarrow", prefetch_batches=2)
    consume((batch.column("latents").to_pylist() for batch in batches), began, args)
    ray.shutdown()


def with_datachain(work: Path, videos: Path, root: str, args: argparse.Namespace, began: float) -> None:
    """Run DataChain: parallel downloads, then one function after the other, and the values as they come."""
    import datachain as dc

    rows = read_rows(videos, root)
    columns = {name: [row[name] for row in rows] for name in ("clip", "address", "row")}

    def selected(select: Select, clip: str, video: bytes) -> bool:
        return select(pa.Table.from_pylist([{"clip": clip, "video": video}])).num_rows == 1

    def encoded(encode: Stage, clip: str, row: str, video: bytes) -> bytes:
        table = pa.Table.from_pylist([{"clip": clip, "row": row, "video": video}])
        return encode(table).column("latents").to_pylist()[0]

    chain = (
        dc.read_values(**columns, in_memory=False)
        .settings(parallel=args.connections, batch_size=BATCH)
        .map(fetch, params=["address"], output={"video": bytes})
        .settings(parallel=1)
        .setup(select=Select)
        .map(selected, output={"selected": bool})
        .filter(dc.C("selected") == True)  # noqa: E712 -- a column of SQL
        .setup(encode=lambda: Stage("encode", MODEL))
        .map(encoded, output={"latents": bytes})
        .settings(parallel=False)
    )
    values = (row[0] for row in chain.to_iter("latents"))
    consume(iter(lambda: list(itertools.islice(values, BATCH)), []), began, args)


def read_rows(videos: Path, root: str) -> list[dict[str, str]]:
    """Return the clips of a table of recorded videos."""
    lines = (videos / "clips.jsonl").read_text().splitlines()
    rows = [{key: row[key] for key in ("path", "text", "keys")} for row in map(json.loads, lines)]
    return [{"clip": row["path"], "address": f"{root}/{row['path']}", "row": json.dumps(row)} for row in rows]


ENGINES = {"worldmodel": with_worldmodel, "ray": with_ray, "datachain": with_datachain}


def main() -> None:
    """Run one engine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--folder", type=Path, help="folder of the videos, kept for the next run")
    parser.add_argument("--clips", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--consume-ms", type=float, default=200.0, help="of a batch (default: %(default)s)")
    add_network(parser)
    args = parser.parse_args()
    videos = recorded(args)
    work = Path(tempfile.mkdtemp(prefix="flow-others-"))
    with server(videos, args) as root:
        ENGINES[args.engine](work, videos, root, args, time.time())


if __name__ == "__main__":
    main()
