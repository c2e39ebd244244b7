"""NVML and CUDA describe the same GPUs, on hardware and on the twins.

Twins are libraries that emulate the hardware below an API.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any

import pynvml
import pytest

from gdrkit.errors import Api
from gdrkit.evidence import libraries
from gdrkit.harness.needs import cuda as cuda_needs
from gdrkit.harness.needs import needs, software
from gdrkit.report.substrate import is_twin
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.cuda import Device

pytestmark = needs(cuda_needs.device())

# These are values of CUdevice_attribute.
_PCI_BUS_ID, _CAPABILITY_MAJOR, _CAPABILITY_MINOR = 33, 75, 76
# Lengths of the buffers for the results of cuDeviceGetPCIBusId and cuDeviceGetName.
_BUS_ID_BUFFER_BYTES, _NAME_BUFFER_BYTES = 32, 96
# This is NVML_P2P_CAPS_INDEX_READ of nvmlGpuP2PCapsIndex_t. The constant of pynvml is unusable: it is a tuple.
_P2P_READ = 0


@pytest.fixture(autouse=True)
def nvml() -> Iterator[None]:
    """Initialize NVML before each case, and shut it down after the case."""
    pynvml.nvmlInit()
    yield
    pynvml.nvmlShutdown()


def call_driver(function_name: str, *arguments: Any) -> Any:  # noqa: ANN401 - any result of the driver.
    """Call a function of the CUDA driver, and return its result."""
    from cuda.bindings import driver

    status, *results = getattr(driver, function_name)(*arguments)
    assert int(status) == 0, (function_name, status)
    return results[0] if len(results) == 1 else results


def get_device_attribute(device_index: int, attribute: int) -> int:
    from cuda.bindings import driver

    return int(call_driver("cuDeviceGetAttribute", driver.CUdevice_attribute(attribute), device_index))


def test_nvml_and_cuda_agree_about_every_device(device: Device) -> None:
    assert pynvml.nvmlSystemGetCudaDriverVersion_v2() == call_driver("cuDriverGetVersion")
    for device_index in range(call_driver("cuDeviceGetCount")):
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(
            call_driver("cuDeviceGetPCIBusId", _BUS_ID_BUFFER_BYTES, device_index).partition(b"\0")[0].decode()
        )
        uuid_digits = call_driver("cuDeviceGetUuid", device_index).bytes.hex()
        uuid = "GPU-" + "-".join(
            (uuid_digits[:8], uuid_digits[8:12], uuid_digits[12:16], uuid_digits[16:20], uuid_digits[20:])
        )
        assert pynvml.nvmlDeviceGetUUID(handle) == uuid
        handle_by_uuid = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        assert pynvml.nvmlDeviceGetIndex(handle_by_uuid) == pynvml.nvmlDeviceGetIndex(handle)
        device_name = call_driver("cuDeviceGetName", _NAME_BUFFER_BYTES, device_index).partition(b"\0")[0].decode()
        assert pynvml.nvmlDeviceGetName(handle) == device_name
        capability = [
            get_device_attribute(device_index, attribute) for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR)
        ]
        assert list(pynvml.nvmlDeviceGetCudaComputeCapability(handle)) == capability
        assert pynvml.nvmlDeviceGetPciInfo(handle).bus == get_device_attribute(device_index, _PCI_BUS_ID)
        # The total of NVML includes memory that the driver reserves. The total of CUDA excludes it.
        assert pynvml.nvmlDeviceGetMemoryInfo(handle).total >= call_driver("cuDeviceTotalMem", device_index)


@needs(software(Api.CUDA))
def test_nvml_twin_lists_this_process_and_its_memory(device: Device) -> None:
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    used_bytes_before = pynvml.nvmlDeviceGetMemoryInfo(handle).used
    with device.allocate(MIB):
        (process,) = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        assert (process.pid, process.usedGpuMemory) == (os.getpid(), used_bytes_before + MIB)
        assert pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used == used_bytes_before + MIB
    assert pynvml.nvmlDeviceGetMemoryInfo(handle).used == used_bytes_before


@needs(software(Api.CUDA))
def test_nvml_twin_has_no_links_and_no_counters(device: Device) -> None:
    handle, peer_handle = (pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(2))
    for function_name in ("nvmlDeviceGetNvLinkState", "nvmlDeviceGetTemperature"):
        with pytest.raises(pynvml.NVMLError_NotSupported):
            getattr(pynvml, function_name)(handle, 0)  # 0 is the first link, or the sensor NVML_TEMPERATURE_GPU.
    assert pynvml.nvmlDeviceGetPcieThroughput(handle, pynvml.NVML_PCIE_UTIL_TX_BYTES) == 0
    (field,) = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES])
    assert field.nvmlReturn == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert pynvml.nvmlDeviceGetP2PStatus(handle, peer_handle, _P2P_READ) == pynvml.NVML_P2P_STATUS_OK
    fabric_info = pynvml.c_nvmlGpuFabricInfoV_t()
    pynvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(fabric_info))
    assert fabric_info.state == pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED


@needs(software(Api.CUDA))
def test_nvml_twin_is_reported_as_a_twin(device: Device) -> None:
    (library,) = (library for library in libraries() if library.soname == "libnvidia-ml.so.1")
    assert is_twin(library)
