"""Memory of other libraries is wrapped and never freed; ours is shown to them."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
from support.raw_cuda import raw_allocate_managed, raw_free
from support.reach import DMABUF, joined

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

SIZE = 64 * KIB


class Array:
    """An array of some library, as the protocol lets others see it."""

    def __init__(self, memory: DeviceMemory, **said: object) -> None:
        offset_bytes = said.pop("offset_bytes", 0)
        assert isinstance(offset_bytes, int)
        self.said = {
            "shape": (64, 256),
            "typestr": "<f4",
            "data": (memory.address + offset_bytes, False),
            "version": 3,
            "strides": None,
            "stream": None,
        } | said

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {name: value for name, value in self.said.items() if value != "absent"}


class OnlyDlpack:
    """A library that has DLPack alone; passes on what the memory says."""

    def __init__(self, memory: DeviceMemory, **more: Any) -> None:  # noqa: ANN401 - whatever __dlpack__ takes.
        self.memory = memory
        self.more = more

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.memory.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None) -> object:
        return self.memory.__dlpack__(stream=stream, **self.more)


@DMABUF
@pytest.mark.parametrize(
    "said",
    [
        {},
        {"version": 2, "stream": "absent"},
        {"strides": (1024, 4)},
        {"shape": (1, 64, 256), "strides": (7, 1024, 4)},
        {"stream": 1},
        {"stream": 2},
        {"strides": "absent"},
    ],
    ids=str,
)
def test_an_array_is_wrapped_registered_and_not_freed(
    device: Device, nic: Nic, peer: Peer, seed: int, said: dict[str, object]
) -> None:
    with device.allocate(SIZE) as memory:
        with (
            cuda.wrap(Array(memory, **said), device=device) as wrapped,
            RegionCache([nic]) as cache,
            joined(nic, peer) as theirs,
        ):
            assert (wrapped.address, wrapped.length_bytes, wrapped.kind) == (memory.address, SIZE, MemoryKind.CUDA)
            with cache.lease(wrapped) as lease:
                theirs.write(lease.remote(nic), seed=seed).expect(Status.SUCCESS)
        pattern.check(memory.read(), seed=seed)


@pytest.mark.parametrize(
    ("said", "reason"),
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
def test_what_cannot_be_is_refused(device: Device, said: dict[str, object], reason: Reason) -> None:
    with device.allocate(SIZE) as memory, pytest.raises(UsageError) as raised:
        cuda.wrap(Array(memory, **said), device=device)
    assert raised.value.reason is reason


def test_an_array_that_is_read_only_is_taken_only_when_that_is_said(device: Device) -> None:
    with device.allocate(SIZE) as memory:
        array = Array(memory, data=(memory.address, True))
        with pytest.raises(UsageError):
            cuda.wrap(array, device=device)
        cuda.wrap(array, device=device, read_only=True).close()


def test_something_else_is_refused(device: Device) -> None:
    with pytest.raises(UsageError):
        cuda.wrap(bytearray(8), device=device)


def test_managed_memory_is_refused_with_the_reason(device: Device) -> None:
    address = raw_allocate_managed(device, SIZE)
    try:
        with device.allocate(SIZE) as memory, pytest.raises(Unsupported) as raised:
            cuda.wrap(Array(memory, data=(address, False)), device=device)
    finally:
        raw_free(device, address)
    assert raised.value.reason is Reason.NOT_SUPPORTED
    assert "managed" in raised.value.detail
    assert raised.value.what_to_do


def test_managed_and_host_memory_by_dlpack_are_refused(device: Device) -> None:
    class Elsewhere(OnlyDlpack):
        def __dlpack_device__(self) -> tuple[int, int]:
            return kind, 0

    with device.allocate(SIZE) as memory:
        kind = 13  # kDLCUDAManaged
        with pytest.raises(Unsupported) as raised:
            cuda.wrap(Elsewhere(memory), device=device)
        assert raised.value.status_name == "kDLCUDAManaged"
        for kind in (1, 3, 10):  # noqa: B007 - the class above reads it.
            with pytest.raises(UsageError) as refused:
                cuda.wrap(Elsewhere(memory), device=device)
            assert refused.value.reason is Reason.NOT_DEVICE_MEMORY


@pytest.mark.parametrize("max_version", [None, (1, 0), (0, 8)], ids=str)
def test_our_memory_goes_out_and_comes_in_by_dlpack(device: Device, max_version: tuple[int, int] | None) -> None:
    memory = device.allocate(SIZE - 100)
    with cuda.wrap(OnlyDlpack(memory, max_version=max_version), device=device) as wrapped:
        assert (wrapped.address, wrapped.length_bytes) == (memory.address, SIZE - 100)
        # Somebody uses it.
        with pytest.raises(UsageError) as raised:
            memory.close()
        assert raised.value.reason is Reason.BUSY
        assert not memory.closed
    memory.close()


def test_a_capsule_that_nobody_takes_lets_go(device: Device) -> None:
    with device.allocate(SIZE) as memory:
        capsule = memory.__dlpack__(max_version=(1, 3))
        with pytest.raises(UsageError):
            memory.close()
        del capsule
        gc.collect()


def test_a_capsule_is_taken_once(device: Device) -> None:
    class Again(OnlyDlpack):
        def __dlpack__(self, *, stream: int | None = None) -> object:
            return capsule

    with device.allocate(SIZE) as memory:
        capsule = memory.__dlpack__()
        with cuda.wrap(Again(memory), device=device), pytest.raises(UsageError) as raised:
            cuda.wrap(Again(memory), device=device)
        assert raised.value.reason is Reason.MALFORMED
        capsule = object()
        with pytest.raises(UsageError) as raised:
            cuda.wrap(Again(memory), device=device)
        assert raised.value.reason is Reason.MALFORMED


def test_copies_and_other_devices_are_refused_as_the_protocol_wants(device: Device) -> None:
    with device.allocate(SIZE) as memory:
        with pytest.raises(BufferError):
            memory.__dlpack__(copy=True)
        with pytest.raises(BufferError):
            memory.__dlpack__(dl_device=(1, 0))


def test_our_memory_shows_itself_by_the_array_interface(device: Device) -> None:
    with device.allocate(1000) as memory:
        said = memory.__cuda_array_interface__
        assert said["data"] == (memory.address, False)
        assert (said["shape"], said["typestr"], said["version"]) == ((1000,), "|u1", 3)
        with cuda.wrap(memory, device=device) as wrapped:
            assert (wrapped.address, wrapped.length_bytes) == (memory.address, 1000)


def test_the_wrapper_keeps_the_array_and_lets_it_go(device: Device) -> None:
    with device.allocate(SIZE) as memory:
        array = Array(memory)
        seen = weakref.ref(array)
        wrapped = cuda.wrap(array, device=device)
        del array
        gc.collect()
        assert seen() is not None
        wrapped.close()
        del wrapped
        gc.collect()
        assert seen() is None
