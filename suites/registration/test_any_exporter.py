"""Memory of any dma-buf exporter: gdrkit registers its dma-buf, finds it in caches, and shares it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.faults import inject_faults
from support.kernel_exporters import DMA_HEAP, UDMABUF, VGEM, export_dmabuf
from support.memory_kinds import NEEDS_DMABUF
from support.python_child import suites_environ

from gdrkit import handles, launch, pattern
from gdrkit.buffers import DmabufRange
from gdrkit.errors import Api, ApiError, Reason, RegistrationFailed, Unsupported, UsageError
from gdrkit.harness.needs import cuda, host, needs, verbs
from gdrkit.registration import DmabufMemory, RegionCache, ShareKind, export_memory, import_dmabuf, register
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.cuda import Device
    from gdrkit.verbs import Nic

# Offset and length of the part of a dma-buf that REGISTERING_PROGRAM registers.
OFFSET_BYTES, PART_BYTES = 64 * KIB + 4099, 300_001
# Device files of kernel drivers that export dma-bufs.
EXPORTER_PATHS = [pytest.param(path, marks=needs(host.device_file(path))) for path in (UDMABUF, DMA_HEAP, VGEM)]
# A program without CUDA that registers a part of the dma-buf of an inherited descriptor, and lets a peer write to this
# part. Its arguments are the number of the descriptor and the seed.
REGISTERING_PROGRAM = f"""
import sys
from pathlib import Path
from gdrkit import verbs
from gdrkit.buffers import DmabufRange
from gdrkit.harness.peer import Peer
from gdrkit.registration import DmabufMemory, RegionCache
from gdrkit.verbs import Status
from support.memory_kinds import connect_peer_queue_pair

fd, seed = int(sys.argv[1]), int(sys.argv[2])
nic = verbs.open_active_nics()[0]
with nic, RegionCache([nic]) as cache, Peer() as peer, connect_peer_queue_pair(nic, peer) as peer_pair:
    dmabuf_range = DmabufRange.from_fd(fd, offset_bytes={OFFSET_BYTES}, length_bytes={PART_BYTES})
    with DmabufMemory(dmabuf_range) as memory, cache.lease(memory) as lease:
        peer_pair.write(lease.remote(nic), seed=seed).expect(Status.SUCCESS)
