"""An application of usrbio (user-space I/O) in a child process that a case controls step by step and may kill.

A case uses :class:`UsrbioClient`, which runs ``python -m fault.usrbio_client MOUNT FILE KIND``. KIND is the kind of
memory that the program uses: ``host`` or ``device``. The program reads commands as JSON, one per line. For each
command, the program prints its result or its errno as one line of JSON. So the case knows which command the program
executes.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from support.processes import WAIT_S, LineChildProcess

from gdrkit import cuda, pattern, usrbio

if TYPE_CHECKING:
    from gdrkit.usrbio.native_types import Ioring, Iovec

__all__ = ["RingMemory", "UsrbioClient", "list_mapped_memory_names", "list_published_link_names", "main"]

_SHM_FOLDER = Path("/dev/shm")  # noqa: S108 - the folder of POSIX shared memory.
_START_TIMEOUT_S = 60.0
# A client waits for completions at most WAIT_S. In addition, a busy machine may delay the reply of the client by this
# time.
_SCHEDULING_DELAY_S = 5.0
_IOV_BYTES = 8 << 20
_RING_ENTRIES = 64


class UsrbioClient(LineChildProcess):
    """The child process with the application, and the methods by which its parent sends it commands.

    Attributes
    ----------
    link_names : set of str
        Names of the symbolic links by which :meth:`open` published memory.
    """

    def __init__(self, mount: Path, file_path: Path, memory_kind: str) -> None:
        super().__init__("fault.usrbio_client", mount, file_path, memory_kind)
        self.link_names: set[str] = set()
        self._mount = mount

    def open(self) -> None:
        """Let the client open its file, its memory and its rings."""
        links_before = list_published_link_names(self._mount)
        self.call("open", timeout_s=_START_TIMEOUT_S)
        self.link_names = list_published_link_names(self._mount) - links_before

    def start(self, command: str, **arguments: object) -> None:
        """Send a command without waiting for its result, which :meth:`read_reply` returns."""
        self.write_line(json.dumps({"command": command, **arguments}))

    def read_reply(self, *, timeout_s: float = WAIT_S + _SCHEDULING_DELAY_S) -> dict[str, object]:
        """Return the reply to the last command: its result, or its errno and text."""
        reply: dict[str, object] = json.loads(self.read_line(timeout_s=timeout_s))
        return reply

    def call(self, command: str, *, timeout_s: float = WAIT_S + _SCHEDULING_DELAY_S, **arguments: object) -> object:
        """Send a command that must succeed, and return its result."""
        self.start(command, **arguments)
        reply = self.read_reply(timeout_s=timeout_s)
        assert "errno" not in reply, reply
        return reply["result"]

    def map_ring(self, agent_process_id: int, *, for_read: bool) -> RingMemory:
        """Map the ring of this client for reads or for writes, by the descriptor that the agent has open."""
        # The name of a ring's link ends with ".r" or ".w" (reads or writes) and the I/O depth, which is 0 here.
        (link_name,) = (name for name in self.link_names if f".{'r' if for_read else 'w'}0" in name)
        return RingMemory(agent_process_id, f"hf3fs-iov-{link_name.partition('.')[0]}")

    def close(self) -> None:
        """Let the client release everything and end."""
        self.start("close")
        self.read_reply()
        self.end(timeout_s=WAIT_S)


class RingMemory:
    """A read-only mapping of a ring. It stays valid after the client and the agent have ended.

    A ring begins with four 32-bit indices: submission head, submission tail, completion head, completion tail.
    """

    def __init__(self, agent_process_id: int, shared_memory_name: str) -> None:
        descriptor_path = next(
            link
            for link in Path(f"/proc/{agent_process_id}/fd").iterdir()
            if _read_link(link).startswith(f"{_SHM_FOLDER}/{shared_memory_name}")
        )
        descriptor = os.open(descriptor_path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(descriptor, 4096, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)

    @property
    def has_submissions(self) -> bool:
        """Whether the ring has submissions that are not completed."""
        head, tail, _, _ = struct.unpack_from("=4i", self._memory)
        return bool(head != tail)

    @property
    def has_completions(self) -> bool:
        """Whether the ring has completions that the client has not taken."""
        _, _, head, tail = struct.unpack_from("=4i", self._memory)
        return bool(head != tail)

    def close(self) -> None:
        """Unmap the ring."""
        self._memory.close()


def list_published_link_names(mount: Path) -> set[str]:
    """Return the names of the symbolic links by which clients have published memory in a mount."""
    names = {path.name for path in (mount / "3fs-virt" / "iovs").iterdir()}
    # The links "submit-ios..." name the submit semaphores of the agent.
    return {name for name in names if not name.startswith("submit-ios")}


def list_mapped_memory_names(process_id: int) -> set[str]:
    """Return the names of the shared memory of usrbio that a process has mapped."""
    map_lines = Path(f"/proc/{process_id}/maps").read_text().splitlines()
    # The sixth field of a line is the path of the mapped file.
    paths = (line.split(maxsplit=5)[5] for line in map_lines if f"{_SHM_FOLDER}/hf3fs-iov-" in line)
    return {path.removeprefix(f"{_SHM_FOLDER}/").removesuffix(" (deleted)") for path in paths}


def _read_link(link: Path) -> str:
    """Return the target of a link, or an empty text if the link no longer exists."""
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""


class _Application:
    """The application in the child process. Its public methods are the commands."""

    def __init__(self, mount: str, file_path: str, memory_kind: str) -> None:
        self._mount = mount
        self._file_path = file_path
        self._device: cuda.Device | None = cuda.Device(0) if memory_kind == "device" else None
        self._memory: cuda.DeviceMemory | None = None
        self._exit_stack = contextlib.ExitStack()
        self._rings: dict[bool, Ioring] = {}
        self._published_iovs: list[Iovec] = []

    def open(self) -> None:
        """Open the file, the memory, and a ring for each direction."""
        self._fd = os.open(self._file_path, os.O_RDWR | os.O_CLOEXEC)
        self._exit_stack.callback(os.close, self._fd)
        usrbio.register_fd(self._fd)
        self._exit_stack.callback(usrbio.deregister_fd, self._fd)
        if self._device is not None:
            self._memory = self._exit_stack.enter_context(self._device.allocate(_IOV_BYTES))
            self._iov = self._exit_stack.enter_context(usrbio.make_gpu_iovec(self._mount, self._memory))
        else:
            self._iov = self._exit_stack.enter_context(usrbio.create_iovec(self._mount, length_bytes=_IOV_BYTES))
        for for_read in (False, True):
            ring = usrbio.make_ioring(self._mount, _RING_ENTRIES, for_read=for_read)
            self._rings[for_read] = self._exit_stack.enter_context(ring)

    def publish(self) -> None:
        """Publish another iov (memory for transfers)."""
        if self._device is not None:
            self._published_iovs.append(usrbio.make_gpu_iovec(self._mount, length_bytes=1 << 20))
        else:
            self._published_iovs.append(usrbio.create_iovec(self._mount, length_bytes=1 << 20))

    def unpublish(self) -> None:
        """Close the last published iov."""
        self._published_iovs.pop().close()

    def write(self, operations: list[tuple[int, int, int]]) -> None:
        """Submit a write for each (file offset, length, seed), from consecutive parts of the iov."""
        ring, iov_offset = self._rings[False], 0
        for index, (offset, length, seed) in enumerate(operations):
            self._write_memory(iov_offset, pattern.payload(length, seed=seed))
            ring.prepare(self._iov[iov_offset : iov_offset + length], False, self._fd, offset, index)  # noqa: FBT003
            iov_offset += length
        ring.submit()

    def read(self, operations: list[tuple[int, int, int]]) -> None:
        """Submit a read for each (file offset, length, unused), into consecutive parts of the iov."""
        ring, iov_offset = self._rings[True], 0
        for index, (offset, length, _seed) in enumerate(operations):
            ring.prepare(self._iov[iov_offset : iov_offset + length], True, self._fd, offset, index)  # noqa: FBT003
            iov_offset += length
        ring.submit()

    def wait(self, *, for_read: bool, count: int) -> list[tuple[int, int]]:
        """Wait for `count` completions. Return (index of the operation, result) for each that arrived in time."""
        completions = self._rings[for_read].wait(
            min_results=count, max_results=count, timeout=timedelta(seconds=WAIT_S)
        )
        return [(int(str(completion.userdata)), completion.result) for completion in completions]

    def save(self, copy_path: str) -> list[int]:
        """Read the whole file through the agent, save its bytes in another file, and return the result of each read."""
        results: list[int] = []
        length_bytes = os.fstat(self._fd).st_size
        with Path(copy_path).open("wb") as file:
            for offset_bytes in range(0, length_bytes, 1 << 20):
                chunk_bytes = min(1 << 20, length_bytes - offset_bytes)
                self.read([(offset_bytes, chunk_bytes, 0)])
                ((_, result),) = self.wait(for_read=True, count=1)
                file.write(self._read_memory(max(result, 0)))
                results.append(result)
        return results

    def write_and_verify(self, offset: int, length: int, seed: int) -> bool:
        """Write a range of the file, read it again, and compare the data."""
        self.write([(offset, length, seed)])
        self._require_length(length, self.wait(for_read=False, count=1))
        self._write_memory(0, bytes(length))
        self.read([(offset, length, 0)])
        self._require_length(length, self.wait(for_read=True, count=1))
        pattern.check(self._read_memory(length), seed=seed)
        return True

    def close(self) -> None:
        """Release everything."""
        while self._published_iovs:
            self.unpublish()
        self._exit_stack.close()

    def _write_memory(self, offset_bytes: int, data: bytes) -> None:
        if self._memory is not None:
            self._memory.write(data, offset_bytes=offset_bytes)
        else:
            with memoryview(self._iov) as memory:
                memory[offset_bytes : offset_bytes + len(data)] = data

    def _read_memory(self, length_bytes: int) -> bytes:
        if self._memory is not None:
            return self._memory.read(length_bytes=length_bytes) if length_bytes else b""
        with memoryview(self._iov) as memory:
            return bytes(memory[:length_bytes])

    @staticmethod
    def _require_length(length_bytes: int, completions: list[tuple[int, int]]) -> None:
        ((_, result),) = completions
        if result != length_bytes:
            raise OSError(-result if result < 0 else 0, f"the result is {result} instead of {length_bytes} bytes")


def main() -> None:
    """Execute commands until the end of standard input."""
    application = _Application(*sys.argv[1:4])
    commands = ("open", "publish", "unpublish", "write", "read", "wait", "save", "write_and_verify", "close")
    methods = {name: getattr(application, name) for name in commands}
    for line in sys.stdin:
        arguments = json.loads(line)
        reply: dict[str, object] = {}
        try:
            reply["result"] = methods[arguments.pop("command")](**arguments)
        except OSError as error:
            reply |= {"errno": error.errno, "text": str(error)}
        print(json.dumps(reply), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
