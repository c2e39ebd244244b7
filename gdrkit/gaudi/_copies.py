"""Copies between the host and a Gaudi device, by linear DMA packets on the PCI DMA queues of the device.

The bytes go through a staging buffer in host memory that gdrkit has mapped to the device. A command buffer contains
the packet of one copy. Gaudi 1 differs from later devices in two ways: its driver allocates the command buffer, and two
more bits of the packet must be set.

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
from gdrkit.gaudi._errors import error_of
from gdrkit.handles import ReleaseStack
from gdrkit.units import HOST_PAGE_BYTES, MIB

__all__ = ["Copies"]

# Size of the staging buffer, and largest size of one copy by the device.
_STAGING_BYTES = MIB
_LINEAR_DMA_PACKET = struct.Struct("<IIQQ")  # struct packet_lin_dma: tsize, ctl, src_addr, dst_addr
_LINEAR_DMA_OPCODE_BITS = 9 << 24  # The opcode PACKET_LIN_DMA, in bits 24 to 28 of ctl.
_MESSAGE_BARRIER_BIT = 1 << 31  # The bit msg_barrier of ctl.
_GAUDI1_REQUIRED_BITS = (1 << 3) | (1 << 30)  # The bits lin and reg_barrier of ctl, which only Gaudi 1 requires.
# A copy repeats the call of hlthunk_wait_for_cs, each time with this timeout, until the timeout of the copy.
_WAIT_CALL_TIMEOUT_US = 1_000_000
# After this time, a copy fails with ETIMEDOUT.
_COPY_TIMEOUT_S = 30.0


class Copies:
    """Copies between the host and one open device, one copy at a time. The first copy allocates the buffers.

    Parameters
    ----------
    fd : int
        Descriptor of the device. This object does not close it.
    is_gaudi1 : bool
        Whether to use the packets and command buffers of Gaudi 1.

    Attributes
    ----------
    is_device_lost : bool
        Whether the device failed a copy. The driver then resets the device, and frees all its memory and mappings.
        After that, gdrkit must not unmap or free anything, because the driver would refuse the call.
    """

    def __init__(self, fd: int, *, is_gaudi1: bool) -> None:
        self._fd = fd
        self._is_gaudi1 = is_gaudi1
        self._lock = threading.Lock()
        self._release_stack = ReleaseStack()
        self._staging_buffer: mmap.mmap | None = None
        self._staging_address = 0
        self._mapped_command_buffer: mmap.mmap | None = None
        # The handle of the command buffer on Gaudi 1, or its device address on later devices.
        self._command_buffer_reference = 0
        # Sequence number of a copy that may not be complete; 0 if there is none.
        self._pending_sequence_number = 0
        self.is_device_lost = False

    def write(self, address: int, view: memoryview) -> None:
        """Copy `view` to the device memory at `address`. The copy is complete on return."""
        with self._lock:
            staging_buffer = self._get_staging_buffer()
            for offset_bytes in range(0, view.nbytes, _STAGING_BYTES):
                chunk = view[offset_bytes : offset_bytes + _STAGING_BYTES]
                staging_buffer[: chunk.nbytes] = bytes(chunk)
                self._copy(_hlthunk.DMA_DOWN_QUEUE, self._staging_address, address + offset_bytes, chunk.nbytes)

    def read_into(self, address: int, view: memoryview) -> None:
        """Fill `view` from the device memory at `address`. The copy is complete on return."""
        with self._lock:
            staging_buffer = self._get_staging_buffer()
            for offset_bytes in range(0, view.nbytes, _STAGING_BYTES):
                length_bytes = min(_STAGING_BYTES, view.nbytes - offset_bytes)
                self._copy(_hlthunk.DMA_UP_QUEUE, address + offset_bytes, self._staging_address, length_bytes)
                view[offset_bytes : offset_bytes + length_bytes] = staging_buffer[:length_bytes]

    def wait_for_pending_copy(self) -> None:
        """If a copy has timed out, wait until the device completes it. Until then, its memory must stay mapped.

        Raises
        ------
        ApiError
            ETIMEDOUT: the copy is still not complete.
        """
        with self._lock:
            if self._pending_sequence_number and not self.is_device_lost:
                self._wait_until_complete(self._pending_sequence_number)

    def close(self) -> None:
        """Wait for a pending copy, then free the buffers."""
        self.wait_for_pending_copy()
        with self._lock:
            self._release_stack.run()
            self._staging_buffer = self._mapped_command_buffer = None

    def _get_staging_buffer(self) -> mmap.mmap:
        """Return the staging buffer. The first call allocates the buffers."""
        if self._staging_buffer is None:
            try:
                self._staging_buffer = self._allocate_buffers()
            except BaseException as error:
                self._release_stack.run_after(error)
                raise
        return self._staging_buffer

    def _allocate_buffers(self) -> mmap.mmap:
        """Allocate the buffers, and return the staging buffer.

        For devices after Gaudi 1, the command buffer follows the staging buffer in the same mapping.
        """
        staging_buffer = mmap.mmap(-1, _STAGING_BYTES + HOST_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._release_stack.push(staging_buffer.close)
        self._staging_address = _hlthunk.call(
            "hlthunk_host_memory_map",
            fd=self._fd,
            host_virt_addr=_hlthunk.address_of(staging_buffer),
            hint_addr=0,
            host_size=len(staging_buffer),
        )
        staging_address = self._staging_address
        self._release_stack.push(
            lambda: self._call_unless_reset("hlthunk_memory_unmap", device_virt_addr=staging_address)
        )
        if self._is_gaudi1:
            self._command_buffer_reference = _hlthunk.request_command_buffer(self._fd, HOST_PAGE_BYTES)
            command_buffer_handle = self._command_buffer_reference
            self._release_stack.push(
                lambda: self._call_unless_reset("hlthunk_destroy_command_buffer", cb_handle=command_buffer_handle)
            )
            self._mapped_command_buffer = mmap.mmap(self._fd, HOST_PAGE_BYTES, offset=command_buffer_handle)
            self._release_stack.push(self._mapped_command_buffer.close)
        else:
            self._command_buffer_reference = self._staging_address + _STAGING_BYTES
        return staging_buffer

    def _copy(self, queue_index: int, source_address: int, destination_address: int, length_bytes: int) -> None:
        control_word = (
            _LINEAR_DMA_OPCODE_BITS | _MESSAGE_BARRIER_BIT | (_GAUDI1_REQUIRED_BITS if self._is_gaudi1 else 0)
        )
        packet = _LINEAR_DMA_PACKET.pack(length_bytes, control_word, source_address, destination_address)
        # Only Gaudi 1 has a mapped command buffer. On later devices, the command buffer follows the staging bytes.
        if self._mapped_command_buffer is not None:
            self._mapped_command_buffer[: len(packet)] = packet
        elif self._staging_buffer is not None:
            self._staging_buffer[_STAGING_BYTES : _STAGING_BYTES + len(packet)] = packet
        sequence_number = _hlthunk.submit(
            self._fd,
            command_buffer=self._command_buffer_reference,
            length_bytes=len(packet),
            queue_index=queue_index,
            is_mapped=not self._is_gaudi1,
        )
        self._pending_sequence_number = sequence_number
        self._wait_until_complete(sequence_number)

    def _wait_until_complete(self, sequence_number: int) -> None:
        deadline_s = time.monotonic() + _COPY_TIMEOUT_S
        try:
            while not _hlthunk.wait(self._fd, sequence_number, timeout_us=_WAIT_CALL_TIMEOUT_US):
                if time.monotonic() > deadline_s:
                    raise error_of(
                        operation="hlthunk_wait_for_cs",
                        error_number=errno.ETIMEDOUT,
                        arguments={"fd": self._fd, "seq": sequence_number},
                        detail=f"a copy takes longer than {_COPY_TIMEOUT_S:g} s",
                    )
        except ApiError as error:
            self.is_device_lost = self.is_device_lost or error.errno == errno.EIO
            raise
        self._pending_sequence_number = 0

    def _call_unless_reset(self, operation: str, **arguments: int) -> None:
        """Call a function that unmaps or frees, unless the driver has already freed everything in a reset."""
        if not self.is_device_lost:
            _hlthunk.call(operation, fd=self._fd, **arguments)
