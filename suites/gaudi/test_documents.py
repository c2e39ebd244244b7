"""Calls of hl-thunk exactly as two documents on Gaudi and InfiniBand describe them. Most of these calls are wrong.

Each case makes a documented call with the signature of the real header ``hlthunk.h``, and checks what the call returns.
docs/gaudi.md compares the calls in the documents with the header and with gdrkit.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING

import pytest
from gaudi.raw_hlthunk import EXPORT_FLAGS, get_errno

from gdrkit.errors import Reason, Unsupported
from gdrkit.gaudi import HostMapping
from gdrkit.harness.needs import gaudi as gaudi_needs
from gdrkit.harness.needs import needs
from gdrkit.units import KIB

if TYPE_CHECKING:
    from gaudi.raw_hlthunk import RawDevice

    from gdrkit.gaudi import Device

MEMORY_BYTES = 64 * KIB
# An out-parameter has this value before a call that must not change it.
FD_NOT_SET = -77

needs_mapped_memory = needs(gaudi_needs.device(), gaudi_needs.mapped_memory)


@needs_mapped_memory
def test_documented_export_by_handle_is_refused(raw_device: RawDevice) -> None:
    """Call ``hlthunk_device_memory_export_dmabuf_fd(handle, &fd)``.

    The header has (device_fd, addr, size, flags). The documented call therefore passes the handle as the descriptor of
    the device, and the address of ``fd`` as the address of the memory.
    """
    handle, address = raw_device.allocate_mapped(MEMORY_BYTES)
    fd = ctypes.c_int(FD_NOT_SET)
    result = raw_device.call(
        "hlthunk_device_memory_export_dmabuf_fd", handle, ctypes.addressof(fd), MEMORY_BYTES, EXPORT_FLAGS
    )
    assert result < 0
    assert fd.value == FD_NOT_SET
    # With the right descriptor, the handle is still not an address.
    assert get_errno(raw_device.export_physical(handle, MEMORY_BYTES)) == errno.EINVAL
    assert (raw_device.unmap(address), raw_device.free(handle)) == (0, 0)


@needs_mapped_memory
def test_documented_export_with_three_arguments_is_refused(raw_device: RawDevice) -> None:
    """Call ``hlthunk_device_mapped_memory_export_dmabuf_fd(addr, size, &fd)``, without device, offset and flags."""
    handle, address = raw_device.allocate_mapped(MEMORY_BYTES)
    fd = ctypes.c_int(FD_NOT_SET)
    function_name = "hlthunk_device_mapped_memory_export_dmabuf_fd"
    result = raw_device.call(function_name, address, MEMORY_BYTES, ctypes.addressof(fd), 0, 0)
    assert get_errno(result) == errno.EINVAL
    assert fd.value == FD_NOT_SET
    assert (raw_device.unmap(address), raw_device.free(handle)) == (0, 0)


@needs_mapped_memory
def test_export_of_mapped_host_memory_is_refused(raw_device: RawDevice) -> None:
    """Export host memory, as a document proposes. The kernel knows the mapped address, and refuses the export."""
    buffer = bytearray(MEMORY_BYTES)
    address = raw_device.map_host(buffer)
    assert get_errno(raw_device.export(address, MEMORY_BYTES)) == errno.EINVAL
    assert raw_device.unmap(address) == 0


@needs_mapped_memory
def test_documented_export_with_five_arguments_succeeds(raw_device: RawDevice) -> None:
    """Pass device, mapped address, size, offset 0 and O_RDWR | O_CLOEXEC."""
    handle, address = raw_device.allocate_mapped(MEMORY_BYTES)
    fd = raw_device.export(address, MEMORY_BYTES)
    assert fd >= 0
    os.close(fd)
    assert (raw_device.unmap(address), raw_device.free(handle)) == (0, 0)


@needs(gaudi_needs.device())
def test_documented_export_of_address_0_is_refused(raw_device: RawDevice) -> None:
    """Call both export functions with address 0.

    A test in the document passes only because it replaces both functions by functions that return the constants 42 and
    43 as descriptors.
    """
    for function_name in ("hlthunk_device_memory_export_dmabuf_fd", "hlthunk_device_mapped_memory_export_dmabuf_fd"):
        assert (
            get_errno(raw_device.call(function_name, raw_device.fd, 0, MEMORY_BYTES, 0, EXPORT_FLAGS)) == errno.EINVAL
        )


@pytest.mark.parametrize("function_name", ["hlthunk_host_memory_unmap", "hlthunk_import_dmabuf"])
@needs(gaudi_needs.device())
def test_documented_function_does_not_exist(raw_device: RawDevice, function_name: str) -> None:
    """Look up documented functions. hl-thunk has one unmap function for all mappings, and no import function."""
    with pytest.raises(AttributeError, match=function_name):
        raw_device.call(function_name, raw_device.fd, 0)


@needs(gaudi_needs.device())
def test_export_of_host_memory_raises_unsupported(gaudi: Device) -> None:
    buffer = bytearray(MEMORY_BYTES)
    with gaudi.map_host(buffer) as mapping:
        with pytest.raises(Unsupported) as error_info:
            mapping.export_dmabuf()
        assert error_info.value.reason is Reason.DMABUF_EXPORT_UNSUPPORTED
        assert "host memory" in error_info.value.detail
        with gaudi.query(mapping.address) as query_result:
            assert query_result.dmabuf is None
    assert mapping.closed
    assert isinstance(mapping, HostMapping)
