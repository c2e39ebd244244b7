"""Streams and events: asynchronous work of a device.

Most methods are one driver call. A stream keeps the host buffers that it reads or fills alive until
:meth:`Stream.synchronize`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdrkit.buffers import check_range
from gdrkit.cuda import _driver, _results
from gdrkit.errors import ApiError
from gdrkit.handles import Resource

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from gdrkit.cuda.context import PrimaryContext
    from gdrkit.cuda.memory import CudaMemory

__all__ = ["Event", "Stream", "wait_for_stream"]

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no implicit ordering with the default stream
_EVENT_DEFAULT = 0  # CU_EVENT_DEFAULT


class _StreamOrEvent(Resource):
    """Base of streams and events."""

    _type_name = ""
    # The names of the driver function that destroys the object, and of the function's parameter for the handle.
    _destroy_operation = ""
    _destroy_argument = ""

    def __init__(self, device: PrimaryContext, driver_handle: int) -> None:
        self.device = device
        self._driver_handle = driver_handle
        super().__init__(f"cuda.{self._type_name}", name=f"CUDA {self._type_name}", on_close=device.on_close)

    @property
    def handle(self) -> int:
        """The driver's handle (``CUstream`` or ``CUevent``)."""
        self._check_open()
        return self._driver_handle

    def current(self) -> AbstractContextManager[None]:
        """Make the context of the device current on this thread; see :meth:`PrimaryContext.current`."""
        return self.device.current()

    def _release(self) -> None:
        with self.device.current():
            _driver.call(self._destroy_operation, **{self._destroy_argument: self._driver_handle})


class Event(_StreamOrEvent):
    """A CUDA event: a mark in a stream."""

    _type_name = "event"
    _destroy_operation = "cuEventDestroy"
    _destroy_argument = "hEvent"

    def __init__(self, device: PrimaryContext) -> None:
        with device.current():
            handle = _driver.call_int("cuEventCreate", Flags=_EVENT_DEFAULT)
        super().__init__(device, handle)

    def query(self) -> bool:
        """Return whether all work before the event is complete. This is true for an event that was never recorded."""
        with self.device.current():
            return _is_complete("cuEventQuery", hEvent=self.handle)

    def synchronize(self) -> None:
        """Wait until all work before the event is complete."""
        with self.device.current():
            _driver.call("cuEventSynchronize", hEvent=self.handle)

    def elapsed_ms(self, since: Event) -> float:
        """Return the milliseconds from `since` to this event. Both must be recorded and complete."""
        with self.device.current():
            return _driver.call_float("cuEventElapsedTime", hStart=since.handle, hEnd=self.handle)


class Stream(_StreamOrEvent):
    """A queue of work on one device.

    :meth:`close` first waits for the work, so that no buffer is freed while the device uses it.
    """

    _type_name = "stream"
    _destroy_operation = "cuStreamDestroy"
    _destroy_argument = "hStream"

    def __init__(self, device: PrimaryContext) -> None:
        with device.current():
            handle = _driver.call_int("cuStreamCreate", Flags=_NON_BLOCKING)
        self._views: list[memoryview] = []  # Host buffers of queued copies, kept alive until synchronize().
        super().__init__(device, handle)

    def write(self, memory: CudaMemory, data: bytes | bytearray | memoryview, *, offset_bytes: int = 0) -> None:
        """Queue a copy from the host. `data` must not change before :meth:`synchronize`."""
        view = memoryview(data)
        check_range(offset_bytes=offset_bytes, length_bytes=view.nbytes, size_bytes=memory.length_bytes)
        self._views.append(view)
        target_address = memory.address + offset_bytes
        with self.device.current():
            _driver.call(
                "cuMemcpyHtoDAsync",
                dstDevice=target_address,
                srcHost=view,
                ByteCount=view.nbytes,
                hStream=self.handle,
            )

    def read_into(self, memory: CudaMemory, buffer: bytearray | memoryview, *, offset_bytes: int = 0) -> None:
        """Queue a copy to the host. `buffer` contains the bytes only after :meth:`synchronize`."""
        view = memoryview(buffer)
        check_range(offset_bytes=offset_bytes, length_bytes=view.nbytes, size_bytes=memory.length_bytes)
        self._views.append(view)
        source_address = memory.address + offset_bytes
        with self.device.current():
            _driver.call(
                "cuMemcpyDtoHAsync",
                dstHost=view,
                srcDevice=source_address,
                ByteCount=view.nbytes,
                hStream=self.handle,
            )

    def copy(
        self,
        source: CudaMemory,
        target: CudaMemory,
        *,
        length_bytes: int | None = None,
        source_offset_bytes: int = 0,
        target_offset_bytes: int = 0,
    ) -> None:
        """Queue a copy from device memory to device memory of the same or another device.

        A length of None means up to the end of `source`.

        Between two devices the copy is direct only inside :func:`~gdrkit.cuda.peer_access`. Otherwise the driver stages
        it through the host.
        """
        length_bytes = source.length_bytes - source_offset_bytes if length_bytes is None else length_bytes
        for memory, offset_bytes in ((source, source_offset_bytes), (target, target_offset_bytes)):
            check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=memory.length_bytes)
        target_address = target.address + target_offset_bytes
        source_address = source.address + source_offset_bytes
        with self.device.current():
            if source.device.index == target.device.index:
                _driver.call(
                    "cuMemcpyDtoDAsync",
                    dstDevice=target_address,
                    srcDevice=source_address,
                    ByteCount=length_bytes,
                    hStream=self.handle,
                )
            else:
                _driver.call(
                    "cuMemcpyPeerAsync",
                    dstDevice=target_address,
                    dstContext=target.device.context_handle(),
                    srcDevice=source_address,
                    srcContext=source.device.context_handle(),
                    ByteCount=length_bytes,
                    hStream=self.handle,
                )

    def fill(self, memory: CudaMemory, byte: int, *, offset_bytes: int = 0, length_bytes: int | None = None) -> None:
        """Queue an operation that sets every byte of the range to `byte`. A length of None means up to the end."""
        length_bytes = memory.length_bytes - offset_bytes if length_bytes is None else length_bytes
        check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=memory.length_bytes)
        address = memory.address + offset_bytes
        with self.device.current():
            _driver.call("cuMemsetD8Async", dstDevice=address, uc=byte, N=length_bytes, hStream=self.handle)

    def record(self, event: Event) -> None:
        """Record an event after the work that is queued so far."""
        with self.device.current():
            _driver.call("cuEventRecord", hEvent=event.handle, hStream=self.handle)

    def wait(self, event: Event) -> None:
        """Make all work that is queued later wait for an event of any stream."""
        with self.device.current():
            _driver.call("cuStreamWaitEvent", hStream=self.handle, hEvent=event.handle, Flags=0)

    def query(self) -> bool:
        """Return whether all queued work is complete."""
        with self.device.current():
            return _is_complete("cuStreamQuery", hStream=self.handle)

    def synchronize(self) -> None:
        """Wait until all queued work is complete."""
        with self.device.current():
            _driver.call("cuStreamSynchronize", hStream=self.handle)
        self._views.clear()

    def _release(self) -> None:
        self.synchronize()
        super()._release()


def wait_for_stream(stream_handle: int) -> None:
    """Wait until all work of a stream that other code created is complete. The device's context must be current."""
    _driver.call("cuStreamSynchronize", hStream=stream_handle)


def _is_complete(operation: str, **arguments: int) -> bool:
    try:
        _driver.call(operation, **arguments)
    except ApiError as error:
        if error.status == _results.NOT_READY:
            return False
        raise
    return True
