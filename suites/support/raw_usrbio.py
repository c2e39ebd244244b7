"""A client of usrbio, the user-space I/O of 3FS, that does not use the client library of gdrkit.

It writes to the socket of the agent (the process that serves the clients) and to the memory of a ring. So a case can
send link names, link targets, file descriptors and ring entries that the library never sends. :class:`AgentProcess`
starts the agent.
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
    from collections.abc import Mapping, Sequence
    from types import TracebackType

__all__ = ["AgentProcess", "LinkClient", "RawClient", "RawIov", "RawRing", "Refusal", "list_shared_memory_files"]

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder of shm_open(3).
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.sem_open.restype = ctypes.c_void_p
# Layout of a ring in memory: the four indices, an array of arguments, an array of completions and an array of
# submissions (each with one element per slot), and the completion semaphore.
_INDICES = struct.Struct("=iiii")
# Arguments of a transfer: id of the iov, offset in the iov, inode of the file, offset in the file, length, userdata.
_ARGUMENTS = struct.Struct("=16sQQQQQ")
# A completion: index of the slot, reserved, result, userdata.
_COMPLETION = struct.Struct("=iiqQ")
# A submission: index of the slot, reserved, userdata.
_SUBMISSION = struct.Struct("=iiQ")
# The four indices of a ring: head and tail of the submissions, head and tail of the completions.
_SUBMISSION_HEAD, _SUBMISSION_TAIL, _COMPLETION_HEAD, _COMPLETION_TAIL = range(4)
# Size of the semaphore (sem_t), and of the unused memory that 3FS allocates after the semaphore.
_SEMAPHORE_BYTES, _UNUSED_BYTES = 32, 4096
_START_TIMEOUT_S = _END_TIMEOUT_S = 60.0


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Refusal(Exception):
    """The agent replied with an errno and a text."""

    def __init__(self, error_number: int, text: str) -> None:
        super().__init__(f"{errno.errorcode.get(error_number, error_number)}: {text}")
        self.errno = error_number
        self.text = text


def list_shared_memory_files(mount: Path) -> set[Path]:
    """Return the targets of all published links of a mount: files of memory and of semaphores in /dev/shm."""
    targets = set()
    for link in (mount / "3fs-virt" / "iovs").iterdir():
        # The agent may remove the link of a client that has ended.
        with contextlib.suppress(FileNotFoundError):
            targets.add(link.readlink())
    return targets


class AgentProcess:
    """A running ``gdrkit agent``, the process that serves usrbio clients. Use it as a context manager.

    Parameters
    ----------
    mount : Path
        The mount point, a normal folder. It is also the store, unless the options name a storage server.
    options : str
        Options of the command.
    environ : mapping of str to str
        The environment of the agent.

    Attributes
    ----------
    start_report : object
        The JSON that the agent printed at its start.
    end_report : dict
        The JSON that the agent printed at its end.
    error_output : str
        The text that the agent wrote to standard error; empty until the agent has ended.
    """

    def __init__(self, mount: Path, *options: str, environ: Mapping[str, str] = os.environ) -> None:
        self.mount = mount
        store_options = () if "--server" in options else ("--store", str(mount))
        command = [sys.executable, "-m", "gdrkit", "agent", str(mount), *store_options, "--json", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)
        self.end_report: dict[str, object] = {}
        self.error_output = ""
        try:
            self.start_report = json.loads(self._read_first_line())
        except BaseException:
            self.kill()
            raise

    def terminate(self) -> int:
        """Send SIGTERM, wait for the end, and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        output, self.error_output = self.process.communicate(timeout=_END_TIMEOUT_S)
        if output:
            self.end_report = json.loads(output)
        return self.process.returncode

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end."""
        self.process.kill()
        _output, self.error_output = self.process.communicate(timeout=_END_TIMEOUT_S)

    @property
    def statistics(self) -> dict[str, int]:
        """The counters that the agent printed at its end, after :meth:`terminate`."""
        statistics = self.end_report["statistics"]
        assert isinstance(statistics, dict)
        return statistics

    def list_child_process_ids(self) -> list[int]:
        """Return the ids of the agent's child processes. The only possible child is its storage server."""
        process_ids: list[int] = []
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            # A thread may end meanwhile. The kernel then lists its children at another thread.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                process_ids += [int(process_id) for process_id in (task / "children").read_text().split()]
        return process_ids

    def find_server_process_id(self) -> int:
        """Return the id of the storage server's process."""
        return self.list_child_process_ids()[0]

    def _read_first_line(self) -> str:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], _START_TIMEOUT_S)
        line = self.process.stdout.readline() if readable else ""
        if not line:
            # Kill the process first, because reading its standard error below returns only after the process has ended.
            self.process.kill()
            message = (
                f"the agent printed no line at its start: {self.process.stderr.read() if self.process.stderr else ''}"
            )
            raise AssertionError(message)
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.terminate()
        if error is not None:
            error.add_note(f"output of the agent: {self.error_output}, {self.end_report}")


