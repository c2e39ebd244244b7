"""gdrkit wraps memory of other libraries and never frees it. Other libraries can use memory of gdrkit."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
from support.memory_kinds import NEEDS_DMABUF, connect_peer_queue_pair
from support.raw_cuda import allocate_raw_managed, free_raw

from gdrkit import cuda, pattern
from gdrkit.buffers import MemoryKind
from gdrkit.errors import Reason, Unsupported, UsageError
from gdrkit.harness.needs import cuda as cuda_needs
from gdrkit.harness.needs import needs
from gdrkit.registration import RegionCache
from gdrkit.units import KIB
from gdrkit.verbs import Status

if TYPE_CHECKING:
    from gdrkit.cuda import Device, DeviceMemory
    from gdrkit.harness.peer import Peer
    from gdrkit.verbs import Nic

pytestmark = needs(cuda_needs.device())

LENGTH_BYTES = 64 * KIB


class ArrayWithInterface:
    """An array of another library, with ``__cuda_array_interface__``.

    `fields` replace fields of the interface. A field with the value "absent" is left out. `offset_bytes`, which is not
    a field, is added to the address of the memory.
    """

    def __init__(self, memory: DeviceMemory, **fields: object) -> None:
        offset_bytes = fields.pop("offset_bytes", 0)
        assert isinstance(offset_bytes, int)
        self.interface = {
            "shape": (64, 256),  # With 4 bytes per element, this is LENGTH_BYTES.
            "typestr": "<f4",
            "data": (memory.address + offset_bytes, False),
            "version": 3,
            "strides": None,
            "stream": None,
        } | fields

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {name: value for name, value in self.interface.items() if value != "absent"}


class DlpackArray:
    """An array of a library that supports only DLPack. It returns the capsule of the memory."""

    def __init__(self, memory: DeviceMemory, **dlpack_arguments: Any) -> None:  # noqa: ANN401
        self.memory = memory
        self.dlpack_arguments = dlpack_arguments

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.memory.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None) -> object:
        return self.memory.__dlpack__(stream=stream, **self.dlpack_arguments)


@NEEDS_DMABUF
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"version": 2, "stream": "absent"},
        {"strides": (1024, 4)},
        {"shape": (1, 64, 256), "strides": (7, 1024, 4)},
        # Streams 1 and 2 are the default streams of CUDA: the legacy stream and the stream of the thread.
        {"stream": 1},
        {"stream": 2},
        {"strides": "absent"},
    ],
    ids=str,
)
def test_wrapped_array_is_registered_and_not_freed(
    device: Device, nic: Nic, peer: Peer, seed: int, fields: dict[str, object]
) -> None:
    with device.allocate(LENGTH_BYTES) as memory:
        with (
            cuda.wrap(ArrayWithInterface(memory, **fields), device=device) as wrapped_memory,
            RegionCache([nic]) as cache,
            connect_peer_queue_pair(nic, peer) as peer_pair,
        ):
            assert (wrapped_memory.address, wrapped_memory.length_bytes, wrapped_memory.kind) == (
                memory.address,
                LENGTH_BYTES,
                MemoryKind.CUDA,
            )
            with cache.lease(wrapped_memory) as lease:
                peer_pair.write(lease.remote(nic), seed=seed).expect(Status.SUCCESS)
        pattern.check(memory.read(), seed=seed)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"version": 1}, Reason.MALFORMED),
        ({"version": 4}, Reason.MALFORMED),
        ({"data": 7}, Reason.MALFORMED),
        ({"data": "absent"}, Reason.MALFORMED),
        ({"typestr": "float"}, Reason.MALFORMED),
        ({"shape": (-1, 4)}, Reason.MALFORMED),
        ({"shape": [4]}, Reason.MALFORMED),
        ({"strides": (4,)}, Reason.MALFORMED),
        ({"stream": 0}, Reason.MALFORMED),
        ({"shape": (0, 4)}, Reason.BAD_ARGUMENT),
        ({"strides": (2048, 4)}, Reason.BAD_ARGUMENT),
        ({"shape": (256, 64), "strides": (4, 1024)}, Reason.BAD_ARGUMENT),
        ({"mask": 1}, Reason.BAD_ARGUMENT),
        ({"data": (0, False)}, Reason.NOT_DEVICE_MEMORY),
        ({"data": (4096, False)}, Reason.NOT_DEVICE_MEMORY),
        ({"shape": (1 << 40,)}, Reason.NOT_DEVICE_MEMORY),
    ],
    ids=str,
)
def test_malformed_array_interface_is_refused(device: Device, fields: dict[str, object], reason: Reason) -> None:
    with device.allocate(LENGTH_BYTES) as memory, pytest.raises(UsageError) as error_info:
        cuda.wrap(ArrayWithInterface(memory, **fields), device=device)
    assert error_info.value.reason is reason


def test_read_only_array_needs_read_only_argument(device: Device) -> None:
    with device.allocate(LENGTH_BYTES) as memory:
        array = ArrayWithInterface(memory, data=(memory.address, True))  # True means that the array is read-only.
        with pytest.raises(UsageError):
            cuda.wrap(array, device=device)
        cuda.wrap(array, device=device, read_only=True).close()


def test_object_without_a_protocol_is_refused(device: Device) -> None:
    with pytest.raises(UsageError):
        cuda.wrap(bytearray(8), device=device)


def test_managed_memory_is_refused_with_advice(device: Device) -> None:
    address = allocate_raw_managed(device, LENGTH_BYTES)
    try:
        with device.allocate(LENGTH_BYTES) as memory, pytest.raises(Unsupported) as error_info:
            cuda.wrap(ArrayWithInterface(memory, data=(address, False)), device=device)
    finally:
        free_raw(device, address)
    assert error_info.value.reason is Reason.NOT_SUPPORTED
    assert "managed" in error_info.value.detail
    assert error_info.value.what_to_do


def test_managed_and_host_memory_by_dlpack_are_refused(device: Device) -> None:
    class ArrayOnOtherDevice(DlpackArray):
        """An array that names a device of the type `device_type` in place of the device of the memory."""

        def __dlpack_device__(self) -> tuple[int, int]:
            return device_type, 0

    with device.allocate(LENGTH_BYTES) as memory:
        device_type = 13  # kDLCUDAManaged
        with pytest.raises(Unsupported) as error_info:
            cuda.wrap(ArrayOnOtherDevice(memory), device=device)
        assert error_info.value.status_name == "kDLCUDAManaged"
        # kDLCPU, kDLCUDAHost and kDLROCM.
        for device_type in (1, 3, 10):  # noqa: B007 - the class above reads it.
            with pytest.raises(UsageError) as host_error_info:
                cuda.wrap(ArrayOnOtherDevice(memory), device=device)
            assert host_error_info.value.reason is Reason.NOT_DEVICE_MEMORY


@pytest.mark.parametrize("max_version", [None, (1, 0), (0, 8)], ids=str)
def test_dlpack_export_and_import_keep_the_address(device: Device, max_version: tuple[int, int] | None) -> None:
    memory = device.allocate(LENGTH_BYTES - 100)
    with cuda.wrap(DlpackArray(memory, max_version=max_version), device=device) as wrapped_memory:
        assert (wrapped_memory.address, wrapped_memory.length_bytes) == (memory.address, LENGTH_BYTES - 100)
        # `wrapped_memory` still uses the memory.
        with pytest.raises(UsageError) as error_info:
            memory.close()
        assert error_info.value.reason is Reason.BUSY
        assert not memory.closed
    memory.close()


def test_unconsumed_capsule_releases_the_memory(device: Device) -> None:
    with device.allocate(LENGTH_BYTES) as memory:
        capsule = memory.__dlpack__(max_version=(1, 3))
        with pytest.raises(UsageError):
            memory.close()
        del capsule
        gc.collect()


def test_capsule_can_be_consumed_once(device: Device) -> None:
    class ArrayWithOneCapsule(DlpackArray):
        """An array that returns the same object, `capsule`, at each call."""

        def __dlpack__(self, *, stream: int | None = None) -> object:
            return capsule

    with device.allocate(LENGTH_BYTES) as memory:
        capsule = memory.__dlpack__()
        with cuda.wrap(ArrayWithOneCapsule(memory), device=device), pytest.raises(UsageError) as error_info:
            cuda.wrap(ArrayWithOneCapsule(memory), device=device)
        assert error_info.value.reason is Reason.MALFORMED
        capsule = object()
        with pytest.raises(UsageError) as error_info:
            cuda.wrap(ArrayWithOneCapsule(memory), device=device)
        assert error_info.value.reason is Reason.MALFORMED


def test_dlpack_copy_or_other_device_raises_buffer_error(device: Device) -> None:
    with device.allocate(LENGTH_BYTES) as memory:
        with pytest.raises(BufferError):
            memory.__dlpack__(copy=True)
        with pytest.raises(BufferError):
            memory.__dlpack__(dl_device=(1, 0))  # 1 is kDLCPU.


def test_memory_has_a_cuda_array_interface(device: Device) -> None:
    with device.allocate(1000) as memory:
        fields = memory.__cuda_array_interface__
        assert fields["data"] == (memory.address, False)
        assert (fields["shape"], fields["typestr"], fields["version"]) == ((1000,), "|u1", 3)
        with cuda.wrap(memory, device=device) as wrapped_memory:
            assert (wrapped_memory.address, wrapped_memory.length_bytes) == (memory.address, 1000)


def test_wrapper_keeps_the_array_until_it_is_closed(device: Device) -> None:
    with device.allocate(LENGTH_BYTES) as memory:
        array = ArrayWithInterface(memory)
        array_reference = weakref.ref(array)
        wrapped_memory = cuda.wrap(array, device=device)
        del array
        gc.collect()
        assert array_reference() is not None
        wrapped_memory.close()
        del wrapped_memory
        gc.collect()
        assert array_reference() is None
