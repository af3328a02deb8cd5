"""A flow with a broker that loses, repeats and reorders what it is told: the catalog decides all the same."""

import random
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from flow_stages import CALLS, flow_config, write_table

from worldmodel.config import imports
from worldmodel.errors import ConfigError
from worldmodel.flow.catalog.catalog import Catalog
from worldmodel.flow.catalog.chain import Chain
from worldmodel.flow.log.log import Log
from worldmodel.flow.work import loops
from worldmodel.flow.work.feeder import Feeder
from worldmodel.flow.work.run import run_flow
from worldmodel.flow.work.topics import open_topics

announced: dict[str, list[str]] = defaultdict(list)
lock = threading.Lock()


class LossyTopic:
    """A topic of this process that loses every fifth id and delivers all others twice, in any order."""

    def __init__(self, url: str, name: str) -> None:
        self.name, self.random = name, random.Random(0)
        self.loses = url.endswith("/lossy")

    def announce(self, clips: Sequence[str]) -> None:
        with lock:
            for index, clip in enumerate(clips):
                if self.loses and index % 5 == 4:
                    continue
                announced[self.name] += [clip, clip] if self.loses else [clip]
            if self.loses:
                self.random.shuffle(announced[self.name])

    def receive(self, count: int, wait_s: float) -> list[str]:
        with lock:
            taken, announced[self.name][:count] = announced[self.name][:count], []
        if not taken:
            time.sleep(min(wait_s, 0.02))
        return taken

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with the topic above, found as a user's own is."""
    metadata = tmp_path / "site" / "lossy-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lossy\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        f"[worldmodel.flow.topics]\nlossy = {__name__}:{LossyTopic.__name__}\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    imports._installed.cache_clear()
    announced.clear()
    yield
    imports._installed.cache_clear()


@pytest.mark.parametrize("where", ["lossy://broker/lossy", "lossy://broker/exact"])
def test_a_flow_with_a_broker_gives_the_log_of_one_without(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "LOOK_S", 0.5)
    (tmp_path / "files").mkdir()
    table = write_table(tmp_path / "files", 30)
    calls = tmp_path / "calls"
    monkeypatch.setenv(CALLS, str(calls))
    stages = {"read": {"workers": 2}, "measure": {"settings": {"least": 105}}, "halves": {}, "sum": {}}
    segments = []
    for folder, topics in (("without", ""), ("with", where)):
        calls.write_text("")
        config = flow_config(tmp_path / folder, table, stages, topics=topics)
        run_flow(config)
        count = Counter(line.split()[0] for line in calls.read_text().splitlines())
        assert count == {"read": 30, "measure": 30, "halves": 25, "sum": 50}, "each clip once in each stage"
        log = Log(config.place("log"))
        segments.append([log.storage.read(f"{number:06d}.json") for number in range((log.end() or (0,))[0])])
    assert segments[0] == segments[1]
    assert len(segments[0]) == 7


def test_flows_that_share_a_broker_keep_their_clips(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    table, url = write_table(tmp_path / "files", 16), "lossy://broker/exact"
    mine, other = (flow_config(tmp_path / name, table, topics=url) for name in ("mine", "other"))
    received = {}
    with closing(Catalog(mine.place("catalog"), Chain.of(mine))) as catalog:
        feeding = Feeder(mine, catalog)
        feeding.feed()
        feeding.feed()
        feeding.close()
    for name, config in (("mine", mine), ("other", other)):
        with closing(Catalog(config.place("catalog"), Chain.of(config))) as catalog:
            first = catalog.chain.names[0]
            received[name] = len(open_topics(config, catalog.chain, [first])[first].receive(99, 0.0))
    assert received == {"mine": 16, "other": 0}


@pytest.mark.parametrize("url", ["redis://127.0.0.1", "encode"])
def test_other_brokers_are_refused(url: str, tmp_path: Path) -> None:
    config = flow_config(tmp_path, tmp_path, topics=url)
    with pytest.raises(ConfigError, match="lossy"):
        open_topics(config, Chain.of(config))


def test_a_missing_package_of_a_plug_in_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pulsar", None)
    monkeypatch.delitem(sys.modules, "worldmodel.plugins.pulsar.topic", raising=False)
    config = flow_config(tmp_path, tmp_path, topics="pulsar://127.0.0.1")
    with pytest.raises(ConfigError, match=r"worldmodel\[pulsar\]"):
        open_topics(config, Chain.of(config))
