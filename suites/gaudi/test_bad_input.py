"""Invalid input to gdrkit.gaudi and malformed variables of its twin: each call fails with one typed error."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from gdrkit.errors import Api, ApiError, Reason, UsageError
from gdrkit.gaudi import _hlthunk
from gdrkit.harness.needs import gaudi as gaudi_needs
from gdrkit.harness.needs import needs, software
from gdrkit.units import KIB

if TYPE_CHECKING:
    from gdrkit.gaudi import Device

EXPORT_FUNCTION = "hlthunk_device_mapped_memory_export_dmabuf_fd"
EXPORT_FLAGS = os.O_RDWR | os.O_CLOEXEC
ALLOCATION_BYTES = 64 * KIB
PROGRAM_WITHOUT_DEVICE = """
from gdrkit import gaudi
from gdrkit.errors import ApiError, UsageError
assert gaudi.device_count() == 0
assert gaudi.list_devices() == ()
try:
    gaudi.Device(0)
except UsageError as error:
    print(error.reason.value, error.what_to_do)
try:
    gaudi.Device(pci_bus_id="0000:33:00.0")
except ApiError as error:
    print(error.operation, error.status_name)
"""

needs_mapped_memory = needs(gaudi_needs.device(), gaudi_needs.mapped_memory)


@needs_mapped_memory
@pytest.mark.parametrize(
    "changed_arguments",
    [
        {"flags": os.O_RDWR},
        {"offset": 1},
        {"size": ALLOCATION_BYTES + 1},
        {"size": 0},
        {"size": 1 << 40},
        {"offset": 1 << 40},
        {"addr": 0},
    ],
    ids=["wrong flags", "odd offset", "odd size", "no size", "too long", "too far", "no address"],
)
def test_invalid_export_arguments_are_refused(gaudi: Device, changed_arguments: dict[str, int]) -> None:
    with gaudi.allocate(ALLOCATION_BYTES) as memory:
        arguments = {
            "fd": gaudi.fd,
            "addr": memory.address,
            "size": ALLOCATION_BYTES,
            "offset": 0,
            "flags": EXPORT_FLAGS,
            **changed_arguments,
        }
        with pytest.raises(ApiError) as error_info:
            _hlthunk.call(EXPORT_FUNCTION, **arguments)
        assert (error_info.value.api, error_info.value.operation) == (Api.HLTHUNK, EXPORT_FUNCTION)
        assert (error_info.value.errno, error_info.value.reason) == (errno.EINVAL, Reason.BAD_ARGUMENT)
        assert dict(error_info.value.arguments) == arguments
        assert "hlthunk_device_memory_map" in error_info.value.what_to_do
        # The memory stays usable: the next valid export succeeds.
        memory.export_dmabuf().close()


@needs_mapped_memory
@pytest.mark.parametrize(
    ("operation", "arguments", "reason"),
    [
        ("hlthunk_device_memory_map", {"handle": 4711, "hint_addr": 0}, Reason.BAD_ARGUMENT),
        ("hlthunk_device_memory_free", {"handle": 4711}, Reason.BAD_ARGUMENT),
        # gdrkit reports each EINVAL of an unmap as BUSY, because an open dma-buf is the usual cause.
        ("hlthunk_memory_unmap", {"device_virt_addr": 4096}, Reason.BUSY),
    ],
)
def test_call_on_missing_memory_is_refused(
    gaudi: Device, operation: str, arguments: dict[str, Any], reason: Reason
) -> None:
    with pytest.raises(ApiError) as error_info:
        _hlthunk.call(operation, fd=gaudi.fd, **arguments)
    assert (error_info.value.operation, error_info.value.errno, error_info.value.reason) == (
        operation,
        errno.EINVAL,
        reason,
    )
    assert error_info.value.what_to_do


@needs_mapped_memory
def test_second_free_is_refused(gaudi: Device) -> None:
    fd = gaudi.fd
    arguments = {"fd": fd, "size": ALLOCATION_BYTES, "page_size": 0, "contiguous": True, "shared": False}
    handle = _hlthunk.call("hlthunk_device_memory_alloc", **arguments)
    _hlthunk.call("hlthunk_device_memory_free", fd=fd, handle=handle)
    with pytest.raises(ApiError) as error_info:
        _hlthunk.call("hlthunk_device_memory_free", fd=fd, handle=handle)
    assert (error_info.value.errno, error_info.value.status_name) == (errno.EINVAL, "EINVAL")


@needs(gaudi_needs.device())
def test_descriptor_of_another_file_is_refused(gaudi: Device) -> None:
    read_fd, write_fd = os.pipe()
    # A pipe has no ioctl of hl-thunk (ENOTTY), and no file is open with the number 1 << 20 (EBADF).
    for fd, expected_errno in ((read_fd, errno.ENOTTY), (1 << 20, errno.EBADF)):
        with pytest.raises(ApiError) as error_info:
            _hlthunk.call("hlthunk_memory_unmap", fd=fd, device_virt_addr=0)
        assert (error_info.value.errno, error_info.value.reason) == (expected_errno, Reason.BAD_DESCRIPTOR)
    os.close(read_fd)
    os.close(write_fd)
    assert not gaudi.closed


@needs(gaudi_needs.device())
@pytest.mark.parametrize(
    ("offset_bytes", "length_bytes"), [(-1, 10), (ALLOCATION_BYTES, 1), (0, ALLOCATION_BYTES + 1), (5, 0)]
)
def test_part_outside_the_memory_is_refused(gaudi: Device, offset_bytes: int, length_bytes: int) -> None:
    with gaudi.allocate(ALLOCATION_BYTES) as memory:
        with pytest.raises(UsageError) as error_info:
            memory.export_dmabuf(offset_bytes=offset_bytes, length_bytes=length_bytes)
        assert error_info.value.reason is Reason.BAD_ARGUMENT


@needs(software("hlthunk"))
def test_machine_without_gaudi_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDRKIT_TWINS_GAUDIS", "0")
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM_WITHOUT_DEVICE], capture_output=True, text=True, check=True, timeout=60
    )
    first_line, second_line = completed.stdout.splitlines()
    assert first_line.startswith("no_device ")
    assert second_line == "hlthunk_open EINVAL"


@needs(software("hlthunk"))
@pytest.mark.parametrize(
    ("variable", "value"),
    # GDRKIT_TWINS_GAUDI is the model of the emulated devices, and GDRKIT_TWINS_GAUDIS is their number.
    [("GDRKIT_TWINS_GAUDI", "gaudi4"), ("GDRKIT_TWINS_GAUDIS", "many"), ("GDRKIT_TWINS_GAUDI_BAR_MIB", "-1")],
)
def test_malformed_twin_variable_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    program = "from gdrkit import gaudi; gaudi.device_count()"
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert completed.returncode == 1
    assert f"gdrkit twin: {variable}={value}: expected " in completed.stderr
    assert "failed: Invalid argument (EINVAL)" in completed.stderr
