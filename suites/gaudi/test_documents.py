"""The calls in two documents on Gaudi and InfiniBand, as they stand there, and what they give by the real header.

docs/gaudi.md has the documents' calls beside the header's and gdrkit's.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING

import pytest
from support.raw_hlthunk import FLAGS, errno_of

from gdrkit import gaudi as product
from gdrkit.errors import Reason, Unsupported
from gdrkit.harness.needs import gaudi as a_gaudi
from gdrkit.harness.needs import needs
from gdrkit.units import KIB

if TYPE_CHECKING:
    from support.raw_hlthunk import RawDevice

    from gdrkit.gaudi import Device

SIZE = 64 * KIB
NOT_SET = -77

mapped_memory = needs(a_gaudi.device(), a_gaudi.mapped_memory)


@mapped_memory
def test_the_fix_by_handle_exports_nothing(raw: RawDevice) -> None:
    """``hlthunk_device_memory_export_dmabuf_fd(handle, &fd)``: the handle lands where the device's descriptor belongs,
    the out-parameter where the address does.
    """
    handle, address = raw.mapped(SIZE)
    fd = ctypes.c_int(NOT_SET)
    answer = raw.call("hlthunk_device_memory_export_dmabuf_fd", handle, ctypes.addressof(fd), SIZE, FLAGS)
    assert answer < 0
    assert fd.value == NOT_SET
    # And given the device, a handle is no address.
    assert errno_of(raw.export_physical(handle, SIZE)) == errno.EINVAL
    assert (raw.unmap(address), raw.free(handle)) == (0, 0)


@mapped_memory
def test_the_fix_by_address_with_three_arguments_exports_nothing(raw: RawDevice) -> None:
    """``hlthunk_device_mapped_memory_export_dmabuf_fd(addr, size, &fd)``: no device, no offset, no flags."""
    handle, address = raw.mapped(SIZE)
    fd = ctypes.c_int(NOT_SET)
    name = "hlthunk_device_mapped_memory_export_dmabuf_fd"
    answer = raw.call(name, address, SIZE, ctypes.addressof(fd), 0, 0)
    assert errno_of(answer) == errno.EINVAL
    assert fd.value == NOT_SET
    assert (raw.unmap(address), raw.free(handle)) == (0, 0)


@mapped_memory
def test_the_address_of_host_memory_is_never_exported(raw: RawDevice) -> None:
    """Memory "mapped via hlthunk_host_memory_map()": the kernel knows it, and refuses it."""
    buffer = bytearray(SIZE)
    address = raw.map_host(buffer)
    assert errno_of(raw.export(address, SIZE)) == errno.EINVAL
    assert raw.unmap(address) == 0


@mapped_memory
def test_the_call_of_the_feature_document_is_right(raw: RawDevice) -> None:
    """Device, mapped address, size, offset 0, O_RDWR | O_CLOEXEC."""
    handle, address = raw.mapped(SIZE)
    fd = raw.export(address, SIZE)
    assert fd >= 0
    os.close(fd)
    assert (raw.unmap(address), raw.free(handle)) == (0, 0)


@needs(a_gaudi.device())
def test_a_descriptor_is_a_new_one_each_time_and_never_42(raw: RawDevice) -> None:
    """The document's own test gives 42 and 43 for whatever it is asked."""
    for name in ("hlthunk_device_memory_export_dmabuf_fd", "hlthunk_device_mapped_memory_export_dmabuf_fd"):
        assert errno_of(raw.call(name, raw.fd, 0, SIZE, 0, FLAGS)) == errno.EINVAL


@pytest.mark.parametrize("name", ["hlthunk_host_memory_unmap", "hlthunk_import_dmabuf"])
@needs(a_gaudi.device())
def test_functions_that_nobody_has(raw: RawDevice, name: str) -> None:
    """One unmap serves both kinds of mapping, and hl-thunk imports nothing."""
    with pytest.raises(AttributeError, match=name):
        raw.call(name, raw.fd, 0)


@needs(a_gaudi.device())
def test_gdrkit_says_why_host_memory_does_not_go_out(gaudi: Device) -> None:
    buffer = bytearray(SIZE)
    with gaudi.map_host(buffer) as mapping:
        with pytest.raises(Unsupported) as caught:
            mapping.export_dmabuf()
        assert caught.value.reason is Reason.DMABUF_EXPORT_UNSUPPORTED
        assert "host memory" in caught.value.detail
        with gaudi.query(mapping.address) as found:
            assert found.dmabuf is None
    assert mapping.closed
    assert isinstance(mapping, product.HostMapping)
