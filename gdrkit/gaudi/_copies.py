"""Copies between the host and a device, by linear DMA packets on the PCI DMA queues of the device.

On the host, the copies use a buffer that gdrkit has mapped to the device. A command buffer contains one packet. Gaudi 1
differs from later devices in two ways: its driver allocates the command buffer, and two bits of the packet must be set.
Sources: ``gaudi_packets.h``, ``gaudi2_packets.h`` and the DMA tests of hl-thunk.
"""

from __future__ import annotations

import errno
import mmap
import struct
import threading
import time

from gdrkit.errors import ApiError
from gdrkit.gaudi import _hlthunk
from gdrkit.gaudi._answers import error_of
from gdrkit.handles import ReleaseStack
from gdrkit.units import HOST_PAGE_BYTES, MIB

__all__ = ["Copies"]

_STAGE_BYTES = MIB
_PACKET = struct.Struct("<IIQQ")  # struct packet_lin_dma: tsize, ctl, src_addr, dst_addr
_LINEAR_DMA = 9 << 24  # PACKET_LIN_DMA, in bits 24 to 28 of ctl
_MESSAGE_BARRIER = 1 << 31
_GAUDI1_MUST = (1 << 3) | (1 << 30)  # lin, reg_barrier
_WAIT_US = 1_000_000
_LIMIT_S = 30.0


class Copies:
    """The copies of one open device, one at a time. The first copy allocates the buffers.

    Parameters
    ----------
    fd : int
        Descriptor of the device, borrowed.
    is_gaudi1 : bool
        Whether to use the packets and command buffers of Gaudi 1.

    Attributes
    ----------
    lost : bool
        Whether the device failed a copy. Then its driver resets it and frees everything, so that nothing can or need be
        unmapped or freed.
    """

    def __init__(self, fd: int, *, is_gaudi1: bool) -> None:
        self._fd = fd
        self._is_gaudi1 = is_gaudi1
        self._lock = threading.Lock()
        self._parts = ReleaseStack()
        self._stage: mmap.mmap | None = None
        self._stage_address = 0
        self._packet: mmap.mmap | None = None
        self._buffer = 0
        self._unfinished = 0
        self.lost = False

    def write(self, address: int, view: memoryview) -> None:
        """Copy from the host to the device. The copy is complete on return."""
        with self._lock:
            stage = self._ready()
            for begin in range(0, view.nbytes, _STAGE_BYTES):
                part = view[begin : begin + _STAGE_BYTES]
                stage[: part.nbytes] = bytes(part)
                self._copy(_hlthunk.DMA_DOWN_QUEUE, self._stage_address, address + begin, part.nbytes)

    def read_into(self, address: int, view: memoryview) -> None:
        """Copy from the device to the host. The copy is complete on return."""
        with self._lock:
            stage = self._ready()
            for begin in range(0, view.nbytes, _STAGE_BYTES):
                length_bytes = min(_STAGE_BYTES, view.nbytes - begin)
                self._copy(_hlthunk.DMA_UP_QUEUE, address + begin, self._stage_address, length_bytes)
                view[begin : begin + length_bytes] = stage[:length_bytes]

    def settle(self) -> None:
        """Wait for a copy that timed out: nothing that it uses may be unmapped before it is complete.

        Raises
        ------
        ApiError
            ETIMEDOUT: the copy is still not complete.
        """
        with self._lock:
            if self._unfinished and not self.lost:
                self._wait(self._unfinished)

    def close(self) -> None:
        """Free the buffers."""
        self.settle()
        with self._lock:
            self._parts.run()
            self._stage = self._packet = None

    def _ready(self) -> mmap.mmap:
        if self._stage is None:
            try:
                self._stage = self._made()
            except BaseException as error:
                self._parts.run_after(error)
                raise
        return self._stage

    def _made(self) -> mmap.mmap:
        """Return a new staging buffer. For devices after Gaudi 1, the command buffer follows it in the same mapping."""
        stage = mmap.mmap(-1, _STAGE_BYTES + HOST_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._parts.push(stage.close)
        self._stage_address = _hlthunk.call(
            "hlthunk_host_memory_map",
            fd=self._fd,
            host_virt_addr=_hlthunk.address_of(stage),
            hint_addr=0,
            host_size=len(stage),
        )
        mapped = self._stage_address
        self._parts.push(lambda: self._undo("hlthunk_memory_unmap", device_virt_addr=mapped))
        if self._is_gaudi1:
            self._buffer = _hlthunk.request_command_buffer(self._fd, HOST_PAGE_BYTES)
            handle = self._buffer
            self._parts.push(lambda: self._undo("hlthunk_destroy_command_buffer", cb_handle=handle))
            self._packet = mmap.mmap(self._fd, HOST_PAGE_BYTES, offset=handle)
            self._parts.push(self._packet.close)
        else:
            self._buffer = self._stage_address + _STAGE_BYTES
        return stage

    def _copy(self, queue: int, source: int, target: int, length_bytes: int) -> None:
        control = _LINEAR_DMA | _MESSAGE_BARRIER | (_GAUDI1_MUST if self._is_gaudi1 else 0)
        packet = _PACKET.pack(length_bytes, control, source, target)
        if self._packet is not None:
            self._packet[: len(packet)] = packet
        elif self._stage is not None:
            self._stage[_STAGE_BYTES : _STAGE_BYTES + len(packet)] = packet
        sequence = _hlthunk.submit(
            self._fd, buffer=self._buffer, length_bytes=len(packet), queue=queue, is_mapped=not self._is_gaudi1
        )
        self._unfinished = sequence
        self._wait(sequence)

    def _wait(self, sequence: int) -> None:
        until = time.monotonic() + _LIMIT_S
        try:
            while not _hlthunk.wait(self._fd, sequence, timeout_us=_WAIT_US):
                if time.monotonic() > until:
                    raise error_of(
                        operation="hlthunk_wait_for_cs",
                        number=errno.ETIMEDOUT,
                        arguments={"fd": self._fd, "seq": sequence},
                        detail=f"a copy takes longer than {_LIMIT_S:g} s",
                    )
        except ApiError as error:
            self.lost = self.lost or error.errno == errno.EIO
            raise
        self._unfinished = 0

    def _undo(self, operation: str, **arguments: int) -> None:
        if not self.lost:
            _hlthunk.call(operation, fd=self._fd, **arguments)
