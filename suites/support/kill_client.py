"""An application of usrbio that does one thing at a time, as it is told: ``python kill_client.py MOUNT FILE KIND``.

KIND is ``host`` or ``device``: where its memory is.

One JSON object a line on standard input, one on standard output: what was done, how long it took, or the errno of what
went wrong. Whoever tells it knows so in which phase it is, and may kill it there, or what it talks to.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit import cuda, pattern, usrbio

if TYPE_CHECKING:
    from gdrkit.usrbio.native_types import Ioring, Iovec

__all__ = ["IOV_BYTES", "WAIT_S", "main"]

IOV_BYTES = 8 << 20
# In time: what is gone is noticed, and said, within this.
WAIT_S = 10.0
_ENTRIES = 64


class _Application:
    def __init__(self, mount: str, file: str, kind: str) -> None:
        self._mount = mount
        self._file = file
        self._device: cuda.Device | None = cuda.Device(0) if kind == "device" else None
        self._memory: cuda.DeviceMemory | None = None
        self._stack = contextlib.ExitStack()
        self._rings: dict[bool, Ioring] = {}
        self._more: list[Iovec] = []

    def open(self) -> None:
        """Everything that an application has: a file, memory, a ring of each direction."""
        self._fd = os.open(self._file, os.O_RDWR | os.O_CLOEXEC)
        self._stack.callback(os.close, self._fd)
        usrbio.register_fd(self._fd)
        self._stack.callback(usrbio.deregister_fd, self._fd)
        if self._device is not None:
            self._memory = self._stack.enter_context(self._device.allocate(IOV_BYTES))
            self._iov = self._stack.enter_context(usrbio.make_gpu_iovec(self._mount, self._memory))
        else:
            self._iov = self._stack.enter_context(usrbio.create_iovec(self._mount, length_bytes=IOV_BYTES))
        for for_read in (False, True):
            ring = usrbio.make_ioring(self._mount, _ENTRIES, for_read=for_read)
            self._rings[for_read] = self._stack.enter_context(ring)

    def publish(self) -> None:
        """One iov more."""
        if self._device is not None:
            self._more.append(usrbio.make_gpu_iovec(self._mount, length_bytes=1 << 20))
        else:
            self._more.append(usrbio.create_iovec(self._mount, length_bytes=1 << 20))

    def unpublish(self) -> None:
        """The last of them goes."""
        self._more.pop().close()

    def write(self, operations: list[tuple[int, int, int]]) -> None:
        """Submit writes of (offset, length, seed); their memory lies one behind the other."""
        ring, at = self._rings[False], 0
        for number, (offset, length, seed) in enumerate(operations):
            self._poke(at, pattern.payload(length, seed=seed))
            ring.prepare(self._iov[at : at + length], False, self._fd, offset, number)  # noqa: FBT003
            at += length
        ring.submit()

    def read(self, operations: list[tuple[int, int, int]]) -> None:
        """Submit reads, as :meth:`write`."""
        ring, at = self._rings[True], 0
        for number, (offset, length, _seed) in enumerate(operations):
            ring.prepare(self._iov[at : at + length], True, self._fd, offset, number)  # noqa: FBT003
            at += length
        ring.submit()

    def wait(self, *, for_read: bool, count: int) -> list[tuple[int, int]]:
        """(number, result) of what has come within :data:`WAIT_S`."""
        done = self._rings[for_read].wait(min_results=count, max_results=count, timeout=timedelta(seconds=WAIT_S))
        return [(int(str(each.userdata)), each.result) for each in done]

    def save(self, into: str) -> list[int]:
        """Read the whole file through the path, and keep what came in another one."""
        results: list[int] = []
        length = os.fstat(self._fd).st_size
        with Path(into).open("wb") as kept:
            for offset in range(0, length, 1 << 20):
                part = min(1 << 20, length - offset)
                self.read([(offset, part, 0)])
                ((_, result),) = self.wait(for_read=True, count=1)
                kept.write(self._peek(max(result, 0)))
                results.append(result)
        return results

    def step(self, offset: int, length: int, seed: int) -> bool:
        """Write, read back, compare."""
        self.write([(offset, length, seed)])
        self._expect(length, self.wait(for_read=False, count=1))
        self._poke(0, bytes(length))
        self.read([(offset, length, 0)])
        self._expect(length, self.wait(for_read=True, count=1))
        pattern.check(self._peek(length), seed=seed)
        return True

    def close(self) -> None:
        """Give everything back."""
        while self._more:
            self.unpublish()
        self._stack.close()

    def _poke(self, at: int, data: bytes) -> None:
        if self._memory is not None:
            self._memory.write(data, offset_bytes=at)
        else:
            with memoryview(self._iov) as memory:
                memory[at : at + len(data)] = data

    def _peek(self, length: int) -> bytes:
        if self._memory is not None:
            return self._memory.read(length_bytes=length) if length else b""
        with memoryview(self._iov) as memory:
            return bytes(memory[:length])

    @staticmethod
    def _expect(length: int, results: list[tuple[int, int]]) -> None:
        ((_, result),) = results
        if result != length:
            raise OSError(-result if result < 0 else 0, f"{result} of {length} bytes")


def main() -> None:
    """Do what is said until it is over."""
    application = _Application(*sys.argv[1:4])
    actions = {
        name: getattr(application, name)
        for name in ("open", "publish", "unpublish", "write", "read", "wait", "save", "step", "close")
    }
    for line in sys.stdin:
        asked = json.loads(line)
        begin = time.monotonic()
        answer: dict[str, object] = {}
        try:
            answer["result"] = actions[asked.pop("do")](**asked)
        except OSError as error:
            answer |= {"errno": error.errno, "text": str(error)}
        answer["seconds"] = time.monotonic() - begin
        print(json.dumps(answer), flush=True)  # noqa: T201 - the answer.


if __name__ == "__main__":
    main()
