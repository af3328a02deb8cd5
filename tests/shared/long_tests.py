"""A pytest plugin that leaves out long tests that passed with the same files, or records those that pass."""

from collections import Counter, defaultdict
from typing import Any

import pytest
from selection import ROOT, Passed, reason


class LongTests:
    """The pytest plugin behind `--only-changed` and `--record-passed`."""

    def __init__(self, config: Any) -> None:
        self.config, self.passed = config, Passed()
        self.left_out: Counter[str] = Counter()
        self.outcomes: dict[str, set[str]] = defaultdict(set)
        if config.getoption("record_passed"):  # what is edited while the tests run has not passed
            for path in (ROOT / "tests").rglob("test_*.py"):
                self.passed.current(path.relative_to(ROOT).as_posix())

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if not self.config.getoption("only_changed"):
            return
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

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep how long tests ended; one that needs a GPU may be skipped."""
        ended = report.when == "call" or not report.passed
        if ended and "slow" in report.keywords and not (report.skipped and "gpu" in report.keywords):
            self.outcomes[report.nodeid.split("::")[0]].add(report.outcome)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a process of pytest-xdist left out; all leave out the same."""
        self.left_out = Counter(getattr(node, "workeroutput", {}).get("left_out", self.left_out))

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if hasattr(self.config, "workerinput"):
            self.config.workeroutput["left_out"] = dict(self.left_out)
        elif self.config.getoption("record_passed") and exitstatus in (0, 1):
            passed = {file for file, outcomes in self.outcomes.items() if outcomes == {"passed"}}
            failed = {file for file, outcomes in self.outcomes.items() if "failed" in outcomes}
            self.passed.write(passed, failed)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.left_out:
            terminalreporter.section(
                f"{self.left_out.total()} long tests left out; `make test-all` runs them"
            )
        for file, count in sorted(self.left_out.items()):
            terminalreporter.line(f"{reason(file)} ({count})")


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("long tests")
    group.addoption(
        "--only-changed",
        action="store_true",
        help="leave out the long tests of files whose covered files have not changed since they passed",
    )
    group.addoption(
        "--record-passed",
        action="store_true",
        help="store in tests/passed.json which long tests passed with the files as they are",
    )


def pytest_configure(config: Any) -> None:
    if config.getoption("record_passed") and (config.option.markexpr or config.option.keyword):
        raise SystemExit("--record-passed needs whole test files: remove -m and -k.")
    if config.getoption("only_changed") or config.getoption("record_passed"):
        config.pluginmanager.register(LongTests(config), "long tests")