class _SharedMemory:
    """Named POSIX shared memory that this process creates."""

    def __init__(self, length_bytes: int) -> None:
        self.id = uuid.uuid4()
        self.path = _SHARED_MEMORY / f"hf3fs-iov-{self.id}"
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(self.fd, length_bytes)
        self.memory = mmap.mmap(self.fd, length_bytes)

    def close(self) -> None:
        """Unmap and remove the memory."""
        self.memory.close()
        os.close(self.fd)
        self.path.unlink(missing_ok=True)


class RawIov(_SharedMemory):
    """An iov: shared host memory for the data of reads and writes."""

    def name(self, suffix: str = "") -> str:
        """Return the name of the link that publishes the memory, with `suffix` appended."""
        return f"{self.id}{suffix}"


class RawRing(_SharedMemory):
    """A ring with the memory layout of 3FS, without the extensions of gdrkit."""

    def __init__(self, entry_count: int, *, for_read: bool, io_depth: int = 0, suffix: str = "") -> None:
        # A ring with n usable entries has n + 1 slots, so that a full ring differs from an empty one.
        self.slot_count = entry_count + 1
        super().__init__(
            _INDICES.size
            + (_ARGUMENTS.size + _COMPLETION.size + _SUBMISSION.size) * self.slot_count
            + _SEMAPHORE_BYTES
            + _UNUSED_BYTES
        )
        self.for_read = for_read
        # The suffix can hold the priority: .ph (high) or .pl (low).
        self.link_name = f"{self.id}.{'r' if for_read else 'w'}{io_depth}{suffix}"
        # Offsets in the memory, in bytes.
        self._arguments_offset = _INDICES.size
        self._completions_offset = self._arguments_offset + _ARGUMENTS.size * self.slot_count
        self._submissions_offset = self._completions_offset + _COMPLETION.size * self.slot_count
        self.semaphore_offset = self._submissions_offset + _SUBMISSION.size * self.slot_count
        self._next_slot = 0
        self._view = (ctypes.c_char * len(self.memory)).from_buffer(self.memory)
        # The agent reads the indices at any time. ctypes writes an index with one store. struct writes it byte by byte,
        # so the agent could read a half-written index.
        self._indices = (ctypes.c_int32 * 4).from_buffer(self.memory)
        self._submit_semaphore_address: int | None = None

    def attach(self, mount: Path) -> None:
        """Open the submit semaphore of the agent for the priority of the ring."""
        semaphore_link = "submit-ios" + next(
            (priority for priority in (".ph", ".pl") if self.link_name.endswith(priority)), ""
        )
        semaphore_path = (mount / "3fs-virt" / "iovs" / semaphore_link).readlink()
        self._submit_semaphore_address = _LIBC.sem_open(f"/{semaphore_path.name.removeprefix('sem.')}".encode(), 0)
        assert self._submit_semaphore_address

    def index(self, index_number: int) -> int:
        """Return one of the four indices: 0 and 1 are head and tail of the submissions, 2 and 3 of the completions."""
        return self._indices[index_number]

    def set_index(self, index_number: int, new_value: int) -> None:
        """Set one of the four indices, which have the same numbers as in :meth:`index`."""
        self._indices[index_number] = new_value

    def prepare(
        self, iov_id: bytes, *, inode: int, length: int, buffer_offset: int = 0, file_offset: int = 0, userdata: int = 0
    ) -> int:
        """Write the arguments of a transfer and its submission, and return the index of the slot."""
        slot, self._next_slot = self._next_slot, (self._next_slot + 1) % self.slot_count
        _ARGUMENTS.pack_into(
            self.memory,
            self._arguments_offset + slot * _ARGUMENTS.size,
            iov_id,
            buffer_offset,
            inode,
            file_offset,
            length,
            userdata,
        )
        self.write_submission(slot, userdata)
        return slot

    def write_submission(self, slot: int, userdata: int = 0) -> None:
        """Write a submission that names any slot number, also an invalid one."""
        head = self.index(_SUBMISSION_HEAD)
        _SUBMISSION.pack_into(self.memory, self._submissions_offset + head * _SUBMISSION.size, slot, 0, userdata)
        self.set_index(_SUBMISSION_HEAD, (head + 1) % self.slot_count)

    def submit(self) -> None:
        """Post the submit semaphore, so that the agent reads the submissions of the ring."""
        assert _LIBC.sem_post(ctypes.c_void_p(self._submit_semaphore_address)) == 0

    def wait(self, count: int, *, timeout_s: float = 30.0) -> list[tuple[int, int, int]]:
        """Return slot index, result and userdata of `count` completions, or of fewer completions after the timeout."""
        # sem_timedwait(3) needs a deadline on the wall clock.
        end_s = time.time() + timeout_s
        completions: list[tuple[int, int, int]] = []
        deadline = _Timespec(int(end_s), int(end_s % 1 * 1e9))
        semaphore_address = ctypes.addressof(self._view) + self.semaphore_offset
        while len(completions) < count:
            while self.index(_COMPLETION_TAIL) != self.index(_COMPLETION_HEAD) and len(completions) < count:
                tail = self.index(_COMPLETION_TAIL)
                slot, _, result, userdata = _COMPLETION.unpack_from(
                    self.memory, self._completions_offset + tail * _COMPLETION.size
                )
                completions.append((slot, result, userdata))
                self.set_index(_COMPLETION_TAIL, (tail + 1) % self.slot_count)
            if len(completions) == count:
                break
            # The wait goes on after a signal (EINTR), and ends only at the timeout.
            has_failed = _LIBC.sem_timedwait(ctypes.c_void_p(semaphore_address), ctypes.byref(deadline)) != 0
            if has_failed and ctypes.get_errno() == errno.ETIMEDOUT:
                break
        return completions

    def close(self) -> None:
        """Close the submit semaphore, and unmap and remove the memory."""
        del self._view, self._indices
        if self._submit_semaphore_address:
            _LIBC.sem_close(ctypes.c_void_p(self._submit_semaphore_address))
        super().close()


