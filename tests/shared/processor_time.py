"""A pytest plugin for `--processor-time`: what the tests cost, which does not depend on what else runs."""

import os
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

LONG_S = 5
"""A test that takes longer is marked `slow`."""
STARTED = pytest.StashKey[float]()


def now() -> float:
    """Return the processor seconds of this process and of those that it started and waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class ProcessorTime:
    """Measures each test with its fixtures; a shared fixture counts for the first test that uses it."""

    def __init__(self) -> None:
        self.fast_s, self.long_s = 0.0, 0.0
        self.files: Counter[str] = Counter()
        self.unmarked: dict[str, float] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        item.stash[STARTED] = now()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
        report = yield
        if call.when == "teardown":
            report.user_properties.append(("processor_s", now() - item.stash[STARTED]))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "processor_s":
                assert isinstance(value, float)
                self.files[report.nodeid.split("::")[0]] += value
                if "slow" in report.keywords:
                    self.long_s += value
                    continue
                self.fast_s += value
                if value > LONG_S:
                    self.unmarked[report.nodeid] = value

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("processor time")
        terminalreporter.line(f"{self.fast_s:.0f} s of fast tests, {self.long_s:.0f} s of long ones")
        for file, seconds in self.files.most_common(10):
            terminalreporter.line(f"{seconds:6.1f} s  {file}")
        for test, seconds in sorted(self.unmarked.items()):
            terminalreporter.line(f"{seconds:6.1f} s, not marked slow: {test}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--processor-time",
        action="store_true",
        help="print what the tests cost, and which should be marked slow",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("processor_time"):
        config.pluginmanager.register(ProcessorTime(), "processor time")
