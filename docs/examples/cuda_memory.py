"""CUDA devices, memory of each kind, streams, events, IPC handles and peer access."""

from __future__ import annotations

from gdrkit import cuda
from gdrkit.buffers import MemoryKind
from gdrkit.errors import GdrkitError

MIB = 1 << 20

print("CUDA", *cuda.driver_version(), "with", cuda.device_count(), "devices")
with cuda.Device(0) as device:
    print(device.name, device.pci_bus_id, device.memory_info().total_bytes // MIB, "MiB")
    print("exports dma-bufs:", bool(device.attribute(cuda.DeviceAttribute.DMA_BUF_SUPPORTED)))

    # allocate() uses cuMemAlloc. A copy is complete when the call returns.
    with device.allocate(MIB) as memory:
        memory.write(b"hello", offset_bytes=100)
        assert memory.read(offset_bytes=100, length_bytes=5) == b"hello"
        assert cuda.memory_kind(memory.address) is MemoryKind.CUDA
        # A NIC or another process can use the memory by its dma-buf.
        with memory.export_dmabuf() as dmabuf:
            assert dmabuf.length_bytes >= MIB
        # Memory that other code allocated is borrowed: gdrkit never frees it.
        with cuda.borrow(device, memory.address, length_bytes=MIB) as borrowed_memory:
            assert borrowed_memory.read(offset_bytes=100, length_bytes=5) == b"hello"
        # Any object with __cuda_array_interface__ or __dlpack__ can be wrapped. Memory of gdrkit has both. describe()
        # returns the address and the length. release() tells the owner that this description is no longer used.
        foreign_array = cuda.describe(memory)
        foreign_array.release()
        with cuda.wrap(memory, device=device) as wrapped_memory:
            assert wrapped_memory.address == foreign_array.address
            assert wrapped_memory.length_bytes == foreign_array.length_bytes
        # Another process opens the memory by an IPC handle. CUDA refuses to open the handle in the exporting process.
        ipc_handle = cuda.export_handle(memory)
        try:
            with cuda.open_handle(device, ipc_handle):
                print("device of the handle:", cuda.device_of_handle(ipc_handle))
        except GdrkitError as error:
            print("the exporting process cannot open the handle:", error)

    # VmmMemory uses cuMemCreate and cuMemMap. By default, the memory is a single chunk.
    with cuda.VmmMemory.create(device, 2 * cuda.granularity_bytes(device)) as vmm_memory:
        print("VMM memory with", vmm_memory.chunk_count, "chunk(s)")

    # Copies on a stream, with pinned memory of the host and events.
    with (
        device.allocate(MIB) as source,
        device.allocate(MIB) as target,
        cuda.PinnedMemory(device, MIB) as pinned_memory,
        device.stream() as stream,
        cuda.Event(device) as begin_event,
        cuda.Event(device) as end_event,
    ):
        pinned_memory.view()[:] = b"\x5a" * MIB
        stream.record(begin_event)
        stream.write(source, pinned_memory.view())
        stream.copy(source, target)
        stream.record(end_event)
        end_event.synchronize()
        assert end_event.elapsed_ms(begin_event) >= 0
        assert target.read(length_bytes=4) == b"\x5a" * 4
        # A stream of another library is named by its handle. The call returns when all work of the stream is done.
        with device.current():
            cuda.wait_for_stream(stream.handle)

if cuda.device_count() > 1:
    with cuda.Device(0) as first_device, cuda.Device(1) as second_device:
        if cuda.can_access_peer(first_device, second_device):
            with cuda.peer_access(first_device, second_device):
                print("device 0 can access the memory of device 1")
