"""Device memory as iovecs: the GPU extension of the hf3fs user-space I/O interface.

Rings use an iovec of device memory like any other iovec. Only NICs and the device access the bytes of device memory, so
such an iovec has no buffer protocol. Before gdrkit frees memory that it has allocated, it closes the iovec of the
memory. An iovec of memory of another library (torch, cupy) keeps a reference to the memory's object.
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

# The directions of hf3fs_iovsync_gpu().
_BEFORE_TRANSFER, _AFTER_TRANSFER = 0, 1


def gdr_available() -> bool:
    """Return whether the client library and this machine support device memory."""
    return "hf3fs_gdr_available" in capabilities() and native().gdr_available()


def gdr_device_count() -> int:
    """Return the number of GPUs whose memory the client library can use."""
    return native().gdr_device_count() if "hf3fs_gdr_device_count" in capabilities() else 0


def make_gpu_iovec(
    hf3fs_mount_point: str,
    memory: object = None,
    *,
    length_bytes: int | None = None,
    device: int = 0,
    block_size: int = 0,
) -> Iovec:
    """Publish device memory for rings, and return its iovec.

    Parameters
    ----------
    hf3fs_mount_point : str
        Mount point of an agent.
    memory : DeviceBuffer, or an object with ``__cuda_array_interface__`` or ``__dlpack__``, or None
        The memory. Freeing a DeviceBuffer first closes the iovec. The iovec keeps a reference to any other object until
        the iovec is closed. With None, the library allocates `length_bytes`.
    length_bytes : int or None
        Size of the memory to allocate, in bytes. Needed without `memory`.
    device : int
        Number of the GPU.
    block_size : int
        See :func:`gdrkit.usrbio.make_iovec`. In the C interface, the ``hf3fs_iov*_gpu`` functions accept this number,
        and the ``hf3fs_iov*_device`` functions accept only 0.

    Returns
    -------
    iovec
        The iovec, which is a context manager.

    Raises
    ------
    Unsupported
        The client library or this machine does not support device memory.
    UsrbioError
        ENODEV: there is no such device. ENOMEM: the device is out of memory. Other errors have the errno of the agent.
    """
    if memory is None:
        if length_bytes is None:
            message = "make_gpu_iovec() needs memory or length_bytes"
            raise TypeError(message)
        return _count_as_open(native().create_gpu_iovec(hf3fs_mount_point, length_bytes, block_size, device))
    if isinstance(memory, DeviceBuffer):
        iovec = _wrap_memory(hf3fs_mount_point, memory, block_size=block_size, device=device, owner=memory)
        cancel_close = memory.before_release(iovec.close)
        return _count_as_open(iovec, cancel_close)
    on_close = ReleaseStack()
    try:
        cuda_device = cuda.Device(device)
        on_close.push(cuda_device.close)
        borrowed_memory = cuda.wrap(memory, device=cuda_device)
        on_close.push(borrowed_memory.close)
        iovec = _wrap_memory(hf3fs_mount_point, borrowed_memory, block_size=block_size, device=device, owner=memory)
    except BaseException as error:
        on_close.run_after(error)
        raise
    return _count_as_open(iovec, on_close.run)


def open_gpu_iovec(
    hf3fs_mount_point: str, iovec_id: str, *, length_bytes: int, device: int = 0, block_size: int = 0
) -> Iovec:
    """Return the iovec of device memory that another process published. `iovec_id` is the ``id`` of that iovec.

    `length_bytes` must equal the published size. `device` is the number by which this process names the GPU with the
    memory. The link of device memory has no block size, so `block_size` limits only operations that use the returned
    iovec. Closing the iovec does not end the publication.

    Raises
    ------
    UsrbioError
        ENOENT: the memory is not published. Else see :func:`make_gpu_iovec`.
    """
    return _count_as_open(native().open_gpu_iovec(iovec_id, hf3fs_mount_point, length_bytes, block_size, device))


def import_gpu_iovec(hf3fs_mount_point: str, handle: bytes) -> Iovec:
    """Return the iovec of device memory of another process, from the 80 bytes that its ``Iovec.export_gpu()`` returned.

    Raises
    ------
    UsageError
        MALFORMED: the handle does not have 80 bytes.
    UsrbioError
        The library or the agent refused the handle.
    """
    return _count_as_open(native().import_gpu_iovec(handle, hf3fs_mount_point))


class GpuSharedBuffer:
    """Device memory of two processes: the owner exports the memory, the importer imports it, and both do I/O on it.

    The owner must outlive the importers. While an operation on the memory is outstanding, no process may access the
    memory.

    Attributes
    ----------
    is_owner : bool
        Whether this process is the owner.
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
        """Create shared memory of this process, as its owner; see :func:`make_gpu_iovec`."""
        return cls(make_gpu_iovec(hf3fs_mount_point, memory, length_bytes=length_bytes, device=device), is_owner=True)

    @classmethod
    def open(cls, hf3fs_mount_point: str, handle: bytes) -> Self:
        """Import the memory of another process, from the bytes of :meth:`export`; see :func:`import_gpu_iovec`."""
        return cls(import_gpu_iovec(hf3fs_mount_point, handle), is_owner=False)

    @property
    def iovec(self) -> Iovec:
        """The iovec, for rings of this process."""
        if self._iovec is None:
            resource = "shared device buffer"
            raise ClosedResource(resource)
        return self._iovec

    @property
    def length_bytes(self) -> int:
        """Size of the memory in bytes."""
        return len(self.iovec)

    @property
    def device(self) -> int:
        """Number of the GPU with the memory."""
        return self.iovec.gpu_device

    def export(self) -> bytes:
        """Return the 80 bytes from which another process on this machine imports the memory."""
        return self.iovec.export_gpu()

    def synchronize(self, *, after_transfer: bool) -> None:
        """Make writes of the device visible to NICs or, with `after_transfer`, writes of NICs visible to the device."""
        self.iovec.sync_gpu(_AFTER_TRANSFER if after_transfer else _BEFORE_TRANSFER)

    @property
    def memory(self) -> BorrowedMemory:
        """The memory as a device buffer, for copies by the CUDA driver."""
        if self._memory is None:
            self._device = self._device or cuda.Device(self.device)
            self._memory = cuda.borrow(self._device, self.iovec.address, length_bytes=len(self.iovec))
        return self._memory

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The memory as an array of bytes, for torch, cupy and others. It is valid until :meth:`close`."""
        return {
            "version": 3,
            "shape": (self.length_bytes,),
            "typestr": "|u1",
            "data": (self.iovec.address, False),
            "strides": None,
            "stream": None,
        }

    def close(self) -> None:
        """Close the iovec, which frees memory that this process owns. A second call does nothing."""
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
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _wrap_memory(mount: str, memory: DeviceBuffer, *, block_size: int, device: int, owner: object) -> Iovec:
    return native().wrap_gpu_iovec(
        memory.address, memory.length_bytes, str(uuid.uuid4()), mount, block_size, device, owner
    )


def _count_as_open(iovec: Iovec, on_close: Callable[[], None] | None = None) -> Iovec:
    """Return `iovec`, and count it as an open object. When it is closed, `on_close` is called and the count ends."""
    handle = Handle("usrbio.gpu_iovec")

    def release() -> None:
        if on_close is not None:
            on_close()
        handle.release()

    iovec.before_close(release)
    return iovec
