"""Memory for transfers by cuFile: its interface, ranges of it, and its registration with cuFile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from gdrkit.cufile import _cufile
from gdrkit.errors import ClosedResource, UsageError
from gdrkit.handles import Handle

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

    from gdrkit.cufile.driver import Driver

__all__ = ["BufferRange", "Memory", "RegisteredBuffer", "TransferRange", "checked_length"]

# The largest value of off_t and ssize_t.
_OFFSET_MAX = (1 << 63) - 1


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

        cuFile interprets addresses in the current context of the calling thread. Without a current context, cuFile
        refuses to register memory (CU_FILE_CUDA_DRIVER_ERROR, 5011), fails transfers on streams with ENOMEM, and leaves
        deregistered memory pinned (observed with 1.15 and 1.20).
        """


@dataclass(frozen=True, slots=True)
class BufferRange:
    """A part of a :class:`Memory`.

    Attributes
    ----------
    memory : Memory
        The memory.
    offset_bytes : int
        Offset of the part in the memory, in bytes.
    length_bytes : int or None
        Size of the part, in bytes. None: up to the end of the memory.
    """

    memory: Memory
    offset_bytes: int = 0
    length_bytes: int | None = None

    def at(self, file_offset_bytes: int) -> TransferRange:
        """Return the checked description of a transfer between this part and a range of a file.

        Raises
        ------
        UsageError
            The part is not inside the memory, or the range is too large for a file.
        ClosedResource
            The memory was freed.
        """
        length_bytes = checked_length(self.memory, offset_bytes=self.offset_bytes, length_bytes=self.length_bytes)
        if not 0 <= file_offset_bytes <= _OFFSET_MAX - length_bytes:
            message = (
                f"file_offset_bytes must be 0 to {_OFFSET_MAX - length_bytes} for a transfer of {length_bytes} bytes, "
                f"not {file_offset_bytes}"
            )
            raise UsageError(message)
        return TransferRange(self.memory, self.memory.address, self.offset_bytes, length_bytes, file_offset_bytes)


class TransferRange(NamedTuple):
    """The checked memory range and file range of one transfer. Every cuFile call takes its arguments from it.

    Attributes
    ----------
    memory : Memory
        The memory.
    address : int
        Address of the first byte of the memory.
    offset_bytes : int
        Offset of the first byte of the transfer in the memory, in bytes.
    length_bytes : int
        Size of the transfer in bytes.
    file_offset_bytes : int
        Offset of the first byte of the transfer in the file, in bytes.
    """

    memory: Memory
    address: int
    offset_bytes: int
    length_bytes: int
    file_offset_bytes: int


def checked_length(memory: Memory, *, offset_bytes: int, length_bytes: int | None) -> int:
    """Return the length of a part of the memory. `length_bytes` None means up to the end of the memory.

    Raises
    ------
    UsageError
        The part is not inside the memory.
    ClosedResource
        The memory was freed.
    """
    if memory.closed:
        resource = "the memory"
        raise ClosedResource(resource)
    length = memory.length_bytes - offset_bytes if length_bytes is None else length_bytes
    if offset_bytes < 0 or length < 0 or offset_bytes + length > memory.length_bytes:
        message = f"{length} bytes at offset {offset_bytes} are not inside memory of {memory.length_bytes} bytes"
        raise UsageError(message)
    return length


class RegisteredBuffer:
    """Memory that is registered with cuFile and pinned, so that transfers need no bounce buffers; a context manager.

    Parameters
    ----------
    driver : Driver
        The open driver. If the memory is still registered when the driver closes, the driver deregisters it.
    memory : Memory
        The memory. It must be deregistered before it is freed.

    Raises
    ------
    ApiError
        The library failed, for example with CU_FILE_MEMORY_ALREADY_REGISTERED.
    """

    def __init__(self, driver: Driver, memory: Memory) -> None:
        driver.check_open()
        length_bytes = checked_length(memory, offset_bytes=0, length_bytes=None)
        self.memory = memory
        self._address = memory.address
        with memory.current():
            _cufile.call("cuFileBufRegister", "buf_register", bufPtr_base=memory.address, length=length_bytes, flags=0)
        # Counts this buffer in :func:`gdrkit.handles.live` until it is closed.
        self._handle = Handle("cufile.buffer")
        self._remove_close_callback = driver.on_close(self.close)
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
        self._remove_close_callback()
        self._handle.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
