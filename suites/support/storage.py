"""A storage server in a process of its own, on the substrate of this run."""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.reach import DMABUF

from gdrkit.harness.needs import needs, verbs
from gdrkit.storage.client import StorageClient
from gdrkit.storage.token import read_token
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.cuda import Device
    from gdrkit.storage.iobuffer import IOBuffer
    from gdrkit.verbs import Nic

__all__ = ["KINDS", "Memory", "Service", "serving"]

# For the fixture `memory`.
KINDS = [
    pytest.param("host", marks=needs(verbs.nic()), id="host"),
    pytest.param("device", marks=DMABUF, id="device"),
]

_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 20.0


@dataclass
class Service:
    """A running server; `root` is its store."""

    root: Path
    process: subprocess.Popen[bytes]
    address: str
    log: Path
    clients: list[StorageClient] = field(default_factory=list)

    def connect(self, *nics: Nic, token: str | None = None, timeout_ms: float = 30_000) -> StorageClient:
        """A client by these NICs, with the token of the store unless another is given."""
        token = self.token() if token is None else token
        return StorageClient(self.address, token=token, nics=nics or None, timeout_ms=timeout_ms)

    def token(self) -> str:
        """What its clients must say."""
        return read_token(self.root)

    def said(self) -> str:
        """What it wrote on standard error."""
        return self.log.read_text()

    def descriptors(self) -> list[str]:
        """What it has open."""
        found = []
        for each in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append(str(each.readlink()))
        return sorted(found)

    def kill(self) -> None:
        """SIGKILL, and wait for that."""
        self.process.kill()
        self.process.wait(_END_TIMEOUT_S)


@dataclass(frozen=True)
class Memory:
    """Makes registered memory of one kind; ``device`` is None for the host's."""

    device: Device | None

    @contextlib.contextmanager
    def holding(self, client: StorageClient, data: bytes) -> Iterator[IOBuffer]:
        """New memory with these bytes, that the server can reach."""
        if self.device is None:
            with client.register(bytearray(data)) as buffer:
                yield buffer
        else:
            with self.device.allocate(max(len(data), MIB)) as memory:
                memory.write(data, offset_bytes=0)
                with client.register(memory) as whole:
                    yield whole.subrange(offset_bytes=0, length_bytes=len(data))

    @staticmethod
    def bytes_of(buffer: IOBuffer) -> bytes:
        """Its bytes, as its owner sees them."""
        return buffer.copy_out()


@contextlib.contextmanager
def serving(root: Path, log: Path, *options: str) -> Iterator[Service]:
    """Serve `root` until the block ends; the server must then end by itself, and well."""
    root.mkdir(exist_ok=True)
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "gdrkit", "serve", "--store", str(root), *options],
            stdout=subprocess.PIPE,
            stderr=errors,
            stdin=subprocess.DEVNULL,
        )
    try:
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], _START_TIMEOUT_S)
        line = process.stdout.readline().decode() if readable else ""
        assert line.startswith("gdrkit serve:"), (line, log.read_text())
        address = line.partition(" at ")[2].partition(" by ")[0]
        yield Service(root=root, process=process, address=address, log=log)
        if process.poll() is None:
            process.terminate()
            assert process.wait(_END_TIMEOUT_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait(_END_TIMEOUT_S)
        assert process.stdout is not None
        process.stdout.close()
