"""The types of what the native module makes: iovecs and rings.

Level 5.
"""

# What the module's own functions do is said where Python offers them; their order of parameters is that of C.
# ruff: noqa: D102, PLR0917

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta
    from types import TracebackType

__all__ = ["Ioring", "Iovec", "NativeModule"]


class Iovec(Protocol):
    """Memory that rings read into or write from, or a slice of it; host memory has the buffer protocol.

    Closing it while operations are outstanding, or while a memoryview of it is there, is refused (UsageError, BUSY).
    """

    @property
    def result(self) -> int:
        """Of its last finished operation: bytes, or a negative errno. Fewer than asked: the end of the file, or a hole
        before it.
        """

    @property
    def base_off(self) -> int:
        """Where it begins in the iovec that it is a slice of; bytes."""

    @property
    def userdata(self) -> object:
        """What ``prepare`` was given for its last finished operation."""

    @property
    def address(self) -> int:
        """Of its first byte, in this process."""

    @property
    def id(self) -> str:
        """The UUID under which it is published."""

    @property
    def block_size(self) -> int:
        """In bytes; 0: one block."""

    @property
    def is_gpu(self) -> bool:
        """Whether it is device memory."""

    @property
    def gpu_device(self) -> int:
        """The number of the GPU; -1 for host memory."""

    @property
    def is_slice(self) -> bool:
        """Whether it belongs to another iovec."""

    @property
    def outstanding(self) -> int:
        """How many operations rings have on the memory."""

    @property
    def closed(self) -> bool:
        """Whether the memory was given back."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice) -> Iovec: ...

    def __buffer__(self, flags: int, /) -> memoryview: ...

    def slice_by(self, buf: object) -> Iovec:
        """The slice that a buffer inside of it covers."""

    def export_gpu(self) -> bytes:
        """The 80-byte handle of device memory."""

    def sync_gpu(self, direction: int) -> None:
        """0 before NICs read what the device wrote, 1 after NICs have written."""

    def before_close(self, action: Callable[[], None]) -> None:
        """Have `action` run first when it is closed; one alone."""

    def close(self) -> None:
        """Give it back; a second close does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Ioring(Protocol):
    """A queue of reads, or of writes; one thread prepares and submits, one (also another) waits."""

    @property
    def entries(self) -> int:
        """How many operations it holds."""

    @property
    def outstanding(self) -> int:
        """How many are prepared and not yet finished."""

    @property
    def closed(self) -> bool:
        """Whether it was destroyed."""

    def prepare(self, iov: Iovec, read: bool, fd: int, off: int, userdata: object = None) -> Self:  # noqa: FBT001
        """Add an operation on all of `iov`, at the offset `off` of the file; it may begin at once."""

    def submit(self) -> Self:
        """Tell the agent that there is something to do."""

    def wait(self, *, max_results: int = 0, min_results: int = 0, timeout: timedelta | None = None) -> list[Iovec]:
        """What has finished, in that order: at least `min_results` unless the time is over, at most the larger of the
        two and 1.
        """

    def destroy(self, *, timeout: timedelta | None = ...) -> None:
        """Wait for what is outstanding (10 s unless told otherwise), then give the ring back.

        Raises
        ------
        UsrbioError
            ETIMEDOUT: the agent did not finish. The ring is gone; the memory of these operations stays for ever.
        """

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class NativeModule(Protocol):
    """``gdrkit.usrbio._hf3fs``."""

    def function_names(self) -> list[str]: ...
    def extract_mount_point(self, path: str) -> str | None: ...
    def is_hf3fs(self, fd: int) -> bool: ...
    def register_fd(self, fd: int, flags: int) -> None: ...
    def deregister_fd(self, fd: int) -> None: ...
    def hardlink(self, target: str, link_name: str) -> None: ...
    def punch_hole(self, fd: int, start: list[int], end: list[int], flags: int) -> None: ...
    def gdr_available(self) -> bool: ...
    def gdr_device_count(self) -> int: ...

    def iovec(self, base: object, id: str, hf3fs_mount_point: str, block_size: int = 0, numa: int = -1) -> Iovec: ...  # noqa: A002

    def ioring(
        self,
        hf3fs_mount_point: str,
        entries: int,
        for_read: bool,  # noqa: FBT001
        io_depth: int,
        priority: int | None,
        timeout: int | None,
        numa: int,
        flags: int,
    ) -> Ioring: ...

    def create_iovec(self, hf3fs_mount_point: str, length_bytes: int, block_size: int, numa: int) -> Iovec: ...

    def open_iovec(
        self, identity: str, hf3fs_mount_point: str, length_bytes: int, block_size: int, numa: int
    ) -> Iovec: ...

    def create_gpu_iovec(self, hf3fs_mount_point: str, length_bytes: int, block_size: int, device: int) -> Iovec: ...

    def wrap_gpu_iovec(
        self,
        address: int,
        length_bytes: int,
        identity: str,
        hf3fs_mount_point: str,
        block_size: int,
        device: int,
        owner: object,
    ) -> Iovec: ...

    def open_gpu_iovec(
        self, identity: str, hf3fs_mount_point: str, length_bytes: int, block_size: int, device: int
    ) -> Iovec: ...

    def import_gpu_iovec(self, handle: bytes, hf3fs_mount_point: str) -> Iovec: ...
