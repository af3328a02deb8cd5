"""Machines of a network, for tests: network namespaces of this machine, joined by a bridge."""

import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence

import pytest


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Machines:
    """Namespaces with host names of their own, which reach this machine and each other at a private network.

    Args:
        names: host names of the machines.
    """

    def __init__(self, *names: str) -> None:
        if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
            pytest.skip("network namespaces need root, iproute2 and util-linux")
        self.tag = f"wm{secrets.token_hex(3)}"
        subnet = f"10.{64 + secrets.randbelow(64)}.{secrets.randbelow(256)}"
        self.network, self.ip = f"{subnet}.0/24", f"{subnet}.1"
        """The network, and the address of this machine in it."""
        self.names: list[str] = []
        try:
            _ip("link", "add", self.tag, "type", "bridge")
            _ip("addr", "add", f"{self.ip}/24", "dev", self.tag)
            _ip("link", "set", self.tag, "up")
            for number, name in enumerate(names, 2):
                self._add(name, f"{subnet}.{number}/24", f"{self.tag}-{number}")
        except subprocess.CalledProcessError as error:
            self.close()
            pytest.skip(f"network namespaces cannot be made: {error.stderr.decode().strip()}")

    def _add(self, name: str, address: str, link: str) -> None:
        space = f"{self.tag}-{name}"
        _ip("netns", "add", space)
        self.names.append(name)
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", link, "master", self.tag, "up")
        _ip("-n", space, "addr", "add", address, "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", space, "link", "set", device, "up")

    def start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a command on a machine; the process is that of the command itself."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name, *command]
        return subprocess.Popen(["ip", "netns", "exec", f"{self.tag}-{name}", *named])

    def close(self) -> None:
        """Remove the machines; their processes have to be ended before."""
        for name in self.names:
            subprocess.run(["ip", "netns", "del", f"{self.tag}-{name}"], check=False)
        subprocess.run(["ip", "link", "del", self.tag], check=False, capture_output=True)