class RawClient:
    """A connection to the socket of an agent. Use it as a context manager."""

    def __init__(self, mount: Path) -> None:
        self.mount = mount
        self._sequence = 0
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(30)
        # The path of a Unix socket is limited to 107 bytes, so the client connects through a descriptor of the folder.
        folder_fd = os.open(mount / "3fs-virt", os.O_PATH)
        try:
            self.socket.connect(f"/proc/self/fd/{folder_fd}/agent.sock")
        finally:
            os.close(folder_fd)

    def request(self, request: AgentRequest, payload: bytes, descriptors: Sequence[int] = ()) -> bytes:
        """Send a request, and return the payload of the reply. Raise :class:`Refusal` if the reply has an errno."""
        self._sequence += 1
        message = AgentMessage(request, self._sequence, payload, descriptor_count=len(descriptors))
        self.send(protocol.pack(message), descriptors)
        reply = protocol.parse(self.receive(), descriptor_count=0, is_reply=True)
        assert (reply.request_type, reply.sequence) == (request, self._sequence)
        if reply.status:
            raise Refusal(reply.status, reply.payload.decode())
        return reply.payload

    def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send `data` as a message, even if it is not a valid message."""
        socket.send_fds(self.socket, [data], list(descriptors))

    def receive(self) -> bytes:
        """Return the next message, or no bytes if the agent has closed the connection."""
        return self.socket.recv(protocol.MESSAGE_BYTES_MAX)

    def hello(self) -> AgentHello:
        """Send HELLO, the first request of a connection, and return the reply."""
        payload = protocol.pack_hello(AgentHello(0, os.getpid(), "raw"))
        return protocol.parse_hello(self.request(AgentRequest.HELLO, payload))

    def publish(self, link_name: str, target: str, handle: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        """Publish a link with any name and target, also invalid ones."""
        self.request(
            AgentRequest.PUBLISH, protocol.pack_publish(PublishRequest(link_name, target, handle)), descriptors
        )

    def publish_iov(self, iov: RawIov, suffix: str = "") -> None:
        """Publish an iov."""
        self.publish(iov.name(suffix), str(iov.path))

    def publish_ring(self, ring: RawRing) -> None:
        """Publish a ring, and open its submit semaphore."""
        self.publish(ring.link_name, str(ring.path))
        ring.attach(self.mount)

    def unpublish(self, link_name: str) -> None:
        """Remove the link `link_name` that :meth:`publish` created."""
        self.request(AgentRequest.UNPUBLISH, protocol.pack_name(link_name))

    def register_file(self, descriptor: int) -> int:
        """Register a file, and return its inode number."""
        payload = self.request(AgentRequest.REGISTER_FILE, protocol.pack_number(0), [descriptor])
        return protocol.parse_number(payload)

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class LinkClient:
    """A client that uses only the mount, like the client library of 3FS, and never connects to the agent's socket.

    It publishes memory by symbolic links, and names a file by the inode that stat(2) returns.
    """

    def __init__(self, mount: Path) -> None:
        self.mount = mount
        self.iovs_folder = mount / "3fs-virt" / "iovs"

    def publish_iov(self, iov: RawIov, suffix: str = "") -> None:
        """Publish an iov."""
        (self.iovs_folder / iov.name(suffix)).symlink_to(iov.path)

    def publish_ring(self, ring: RawRing) -> None:
        """Publish a ring, remove its file in /dev/shm as 3FS does, and open its submit semaphore."""
        (self.iovs_folder / ring.link_name).symlink_to(ring.path)
        ring.path.unlink()
        ring.attach(self.mount)

    def unpublish(self, link_name: str) -> None:
        """Remove a link."""
        (self.iovs_folder / link_name).unlink()
