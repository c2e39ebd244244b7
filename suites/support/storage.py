"""A storage server (``gdrkit serve``) as a child process, and registered memory for its clients."""

from __future__ import annotations

import contextlib
import select
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.memory_kinds import NEEDS_DMABUF
from support.processes import is_stopped, wait_until

from gdrkit.harness.needs import needs, verbs
from gdrkit.storage.client import StorageClient
from gdrkit.storage.token import read_token
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gdrkit.cuda import Device
    from gdrkit.storage.iobuffer import IOBuffer
    from gdrkit.verbs import Nic

__all__ = ["MEMORY_KINDS", "StorageMemoryKind", "StorageServer", "run_storage_server"]

# Parameters of the fixture `memory`.
MEMORY_KINDS = [
    pytest.param("host", marks=needs(verbs.nic()), id="host"),
    pytest.param("device", marks=NEEDS_DMABUF, id="device"),
]

_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 20.0


@dataclass
class StorageServer:
    """A running storage server.

    Attributes
    ----------
    root : Path
        Folder of the store.
    process : subprocess.Popen
        The process of the server.
    address : str
        Address to which clients connect, as the server printed it.
    log : Path
        File to which the server writes its standard error.
    clients : list of StorageClient
        Clients of the case.
    """

    root: Path
    process: subprocess.Popen[bytes]
    address: str
    log: Path
    clients: list[StorageClient] = field(default_factory=list)

    def connect(self, *nics: Nic, token: str | None = None, timeout_ms: float = 30_000) -> StorageClient:
        """Return a connected client.

        The client uses these NICs, or all NICs if none is given. Its token is `token`, or by default the token of the
        store.
        """
        token = self.token() if token is None else token
        return StorageClient(self.address, token=token, nics=nics or None, timeout_ms=timeout_ms)

    def token(self) -> str:
        """Return the token of the store."""
        return read_token(self.root)

    def read_log(self) -> str:
        """Return the text that the server wrote to standard error."""
        return self.log.read_text()

    def list_open_files(self) -> list[str]:
        """Return the paths of the files that the server has open."""
        paths = []
        for link in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                paths.append(str(link.readlink()))
        return sorted(paths)

    @contextlib.contextmanager
    def suspend(self) -> Iterator[None]:
        """Suspend the server by SIGSTOP until the block ends."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            wait_until(lambda: is_stopped(self.process.pid), "the server stops")
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the server with SIGKILL, and wait until its process has ended."""
        self.process.kill()
        self.process.wait(_END_TIMEOUT_S)


@dataclass(frozen=True)
class StorageMemoryKind:
    """The kind of memory that a case registers: memory of `device`, or host memory if `device` is None."""

    device: Device | None

    @contextlib.contextmanager
    def register_copy(self, client: StorageClient, data: bytes) -> Iterator[IOBuffer]:
        """Yield memory that is registered with the client and holds a copy of `data`."""
        if self.device is None:
            with client.register(bytearray(data)) as buffer:
                yield buffer
        else:
            with self.device.allocate(max(len(data), MIB)) as memory:
                memory.write(data, offset_bytes=0)
                with client.register(memory) as registered_buffer:
                    yield registered_buffer.subrange(offset_bytes=0, length_bytes=len(data))

    @staticmethod
    def read_buffer(buffer: IOBuffer) -> bytes:
        """Return the bytes of a buffer. The CUDA driver copies the bytes of device memory."""
        return buffer.copy_out()


@contextlib.contextmanager
def run_storage_server(root: Path, log: Path, *options: str, program: Sequence[str] = ()) -> Iterator[StorageServer]:
    """Run a server of the store `root` until the block ends. Then require that it exits with code 0 on SIGTERM.

    `program` is the start of the command, to which the arguments of ``gdrkit`` are appended; by default it runs gdrkit.
    """
    root.mkdir(exist_ok=True)
    with log.open("ab") as log_file:
        process = subprocess.Popen(
            [*(program or (sys.executable, "-m", "gdrkit")), "serve", "--store", str(root), *options],
            stdout=subprocess.PIPE,
            stderr=log_file,
            stdin=subprocess.DEVNULL,
        )
    try:
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], _START_TIMEOUT_S)
        # The line has the form "gdrkit serve: ... at ADDRESS by ...".
        start_line = process.stdout.readline().decode() if readable else ""
        assert start_line.startswith("gdrkit serve:"), (start_line, log.read_text())
        address = start_line.partition(" at ")[2].partition(" by ")[0]
        yield StorageServer(root=root, process=process, address=address, log=log)
        if process.poll() is None:
            process.terminate()
            assert process.wait(_END_TIMEOUT_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait(_END_TIMEOUT_S)
        assert process.stdout is not None
        process.stdout.close()
