"""Calls of two documents on Gaudi and InfiniBand, exactly as documented, and their results by the real header.

docs/gaudi.md compares the calls of the documents with those of the header and of gdrkit.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING

import pytest
from gaudi.raw_hlthunk import FLAGS, errno_of

from gdrkit import gaudi as product
from gdrkit.errors import Reason, Unsupported
from gdrkit.harness.needs import gaudi as a_gaudi
from gdrkit.harness.needs import needs
from gdrkit.units import KIB

if TYPE_CHECKING:
    from gaudi.raw_hlthunk import RawDevice

    from gdrkit.gaudi import Device

SIZE = 64 * KIB
NOT_SET = -77

mapped_memory = needs(a_gaudi.device(), a_gaudi.mapped_memory)


@mapped_memory
def test_documented_export_by_handle_is_refused(raw: RawDevice) -> None:
    """Call ``hlthunk_device_memory_export_dmabuf_fd(handle, &fd)``.

    The handle is then in the place of the device's descriptor, and the out-parameter in that of the address.
    """
    handle, address = raw.allocate_mapped(SIZE)
    fd = ctypes.c_int(NOT_SET)
    answer = raw.call("hlthunk_device_memory_export_dmabuf_fd", handle, ctypes.addressof(fd), SIZE, FLAGS)
    assert answer < 0
    assert fd.value == NOT_SET
    # With the right descriptor, the handle is still not an address.
    assert errno_of(raw.export_physical(handle, SIZE)) == errno.EINVAL
    assert (raw.unmap(address), raw.free(handle)) == (0, 0)


@mapped_memory
def test_documented_export_with_three_arguments_is_refused(raw: RawDevice) -> None:
    """Call ``hlthunk_device_mapped_memory_export_dmabuf_fd(addr, size, &fd)``, without device, offset and flags."""
    handle, address = raw.allocate_mapped(SIZE)
    fd = ctypes.c_int(NOT_SET)
    name = "hlthunk_device_mapped_memory_export_dmabuf_fd"
    answer = raw.call(name, address, SIZE, ctypes.addressof(fd), 0, 0)
    assert errno_of(answer) == errno.EINVAL
    assert fd.value == NOT_SET
    assert (raw.unmap(address), raw.free(handle)) == (0, 0)


@mapped_memory
def test_export_of_mapped_host_memory_is_refused(raw: RawDevice) -> None:
    """Export memory "mapped via hlthunk_host_memory_map()": the kernel knows the address and refuses it."""
    buffer = bytearray(SIZE)
    address = raw.map_host(buffer)
    assert errno_of(raw.export(address, SIZE)) == errno.EINVAL
    assert raw.unmap(address) == 0


@mapped_memory
def test_export_call_of_the_feature_document_succeeds(raw: RawDevice) -> None:
    """Pass device, mapped address, size, offset 0 and O_RDWR | O_CLOEXEC."""
    handle, address = raw.allocate_mapped(SIZE)
    fd = raw.export(address, SIZE)
    assert fd >= 0
    os.close(fd)
    assert (raw.unmap(address), raw.free(handle)) == (0, 0)


@needs(a_gaudi.device())
def test_export_returns_a_new_descriptor_each_time(raw: RawDevice) -> None:
    """Export twice: the test of the document returns the constants 42 and 43."""
    for name in ("hlthunk_device_memory_export_dmabuf_fd", "hlthunk_device_mapped_memory_export_dmabuf_fd"):
        assert errno_of(raw.call(name, raw.fd, 0, SIZE, 0, FLAGS)) == errno.EINVAL


@pytest.mark.parametrize("name", ["hlthunk_host_memory_unmap", "hlthunk_import_dmabuf"])
@needs(a_gaudi.device())
def test_documented_function_does_not_exist(raw: RawDevice, name: str) -> None:
    """Look up documented functions: hl-thunk has one unmap for both kinds of mapping, and no import."""
    with pytest.raises(AttributeError, match=name):
        raw.call(name, raw.fd, 0)


@needs(a_gaudi.device())
def test_export_of_host_memory_raises_unsupported(gaudi: Device) -> None:
    buffer = bytearray(SIZE)
    with gaudi.map_host(buffer) as mapping:
        with pytest.raises(Unsupported) as caught:
            mapping.export_dmabuf()
        assert caught.value.reason is Reason.DMABUF_EXPORT_UNSUPPORTED
        assert "host memory" in caught.value.detail
        with gaudi.query(mapping.address) as queried:
            assert queried.dmabuf is None
    assert mapping.closed
    assert isinstance(mapping, product.HostMapping)
