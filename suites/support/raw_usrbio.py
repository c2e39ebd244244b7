"""An application of usrbio without a client library: the agent's socket and a ring, byte by byte.

What the C library hides can be said wrongly here: names, targets, descriptors, entries of a ring.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Self

from gdrkit.usrbio.agent import protocol
from gdrkit.usrbio.agent.protocol import AgentHello, AgentMessage, AgentRequest, PublishRequest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

__all__ = ["AgentProcess", "RawClient", "RawIov", "RawRing", "Refusal", "shared_memory"]

_SHARED = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory is.
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.sem_open.restype = ctypes.c_void_p
_INDICES = struct.Struct("=iiii")
_ARGUMENTS = struct.Struct("=16sQQQQQ")
_COMPLETION = struct.Struct("=iiqQ")
_SUBMISSION = struct.Struct("=iiQ")
_SEMAPHORE_BYTES, _SPARE_BYTES = 32, 4096
_START_TIMEOUT_S = _END_TIMEOUT_S = 60.0


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Refusal(Exception):
    """The agent answered with an errno."""

    def __init__(self, number: int, sentence: str) -> None:
        super().__init__(f"{errno.errorcode.get(number, number)}: {sentence}")
        self.errno = number
        self.sentence = sentence


def shared_memory(mount: Path) -> set[Path]:
    """The files of /dev/shm, memory and semaphores, to which the links of a mount lead now."""
    found = set()
    for link in (mount / "3fs-virt" / "iovs").iterdir():
        # The agent may take one away meanwhile: a client that has ended leaves it to do.
        with contextlib.suppress(FileNotFoundError):
            found.add(link.readlink())
    return found


class AgentProcess:
    """``gdrkit agent`` of a plain mount, unless its options say otherwise, ready; use it as a context manager."""

    def __init__(self, mount: Path, *options: str) -> None:
        self.mount = mount
        store = () if "--server" in options else ("--store", str(mount))
        command = [sys.executable, "-m", "gdrkit", "agent", str(mount), *store, "--json", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.ended: dict[str, object] = {}
        self.errors = ""
        try:
            self.ready = json.loads(self._line())
        except BaseException:
            self.kill()
            raise

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        output, self.errors = self.process.communicate(timeout=_END_TIMEOUT_S)
        if output:
            self.ended = json.loads(output)
        return self.process.returncode

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        _output, self.errors = self.process.communicate(timeout=_END_TIMEOUT_S)

    @property
    def statistics(self) -> dict[str, int]:
        """What it counted; after :meth:`terminate`."""
        found = self.ended["statistics"]
        assert isinstance(found, dict)
        return found

    def children(self) -> list[int]:
        """Its child processes; there is one at most, the storage server."""
        found: list[int] = []
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            # A thread that has ended meanwhile has left its children to another one.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += [int(number) for number in (task / "children").read_text().split()]
        return found

    def server_process_id(self) -> int:
        """Of its storage server."""
        return self.children()[0]

    def _line(self) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], _START_TIMEOUT_S)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            # One that is late still runs, and would have whoever reads its errors wait for its end.
            self.process.kill()
            message = f"the agent is not ready: {self.process.stderr.read() if self.process.stderr else ''}"
            raise AssertionError(message)
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.terminate()
        if error is not None:
            error.add_note(f"the agent said: {self.errors}, {self.ended}")


class _Shared:
    """Named shared memory of this process."""

    def __init__(self, length_bytes: int) -> None:
        self.id = uuid.uuid4()
        self.path = _SHARED / f"hf3fs-iov-{self.id}"
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(self.fd, length_bytes)
        self.memory = mmap.mmap(self.fd, length_bytes)

    def close(self) -> None:
        """Remove it."""
        self.memory.close()
        os.close(self.fd)
        self.path.unlink(missing_ok=True)


class RawIov(_Shared):
    """Host memory for data."""

    def name(self, suffix: str = "") -> str:
        """Of its link."""
        return f"{self.id}{suffix}"


class RawRing(_Shared):
    """A ring that speaks the plain protocol of 3FS."""

    def __init__(self, entries: int, *, for_read: bool, io_depth: int = 0, suffix: str = "") -> None:
        self.slots = entries + 1
        super().__init__(
            _INDICES.size
            + (_ARGUMENTS.size + _COMPLETION.size + _SUBMISSION.size) * self.slots
            + _SEMAPHORE_BYTES
            + _SPARE_BYTES
        )
        self.for_read = for_read
        self.link = f"{self.id}.{'r' if for_read else 'w'}{io_depth}{suffix}"
        self.arguments = _INDICES.size
        self.completions = self.arguments + _ARGUMENTS.size * self.slots
        self.submissions = self.completions + _COMPLETION.size * self.slots
        self.semaphore = self.submissions + _SUBMISSION.size * self.slots
        self._slot = 0
        self._view = (ctypes.c_char * len(self.memory)).from_buffer(self.memory)
        # Of whole words: struct would clear the bytes before it writes them, and the agent looks at any time.
        self._indices = (ctypes.c_int32 * 4).from_buffer(self.memory)
        self._submit: int | None = None

    def attach(self, mount: Path) -> None:
        """Find the submit semaphore of its priority."""
        link = "submit-ios" + next((part for part in (".ph", ".pl") if self.link.endswith(part)), "")
        target = (mount / "3fs-virt" / "iovs" / link).readlink()
        self._submit = _LIBC.sem_open(f"/{target.name.removeprefix('sem.')}".encode(), 0)
        assert self._submit

    def index(self, number: int) -> int:
        """Submission head 0 and tail 1, completion head 2 and tail 3."""
        return self._indices[number]

    def set_index(self, number: int, value: int) -> None:
        """Write one of the four."""
        self._indices[number] = value

    def prepare(
        self, iov: bytes, *, inode: int, length: int, buffer_offset: int = 0, file_offset: int = 0, userdata: int = 0
    ) -> int:
        """Write an entry; gives its index."""
        slot, self._slot = self._slot, (self._slot + 1) % self.slots
        _ARGUMENTS.pack_into(
            self.memory,
            self.arguments + slot * _ARGUMENTS.size,
            iov,
            buffer_offset,
            inode,
            file_offset,
            length,
            userdata,
        )
        self.submit_index(slot, userdata)
        return slot

    def submit_index(self, index: int, userdata: int = 0) -> None:
        """Write a submission that names any index."""
        head = self.index(0)
        _SUBMISSION.pack_into(self.memory, self.submissions + head * _SUBMISSION.size, index, 0, userdata)
        self.set_index(0, (head + 1) % self.slots)

    def submit(self) -> None:
        """Wake the agent."""
        assert _LIBC.sem_post(ctypes.c_void_p(self._submit)) == 0

    def wait(self, count: int, *, timeout_s: float = 30.0) -> list[tuple[int, int, int]]:
        """(index, result, userdata) of so many completions, in their order; fewer when it takes too long."""
        until = time.time() + timeout_s
        found: list[tuple[int, int, int]] = []
        limit = _Time(int(until), int(until % 1 * 1e9))
        address = ctypes.addressof(self._view) + self.semaphore
        while len(found) < count:
            while self.index(3) != self.index(2) and len(found) < count:
                tail = self.index(3)
                index, _, result, userdata = _COMPLETION.unpack_from(
                    self.memory, self.completions + tail * _COMPLETION.size
                )
                found.append((index, result, userdata))
                self.set_index(3, (tail + 1) % self.slots)
            if len(found) == count:
                break
            ended = _LIBC.sem_timedwait(ctypes.c_void_p(address), ctypes.byref(limit)) != 0
            if ended and ctypes.get_errno() == errno.ETIMEDOUT:
                break
        return found

    def close(self) -> None:
        """Remove it."""
        del self._view, self._indices
        if self._submit:
            _LIBC.sem_close(ctypes.c_void_p(self._submit))
        super().close()


class RawClient:
    """A connection to an agent; use it as a context manager."""

    def __init__(self, mount: Path) -> None:
        self.mount = mount
        self._sequence = 0
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(30)
        folder = os.open(mount / "3fs-virt", os.O_PATH)
        try:
            self.socket.connect(f"/proc/self/fd/{folder}/agent.sock")
        finally:
            os.close(folder)

    def ask(self, request: AgentRequest, payload: bytes, descriptors: Sequence[int] = ()) -> bytes:
        """Send a request; the payload of its reply."""
        self._sequence += 1
        message = AgentMessage(request, self._sequence, payload, descriptors=len(descriptors))
        self.send(protocol.pack(message), descriptors)
        reply = protocol.parse(self.receive(), descriptors=0, is_reply=True)
        assert (reply.request, reply.sequence) == (request, self._sequence)
        if reply.status:
            raise Refusal(reply.status, reply.payload.decode())
        return reply.payload

    def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send anything."""
        socket.send_fds(self.socket, [data], list(descriptors))

    def receive(self) -> bytes:
        """The next message; empty when the agent closed the connection."""
        return self.socket.recv(protocol.MESSAGE_BYTES_MAX)

    def hello(self) -> AgentHello:
        """Say who this is."""
        payload = protocol.pack_hello(AgentHello(0, os.getpid(), "raw"))
        return protocol.parse_hello(self.ask(AgentRequest.HELLO, payload))

    def publish(self, name: str, target: str, handle: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        """PublishRequest anything."""
        self.ask(AgentRequest.PUBLISH, protocol.pack_publish(PublishRequest(name, target, handle)), descriptors)

    def publish_iov(self, iov: RawIov, suffix: str = "") -> None:
        """PublishRequest memory."""
        self.publish(iov.name(suffix), str(iov.path))

    def publish_ring(self, ring: RawRing) -> None:
        """PublishRequest a ring, and have it ready."""
        self.publish(ring.link, str(ring.path))
        ring.attach(self.mount)

    def unpublish(self, name: str) -> None:
        """Take it back."""
        self.ask(AgentRequest.UNPUBLISH, protocol.pack_name(name))

    def register_file(self, descriptor: int) -> int:
        """Register a file; its inode."""
        payload = self.ask(AgentRequest.REGISTER_FILE, protocol.pack_number(0), [descriptor])
        return protocol.parse_number(payload)

    def close(self) -> None:
        """End the connection."""
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
