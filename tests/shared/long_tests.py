"""A pytest plugin: leave out long tests that passed with the same files, or say whether all passed."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from selection import ROOT, Passed


class OnlyChanged:
    """The pytest plugin behind `--only-changed`."""

    def __init__(self, config: Any) -> None:
        self.config, self.passed = config, Passed()
        self.left_out: Counter[str] = Counter()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        kept, left_out = [], []
        unchanged: dict[str, bool] = {}
        for item in items:
            file = item.path.relative_to(ROOT).as_posix()
            if item.get_closest_marker("slow"):
                if file not in unchanged:
                    unchanged[file] = self.passed.unchanged(file)
                if unchanged[file]:
                    left_out.append(item)
                    self.left_out[file] += 1
                    continue
            kept.append(item)
        self.config.hook.pytest_deselected(items=left_out)
        items[:] = kept

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a process of pytest-xdist left out; all leave out the same."""
        self.left_out = Counter(getattr(node, "workeroutput", {}).get("left_out", self.left_out))

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workerinput"):
            self.config.workeroutput["left_out"] = dict(self.left_out)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.left_out:
            terminalreporter.section(
                f"{self.left_out.total()} long tests left out; `make test-all` runs them"
            )
        for file, count in sorted(self.left_out.items()):
            terminalreporter.line(f"{self.passed.reason(file)} ({count})")


class Outcome:
    """The pytest plugin behind `--record-passed`: writes `passed` to a file if all long tests did."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outcomes: set[str] = set()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep how long tests ended; one that needs a GPU may be skipped."""
        ended = report.when == "call" or not report.passed
        if ended and "slow" in report.keywords and not (report.skipped and "gpu" in report.keywords):
            self.outcomes.add(report.outcome)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus == 0 and self.outcomes == {"passed"}:
            self.path.write_text("passed", encoding="utf-8")


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("long tests")
    group.addoption(
        "--only-changed",
        action="store_true",
        help="leave out the long tests of files that passed with the same files",
    )
    group.addoption(
        "--record-passed", type=Path, help="write to this file if all long tests passed (record.py)"
    )


def pytest_configure(config: Any) -> None:
    if config.getoption("only_changed"):
        config.pluginmanager.register(OnlyChanged(config), "only changed")
    if config.getoption("record_passed"):
        config.pluginmanager.register(Outcome(config.getoption("record_passed")), "outcome")
