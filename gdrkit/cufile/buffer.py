"""Memory that is registered with cuFile.

Level 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

from gdrkit.cufile import _cufile
from gdrkit.errors import ClosedResource, UsageError
from gdrkit.handles import Handle

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

    from gdrkit.cufile.driver import Driver

__all__ = ["Memory", "RegisteredBuffer", "check_memory"]


class Memory(Protocol):
    """What cuFile moves bytes to and from: memory of a device or of the host, at an address."""

    @property
    def address(self) -> int:
        """Of its first byte."""

    @property
    def length_bytes(self) -> int:
        """Its size."""

    @property
    def closed(self) -> bool:
        """Whether it was released."""

    def current(self) -> AbstractContextManager[object]:
        """While entered, the CUDA context of a device's memory is current in this thread; nothing for the host's.

        cuFile takes addresses as those of the caller's current context. Without any it refuses to register memory
        (5011), ends transfers of streams with ENOMEM, and leaves pinned what is deregistered (seen with 1.15 and 1.20).
        """


def check_memory(memory: Memory, *, offset_bytes: int, length_bytes: int | None) -> int:
    """The length that is meant, from `offset_bytes` to the end when None.

    Raises
    ------
    UsageError
        It is not inside the memory.
    ClosedResource
        The memory was released.
    """
    if memory.closed:
        what = "the memory"
        raise ClosedResource(what)
    wanted = memory.length_bytes - offset_bytes if length_bytes is None else length_bytes
    if offset_bytes < 0 or wanted < 0 or offset_bytes + wanted > memory.length_bytes:
        message = f"bytes {offset_bytes} to {offset_bytes + wanted} are not inside 0 to {memory.length_bytes}"
        raise UsageError(message)
    return wanted


class RegisteredBuffer:
    """Memory that the driver has pinned, so that transfers need no buffers between; a context manager.

    Parameters
    ----------
    driver : Driver
        The open driver, which deregisters it at the latest.
    memory : Memory
        What is registered. It must not be freed before.

    Raises
    ------
    ApiError
        The library refused, e.g. with CU_FILE_MEMORY_ALREADY_REGISTERED.
    """

    def __init__(self, driver: Driver, memory: Memory) -> None:
        driver.check_open()
        length_bytes = check_memory(memory, offset_bytes=0, length_bytes=None)
        self.memory = memory
        self._address = memory.address
        with memory.current():
            _cufile.call("cuFileBufRegister", "buf_register", bufPtr_base=memory.address, length=length_bytes, flags=0)
        self._handle = Handle("cufile.buffer")
        self._leave = driver.adopt(self.close)
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether it was deregistered."""
        return self._closed

    def close(self) -> None:
        """Deregister it; a second close does nothing."""
        if self._closed:
            return
        with self.memory.current():
            _cufile.call("cuFileBufDeregister", "buf_deregister", bufPtr_base=self._address)
        self._closed = True
        self._leave()
        self._handle.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
