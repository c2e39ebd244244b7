"""The types of the native module, and of the objects that it creates: iovecs and rings."""

# The functions of NativeModule have no docstrings, because their Python wrappers document them. Their parameters have
# the order of the C interface.
# ruff: noqa: D102, PLR0917

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta
    from types import TracebackType

__all__ = ["Ioring", "Iovec", "NativeModule"]


class Iovec(Protocol):
    """Memory that rings read into or write from, or a slice of it. Host memory has the buffer protocol.

    Closing an iovec raises UsageError (BUSY) if operations on it are outstanding or a memoryview of it exists.
    """

    @property
    def result(self) -> int:
        """Result of the last completed operation: a number of bytes, or a negative errno.

        The number can be smaller than requested, at the end of the file or at a hole.
        """

    @property
    def base_off(self) -> int:
        """Offset of this slice in its iovec, in bytes."""

    @property
    def userdata(self) -> object:
        """The `userdata` of the last completed operation."""

    @property
    def address(self) -> int:
        """Address of the first byte in this process."""

    @property
    def id(self) -> str:
        """The UUID under which the memory is published."""

    @property
    def block_size(self) -> int:
        """Size in bytes of the blocks whose borders no operation may cross. 0: the whole memory is one block."""

    @property
    def is_gpu(self) -> bool:
        """Whether the memory is device memory."""

    @property
    def gpu_device(self) -> int:
        """Number of the GPU with the memory; -1 for host memory."""

    @property
    def is_slice(self) -> bool:
        """Whether this object is a slice of another iovec."""

    @property
    def outstanding(self) -> int:
        """Number of operations on the memory that have not completed."""

    @property
    def closed(self) -> bool:
        """Whether the memory was released."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice) -> Iovec: ...

    def __buffer__(self, flags: int, /) -> memoryview: ...

    def slice_by(self, buf: object) -> Iovec:
        """Return the slice with the memory of `buf`, a buffer inside of this iovec."""

    def export_gpu(self) -> bytes:
        """Return the 80-byte handle of device memory."""

    def sync_gpu(self, direction: int) -> None:
        """Make writes of the device visible to NICs (`direction` 0), or writes of NICs visible to the device (1)."""

    def before_close(self, action: Callable[[], None]) -> None:
        """Register the function that close() calls before it releases the memory. It replaces an earlier `action`."""

    def close(self) -> None:
        """Release the memory. A second close does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class Ioring(Protocol):
    """A queue of reads or of writes. One thread may prepare and submit operations, while one other thread waits for
    them.
    """

    @property
    def entries(self) -> int:
        """Capacity of the ring, in operations."""

    @property
    def outstanding(self) -> int:
        """Number of operations that were prepared and have not completed."""

    @property
    def closed(self) -> bool:
        """Whether the ring was destroyed."""

    def prepare(self, iov: Iovec, read: bool, fd: int, off: int, userdata: object = None) -> Self:  # noqa: FBT001
        """Add an operation that fills `iov` from the file, or writes all bytes of `iov` to the file, at offset `off`.

        `off` is an offset in the file, in bytes. The agent may start the operation at once.

        Raises
        ------
        UsrbioError
            EAGAIN: the ring is full. EBADF: the file is not registered. EACCES: the file was not opened for this
            operation. EINVAL: the range crosses the end of a block, or `read` is not the direction of the ring.
        """

    def submit(self) -> Self:
        """Wake the agent for the prepared operations."""

    def wait(self, *, max_results: int = 0, min_results: int = 0, timeout: timedelta | None = None) -> list[Iovec]:
        """Return completed operations in the order of their completion.

        Parameters
        ----------
        max_results, min_results : int
            `min_results` is the number of completions to wait for. If the timeout expires, fewer are returned.
            `max_results` is the largest number to return. A value below max(`min_results`, 1) is raised to it.
        timeout : timedelta or None
            Longest wait. None means no limit.
        """

    def destroy(self, *, timeout: timedelta | None = ...) -> None:
        """Wait for the outstanding operations, at most 10 s by default, then release the ring.

        Raises
        ------
        UsrbioError
            ETIMEDOUT: the agent did not complete the operations in time. The ring is released. The memory of these
            operations is never released, because the agent may still write to it.
        """

    def __enter__(self) -> Self: ...

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class NativeModule(Protocol):
    """The module ``gdrkit.usrbio._hf3fs``."""

    # The names of the functions of the C interface that the library has.
    def function_names(self) -> list[str]: ...
    def extract_mount_point(self, path: str) -> str | None: ...
    def is_hf3fs(self, fd: int) -> bool: ...
    def register_fd(self, fd: int, flags: int) -> None: ...
    def deregister_fd(self, fd: int) -> None: ...
    def hardlink(self, target: str, link_name: str) -> None: ...
    def punch_hole(self, fd: int, start: list[int], end: list[int], flags: int) -> None: ...
    def gdr_available(self) -> bool: ...
    def gdr_device_count(self) -> int: ...
    def gpu_pool_statistics(self) -> dict[str, int]: ...
    def limit_gpu_pool(self, idle_bytes_max: int, idle_ms_max: int) -> None: ...
    def trim_gpu_pool(self, idle_bytes_max: int) -> None: ...
    def trim_host_pool(self, idle_bytes_max: int) -> None: ...

    def iovec(self, base: object, id: str, hf3fs_mount_point: str, block_size: int = 0, numa: int = -1) -> Iovec: ...  # noqa: A002

    def ioring(
        self,
        hf3fs_mount_point: str,
        entries: int,
        for_read: bool,  # noqa: FBT001
        io_depth: int,
        priority: int | None,
        timeout_ms: int | None,
        numa: int,
        flags: int,
    ) -> Ioring: ...

    def create_iovec(self, hf3fs_mount_point: str, length_bytes: int, block_size: int, numa: int) -> Iovec: ...

    def open_iovec(
        self, iovec_id: str, hf3fs_mount_point: str, length_bytes: int, block_size: int, numa: int
    ) -> Iovec: ...

    def create_gpu_iovec(self, hf3fs_mount_point: str, length_bytes: int, block_size: int, device: int) -> Iovec: ...

    def wrap_gpu_iovec(
        self,
        address: int,
        length_bytes: int,
        iovec_id: str,
        hf3fs_mount_point: str,
        block_size: int,
        device: int,
        owner: object,
    ) -> Iovec: ...

    def open_gpu_iovec(
        self, iovec_id: str, hf3fs_mount_point: str, length_bytes: int, block_size: int, device: int
    ) -> Iovec: ...

    def import_gpu_iovec(self, handle: bytes, hf3fs_mount_point: str) -> Iovec: ...
