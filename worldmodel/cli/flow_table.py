"""The status of a flow as a table in a terminal, and as lines elsewhere."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from worldmodel.flow.log.status import FlowStatus, StageStatus, TierStatus, Verdict

INTERVAL_S = 1.0
"""Time between two looks at the catalog for a terminal."""
LINE_S = 10.0
"""Time between two lines where there is no terminal."""
COLUMNS = ("stage", "done", "dropped", "dead", "waiting", "clips/s", "oldest", "spent", "end in", "runs on")


@contextmanager
def progress(read: Callable[[], FlowStatus]) -> Iterator[Callable[[], None]]:
    """Yield a function to call again and again, which shows the status now and then, and at the end."""
    console = Console()
    shown = time.monotonic()
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def show() -> None:
        if live is not None:
            live.update(rendered(read()), refresh=True)
        else:
            print(line(read()), flush=True)

    def watch() -> None:
        nonlocal shown
        if time.monotonic() - shown >= (LINE_S if live is None else INTERVAL_S):
            show()
            shown = time.monotonic()

    if live is None:
        yield watch
        show()
        return
    with live:
        yield watch
        show()


def watch(read: Callable[[], FlowStatus]) -> None:
    """Show the status until interrupted."""
    with progress(read) as show:
        while True:
            show()
            time.sleep(INTERVAL_S / 4)


def print_status(status: FlowStatus) -> None:
    """Print the table once."""
    console = Console()
    console.print(rendered(status), width=None if console.is_terminal else 120)


def print_verdicts(stage: str, verdicts: Sequence[Verdict], retried: Sequence[tuple[str, str]]) -> None:
    """Print why clips ended in a stage, with examples."""
    console = Console(soft_wrap=True)
    if not verdicts:
        console.print(f"{escape(stage)} has dropped no clip, and none is a dead letter")
    for verdict in verdicts:
        console.print(f"[bold]{verdict.count}[/] {verdict.state}: {escape(verdict.reason)}", highlight=False)
        for example in verdict.examples:
            where = example["address"]
            if example["start_s"] is not None or example["end_s"] is not None:
                where += f" ({example['start_s'] or 0:g} to {example['end_s'] or 'the end'} s)"
            print(f"    {example['id']}  {where}: {example['reason']}")
    for name, reason in retried:
        print(f"tried again: {name}: {reason}")


def rendered(status: FlowStatus) -> Group:
    """Return the table with its heading."""
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for column in table.columns[1:-1]:
        column.justify = "right"
    table.columns[0].no_wrap = True  # the last column gives way, which names machines
    table.columns[0].overflow = "fold"
    for stage in status.stages:
        table.add_row(*cells(stage))
    parts = [Text(heading(status)), table]
    if len(status.tiers) > 1:
        parts += [Text(tier_line(tier)) for tier in status.tiers]
    if status.error:
        parts.append(Text(f"the last run failed: {status.error}", style="red"))
    return Group(*parts)


def cells(stage: StageStatus) -> list[str]:
    """Return one row of the table."""
    return [
        stage.name,
        *(f"{count:,}" for count in (stage.done, stage.dropped, stage.dead, stage.waiting)),
        f"{stage.rate:.1f}",
        "" if stage.oldest_s is None else duration(stage.oldest_s),
        duration(stage.worker_s),
        "" if not stage.waiting and not stage.end_s else duration(stage.end_s),
        ", ".join(f"{host} ({count})" for host, count in stage.machines.items()),
    ]


def tier_line(tier: TierStatus) -> str:
    """Return what the machines of a tier do together."""
    where, what = ", ".join(tier.machines), ", ".join(tier.stages)
    return f"{where}: {what}, {tier.workers} workers, {tier.rate:.1f}/s"


def heading(status: FlowStatus) -> str:
    """Return what concerns the whole flow."""
    listed = f"{status.listed:,} listed" + ("" if status.all_listed else " so far")
    state = "running" if status.running else "not running"
    packed = f"{status.packed:,} packed in {status.segments:,} segments"
    end = f", ends in {duration(status.end_s)}" if status.end_s else ""
    return f"{state}: {listed}, {packed}{end}"


def line(status: FlowStatus) -> str:
    """Return the status in one line."""
    stages = " | ".join(
        f"{each.name} {each.done:,} done {each.waiting:,} waiting {each.rate:.1f}/s"
        + (f" {each.dropped:,} dropped" if each.dropped else "")
        + (f" {each.dead:,} dead" if each.dead else "")
        for each in status.stages
    )
    return f"{heading(status)} | {stages}"


def duration(seconds: float | None) -> str:
    """Return a time such as 42s, 3m10s or 2h05m; None is unknown."""
    if seconds is None:
        return "?"
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.1f}s" if seconds < 10 else f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