assert "libcuda" not in Path("/proc/self/maps").read_text()
"""


@NEEDS_DMABUF
@needs(verbs.foreign_dmabuf)
def test_process_without_cuda_registers_an_inherited_descriptor(device: Device, seed: int) -> None:
    with device.allocate(MIB) as memory, memory.export_dmabuf() as dmabuf:
        memory.fill(0)
        command = [sys.executable, "-c", REGISTERING_PROGRAM, str(dmabuf.fd), str(seed)]
        subprocess.run(command, env=suites_environ(), pass_fds=(dmabuf.fd,), check=True, timeout=120)
        pattern.check(memory.read(offset_bytes=OFFSET_BYTES, length_bytes=PART_BYTES), seed=seed)
        assert memory.read(length_bytes=OFFSET_BYTES) == bytes(OFFSET_BYTES)
        end_offset = OFFSET_BYTES + PART_BYTES
        assert memory.read(offset_bytes=end_offset) == bytes(MIB - end_offset)


@pytest.fixture
def dmabufs(device: Device) -> Iterator[tuple[int, int]]:
    """Yield the descriptors of two dma-bufs of two allocations."""
    with (
        device.allocate(MIB) as first_memory,
        device.allocate(MIB) as second_memory,
        first_memory.export_dmabuf() as first_dmabuf,
        second_memory.export_dmabuf() as second_dmabuf,
    ):
        yield first_dmabuf.fd, second_dmabuf.fd


@NEEDS_DMABUF
@needs(verbs.foreign_dmabuf)
def test_cache_finds_a_dmabuf_by_its_identity(dmabufs: tuple[int, int], nic: Nic) -> None:
    first_fd, second_fd = dmabufs
    with RegionCache([nic]) as cache, contextlib.ExitStack() as stack:
        for offset_bytes in (0, 4096, 5000):
            fd = os.dup(first_fd)
            memory = DmabufMemory(DmabufRange.from_fd(fd, offset_bytes=offset_bytes, length_bytes=10_000))
            os.close(fd)
            with memory, cache.lease(memory, offset_bytes=7) as lease:
                remote_range = lease.remote(nic)
                # For peers, the first byte of such a dma-buf has the address 64 KiB; see DmabufRange.from_fd().
                assert (remote_range.address, remote_range.length_bytes) == (64 * KIB + offset_bytes + 7, 9993)
        assert (cache.statistics().registrations, cache.statistics().hits) == (1, 2)
        other_memory = stack.enter_context(DmabufMemory(DmabufRange.from_fd(second_fd)))
        cache.lease(other_memory).close()
        assert cache.statistics().registrations == 2
        assert cache.invalidate(other_memory.address, length_bytes=other_memory.length_bytes) == 1
        assert cache.statistics().regions == 1


@NEEDS_DMABUF
@needs(verbs.foreign_dmabuf)
def test_shared_dmabuf_is_found_by_its_identity(dmabufs: tuple[int, int], nic: Nic) -> None:
    with RegionCache([nic]) as cache, DmabufMemory(DmabufRange.from_fd(dmabufs[0])) as memory:
        cache.lease(memory).close()
        with export_memory(memory, kind=ShareKind.DMABUF, offset_bytes=4099, length_bytes=9000) as message:
            imported_range = import_dmabuf(message)
        with DmabufMemory(imported_range) as imported_memory, cache.lease(imported_memory) as lease:
            assert lease.remote(nic).address == 64 * KIB + 4099
        assert (cache.statistics().registrations, cache.statistics().hits) == (1, 1)
        for kind in (ShareKind.IPC, ShareKind.VMM):
            with pytest.raises(Unsupported):
                export_memory(memory, kind=kind)


@needs(cuda.device(), cuda.dmabuf_export)
def test_memory_that_the_cpu_cannot_map_is_not_copied(dmabufs: tuple[int, int]) -> None:
    with DmabufMemory(DmabufRange.from_fd(dmabufs[0])) as memory:
        for copy_bytes in (lambda: memory.read(length_bytes=1), lambda: memory.write(b"x")):
            with pytest.raises(Unsupported) as error_info:
                copy_bytes()
            assert error_info.value.reason is Reason.NOT_SUPPORTED


def test_descriptor_without_a_size_is_refused() -> None:
    # Descriptor -1, a descriptor that is not open, and a pipe have no size.
    read_fd, write_fd = os.pipe()
    handles_before = handles.live()
    for fd in (-1, 987_654, read_fd):
        with pytest.raises(ApiError) as error_info:
            DmabufRange.from_fd(fd)
        assert error_info.value.reason is Reason.BAD_DESCRIPTOR
    assert handles.live() == handles_before
    os.close(read_fd)
    os.close(write_fd)


@needs(cuda.device(), cuda.dmabuf_export)
@pytest.mark.parametrize("offset_and_length", [(-1, 10), (0, 0), (0, MIB + 1), (MIB, 1), (MIB, None), (2 * MIB, None)])
def test_range_outside_the_dmabuf_is_refused(
    dmabufs: tuple[int, int], offset_and_length: tuple[int, int | None]
) -> None:
    with pytest.raises(UsageError):
        DmabufRange.from_fd(dmabufs[0], offset_bytes=offset_and_length[0], length_bytes=offset_and_length[1])


@pytest.mark.parametrize("exporter_path", EXPORTER_PATHS)
def test_memory_of_a_kernel_exporter_is_copied_by_the_cpu(exporter_path: str, seed: int) -> None:
    with (
        export_dmabuf(exporter_path, MIB) as fd,
        export_dmabuf(exporter_path, MIB) as other_fd,
        DmabufMemory(DmabufRange.from_fd(fd, offset_bytes=4099, length_bytes=100_000)) as memory,
        DmabufMemory(DmabufRange.from_fd(fd)) as whole_memory,
        DmabufMemory(DmabufRange.from_fd(other_fd)) as other_memory,
    ):
        memory.write(pattern.payload(100_000, seed=seed))
        pattern.check(whole_memory.read(offset_bytes=4099, length_bytes=100_000), seed=seed)
        assert whole_memory.read(length_bytes=4099) == bytes(4099)
        assert memory.allocation_key() == whole_memory.allocation_key() != other_memory.allocation_key()


@needs(verbs.no_way_to_devices, verbs.nic())
@pytest.mark.parametrize("exporter_path", EXPORTER_PATHS)
def test_kernel_exporter_is_refused_by_a_nic_without_dmabufs(exporter_path: str, nic: Nic) -> None:
    """Soft-RoCE registers no dma-bufs, and this memory has no other registration route, so the error has one cause."""
    with contextlib.ExitStack() as stack:
        if launch.twin_control().ledger("verbs") is not None:  # The NIC is a twin, so it must refuse as Soft-RoCE does.
            stack.enter_context(inject_faults(Api.VERBS, "ibv_reg_dmabuf_mr call=* errno=EOPNOTSUPP"))
        memory = stack.enter_context(
            DmabufMemory(DmabufRange.from_fd(stack.enter_context(export_dmabuf(exporter_path, MIB))))
        )
        handles_before = handles.live()
        with pytest.raises(RegistrationFailed) as error_info:
            register(memory, [nic])
        assert handles.live() == handles_before
    (cause,) = error_info.value.causes
    assert isinstance(cause, Unsupported)
    assert (cause.operation, cause.status_name) == ("ibv_reg_dmabuf_mr", "EOPNOTSUPP")
