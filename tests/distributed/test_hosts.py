"""A run on two hosts goes on when one of them is lost, from its last checkpoint and on what is left.

The hosts are network namespaces on this machine, joined by a link that is removed; where namespaces are not
permitted, they are two agents of torchrun on one address.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from worldmodel import config as configs
from worldmodel.config import ActionConfig, DataConfig, SourceConfig, StageConfig, TrainConfig, TrainedConfig
from worldmodel.models.world_model import WorldModel
from worldmodel.train.run.log import METRICS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="uses network namespaces and /proc"),
]
STEPS = 40
HANG_TIMEOUT_S = 20


@dataclass(frozen=True)
class Host:
    """A place where processes run, and its address; number 0 holds the rendezvous."""

    number: int
    address: str
    interface: str
    namespace: str = ""

    def start(self, rendezvous: str, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
        """Start torchrun as docs/how-to/multi-node.md does."""
        inside = ["ip", "netns", "exec", self.namespace] if self.namespace else []
        command = [sys.executable, "-P", "-m", "torch.distributed.run", "--nnodes", "1:2"]
        command += ["--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-id", "run"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", rendezvous, "--local-addr", self.address]
        command += ["--rdzv-conf", f"last_call_timeout=5,is_host={self.number == 0}"]
        command += ["-m", "worldmodel.train.finetune", *arguments]
        # Workers import the package that is installed, not the folder worldmodel/ of a clone.
        environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
        environment["GLOO_SOCKET_IFNAME"] = self.interface
        with log.open("wb") as file:
            return subprocess.Popen([*inside, *command], stdout=file, stderr=file, env=environment)

    def lose(self, agent: subprocess.Popen[bytes]) -> None:
        """Disconnect the host, so that no message leaves it, and kill its processes."""
        if self.namespace:
            ip("-n", self.namespace, "link", "set", self.interface, "down")
        for pid in [agent.pid, *descendants(agent.pid)]:
            os.kill(pid, signal.SIGKILL)
        agent.wait()


def ip(*arguments: str) -> bool:
    """Run `ip`; return whether it was permitted."""
    try:
        return subprocess.run(["ip", *arguments], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and theirs."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [found for child in map(int, children) for found in (child, *descendants(child))]


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with a link between them."""
    names = [f"wm{index}-{os.getpid()}" for index in range(2)]
    try:
        if not all(ip("netns", "add", name) for name in names):
            yield Host(0, "127.0.0.1", "lo"), Host(1, "127.0.0.1", "lo")
            return
        ends = [f"v{index}-{os.getpid()}" for index in range(2)]
        assert ip(
            "link", "add", ends[0], "netns", names[0], "type", "veth", "peer", ends[1], "netns", names[1]
        )
        made = [Host(i, f"10.97.0.{i + 1}", ends[i], names[i]) for i in range(2)]
        for host in made:
            assert ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
            assert ip("-n", host.namespace, "link", "set", host.interface, "up")
            assert ip("-n", host.namespace, "link", "set", "lo", "up")
        yield made[0], made[1]
    finally:
        for name in names:
            ip("netns", "del", name)


def lines(run: Path) -> list[dict[str, float]]:
    """Read the losses that a run has logged so far."""
    text = (run / METRICS).read_text() if (run / METRICS).is_file() else ""
    records = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [record for record in records if "rounds/loss" in record]


def wait(condition: Callable[[], bool], agent: subprocess.Popen[bytes], log: Path, seconds: float) -> float:
    """Wait for a condition while an agent runs; returns the seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert agent.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() - began < seconds, log.read_text()[-3000:]
        time.sleep(0.1)
    return time.monotonic() - began


def test_a_run_goes_on_when_a_host_is_lost(
    hosts: tuple[Host, Host], make_model: Callable[..., WorldModel], tmp_path: Path
) -> None:
    action = ActionConfig(text={"max_tokens": 128})
    start = make_model(image_size=64, action=action).save_pretrained(tmp_path / "start")
    train = {"vision": TrainedConfig()}
    stage = StageConfig("state", steps=STEPS, batch_size=2, rounds=1, tasks={"rounds": 1.0}, train=train)
    config = TrainConfig(
        init_from=str(start),
        stages={"state": stage},
        data=DataConfig({"shapes": SourceConfig("shapes")}),
        precision="fp32",
        checkpoint_every=4,
        log_every=1,
        hang_timeout_s=HANG_TIMEOUT_S,
    )
    (tmp_path / "config.yaml").write_text(json.dumps(configs.to_dict(dataclasses.replace(config))))
    run, logs = tmp_path / "run", [tmp_path / f"host-{index}.log" for index in range(2)]
    arguments = (f"{hosts[0].address}:29417", str(tmp_path / "config.yaml"), f"run_dir={run}")
    agents = [host.start(arguments[0], log, *arguments[1:]) for host, log in zip(hosts, logs, strict=True)]
    try:
        checkpoints = run / "checkpoints"
        wait(lambda: bool(list(checkpoints.glob("0*"))) and len(lines(run)) > 9, agents[0], logs[0], 200)
        assert json.loads((run / "config.json").read_text())["origin"]["num_processes"] == 2
        hosts[1].lose(agents[1])
        before = lines(run)
        last = before[-1]["step"]
        seconds = wait(lambda: lines(run)[-1]["step"] > last + 1, agents[0], logs[0], 200)
        print(f"first new step {seconds:.1f} s after the loss of a host")
        assert agents[0].wait(300) == 0, logs[0].read_text()[-3000:]
    finally:
        for agent in agents:
            for pid in [agent.pid, *descendants(agent.pid)] if agent.poll() is None else ():
                os.kill(pid, signal.SIGKILL)
    assert json.loads((run / "config.json").read_text())["origin"]["num_processes"] == 1
    after = lines(run)[len(before) :]
    steps = [line["step"] for line in after]
    assert steps == list(range(int(steps[0]), STEPS + 1))
    assert (steps[0] - 1) % 4 == 0 and last - steps[0] <= 8  # from the last complete checkpoint on
    first = {line["step"]: line["rounds/loss"] for line in before}
    for line in after:  # steps that were lost are repeated, on one process instead of two
        if line["step"] in first:
            assert line["rounds/loss"] == pytest.approx(first[line["step"]], rel=1e-4)
    assert (run / "model" / "config.json").is_file()
