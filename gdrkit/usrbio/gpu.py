"""Device memory as iovecs: the GPU extension of the hf3fs user-space I/O interface.

Level 5. The bytes of such an iovec are moved by NICs alone, so it has no buffer protocol; rings take it as any other.
Memory that gdrkit manages closes its iovec before it is freed. Memory of others (torch, cupy) is kept by its iovec.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, Self

from gdrkit import cuda
from gdrkit.buffers import DeviceBuffer
from gdrkit.errors import ClosedResource
from gdrkit.handles import Handle, ReleaseStack
from gdrkit.usrbio._library import capabilities, native

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from gdrkit.cuda import BorrowedMemory
    from gdrkit.usrbio.native_types import Iovec

__all__ = [
    "GpuSharedBuffer",
    "gdr_available",
    "gdr_device_count",
    "import_gpu_iovec",
    "make_gpu_iovec",
    "open_gpu_iovec",
]

BEFORE_TRANSFER, AFTER_TRANSFER = 0, 1


def gdr_available() -> bool:
    """Whether the client library can take device memory here; False also for a library that knows none."""
    return "hf3fs_gdr_available" in capabilities() and native().gdr_available()


def gdr_device_count() -> int:
    """How many devices it can take memory of."""
    return native().gdr_device_count() if "hf3fs_gdr_device_count" in capabilities() else 0


def make_gpu_iovec(
    hf3fs_mount_point: str,
    memory: object = None,
    *,
    length_bytes: int | None = None,
    device: int = 0,
    block_size: int = 0,
) -> Iovec:
    """Device memory for rings: of the library's making, or what is there already.

    Parameters
    ----------
    hf3fs_mount_point : str
        Of an agent.
    memory : DeviceBuffer, or an object with ``__cuda_array_interface__`` or ``__dlpack__``, or None
        What to offer. A DeviceBuffer closes the iovec before it is freed; anything else is kept until the iovec is
        closed. None: the library allocates `length_bytes`.
    length_bytes : int or None
        With no `memory`: how much.
    device : int
        The number of the GPU.
    block_size : int
        As of :func:`gdrkit.usrbio.make_iovec`; 0 for device memory of the third generation.

    Raises
    ------
    Unsupported
        The client library takes no device memory, or can not on this machine.
    UsrbioError
        ENODEV: no such device. ENOMEM: it has no room. Else what the publication was refused with.
    """
    if memory is None:
        if length_bytes is None:
            message = "say length_bytes, or give memory"
            raise TypeError(message)
        return _counted(native().create_gpu_iovec(hf3fs_mount_point, length_bytes, block_size, device))
    if isinstance(memory, DeviceBuffer):
        iovec = _wrap(hf3fs_mount_point, memory, block_size=block_size, device=device, owner=memory)
        take_back = memory.before_release(iovec.close)
        return _counted(iovec, take_back)
    parts = ReleaseStack()
    try:
        opened = cuda.Device(device)
        parts.push(opened.close)
        borrowed = cuda.wrap(memory, device=opened)
        parts.push(borrowed.close)
        iovec = _wrap(hf3fs_mount_point, borrowed, block_size=block_size, device=device, owner=memory)
    except BaseException as error:
        parts.run_after(error)
        raise
    return _counted(iovec, parts.run)


def open_gpu_iovec(
    hf3fs_mount_point: str, identity: str, *, length_bytes: int, device: int = 0, block_size: int = 0
) -> Iovec:
    """The device memory that another process published as `identity`; closing it leaves the publication."""
    return _counted(native().open_gpu_iovec(identity, hf3fs_mount_point, length_bytes, block_size, device))


def import_gpu_iovec(hf3fs_mount_point: str, handle: bytes) -> Iovec:
    """The device memory of a handle of 80 bytes, which ``iovec.export_gpu()`` gave in another process."""
    return _counted(native().import_gpu_iovec(handle, hf3fs_mount_point))


class GpuSharedBuffer:
    """Device memory that two processes have: one owns and exports it, the other imports it; both do I/O on it.

    The owner must outlive the importers. Neither side's memory may be touched while an operation on it is outstanding.

    Attributes
    ----------
    iovec : iovec
        For rings of this process.
    is_owner : bool
        Whether this process exports it.
    """

    def __init__(self, iovec: Iovec, *, is_owner: bool) -> None:
        self._iovec: Iovec | None = iovec
        self._memory: BorrowedMemory | None = None
        self._device: cuda.Device | None = None
        self._handle = Handle("usrbio.gpu_shared_buffer")
        self.is_owner = is_owner

    @classmethod
    def create(
        cls, hf3fs_mount_point: str, memory: object = None, *, length_bytes: int | None = None, device: int = 0
    ) -> Self:
        """Own it: new memory of `length_bytes`, or what is there already; see :func:`make_gpu_iovec`."""
        return cls(make_gpu_iovec(hf3fs_mount_point, memory, length_bytes=length_bytes, device=device), is_owner=True)

    @classmethod
    def open(cls, hf3fs_mount_point: str, handle: bytes) -> Self:
        """Import it by what :meth:`export` gave in the process that owns it."""
        return cls(import_gpu_iovec(hf3fs_mount_point, handle), is_owner=False)

    @property
    def iovec(self) -> Iovec:
        """For rings of this process."""
        if self._iovec is None:
            what = "shared device buffer"
            raise ClosedResource(what)
        return self._iovec

    @property
    def length_bytes(self) -> int:
        """Its size."""
        return len(self.iovec)

    @property
    def device(self) -> int:
        """The number of its GPU."""
        return self.iovec.gpu_device

    def export(self) -> bytes:
        """The 80 bytes by which another process on this machine opens it."""
        return self.iovec.export_gpu()

    def synchronize(self, *, after_transfer: bool) -> None:
        """Make what the device wrote visible to NICs, or what NICs wrote visible to the device."""
        self.iovec.sync_gpu(AFTER_TRANSFER if after_transfer else BEFORE_TRANSFER)

    @property
    def memory(self) -> BorrowedMemory:
        """Its bytes, by the device's own copy calls."""
        if self._memory is None:
            self._device = self._device or cuda.Device(self.device)
            self._memory = cuda.borrow(self._device, self.iovec.address, length_bytes=len(self.iovec))
        return self._memory

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """As an array of bytes, for torch, cupy and others; valid until it is closed."""
        return {
            "version": 3,
            "shape": (self.length_bytes,),
            "typestr": "|u1",
            "data": (self.iovec.address, False),
            "strides": None,
            "stream": None,
        }

    def close(self) -> None:
        """Give it back; a second close does nothing."""
        if self._iovec is None:
            return
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if self._device is not None:
            self._device.close()
            self._device = None
        self._iovec.close()
        self._iovec = None
        self._handle.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _wrap(mount: str, memory: DeviceBuffer, *, block_size: int, device: int, owner: object) -> Iovec:
    return native().wrap_gpu_iovec(
        memory.address, memory.length_bytes, str(uuid.uuid4()), mount, block_size, device, owner
    )


def _counted(iovec: Iovec, after: Callable[[], None] | None = None) -> Iovec:
    handle = Handle("usrbio.gpu_iovec")

    def leave() -> None:
        if after is not None:
            after()
        handle.release()

    iovec.before_close(leave)
    return iovec
