"""Memory that is registered with cuFile."""

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
    """The interface of memory that cuFile can use: device or host memory at an address."""

    @property
    def address(self) -> int:
        """Address of the first byte."""

    @property
    def length_bytes(self) -> int:
        """Size in bytes."""

    @property
    def closed(self) -> bool:
        """Whether the memory was freed."""

    def current(self) -> AbstractContextManager[object]:
        """Make the CUDA context of device memory current in this thread during a block. Host memory needs no context.

        cuFile interprets addresses in the caller's current context. Without a context it refuses to register memory
        (5011), ends transfers of streams with ENOMEM, and leaves deregistered memory pinned (observed with 1.15 and
        1.20).
        """


def check_memory(memory: Memory, *, offset_bytes: int, length_bytes: int | None) -> int:
    """Return the length of the part that starts at `offset_bytes`; None means up to the end.

    Raises
    ------
    UsageError
        The part is not inside the memory.
    ClosedResource
        The memory was freed.
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
    """Memory that is registered with cuFile and pinned, so that transfers need no bounce buffers; a context manager.

    Parameters
    ----------
    driver : Driver
        The open driver. It deregisters the memory when it closes, at the latest.
    memory : Memory
        The memory. It must not be freed before it is deregistered.

    Raises
    ------
    ApiError
        The library failed, for example with CU_FILE_MEMORY_ALREADY_REGISTERED.
    """

    def __init__(self, driver: Driver, memory: Memory) -> None:
        driver.check_open()
        length_bytes = check_memory(memory, offset_bytes=0, length_bytes=None)
        self.memory = memory
        self._address = memory.address
        with memory.current():
            _cufile.call("cuFileBufRegister", "buf_register", bufPtr_base=memory.address, length=length_bytes, flags=0)
        self._handle = Handle("cufile.buffer")
        self._leave = driver.on_close(self.close)
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the memory was deregistered."""
        return self._closed

    def close(self) -> None:
        """Deregister the memory; a second close does nothing."""
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
