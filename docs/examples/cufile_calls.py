"""Every kind of cuFile call, and proof of the route that the bytes took.

The optional argument is a folder on a disk, because cuFile refuses tmpfs.
"""

from __future__ import annotations

import os
import sys
import tempfile

from gdrkit import cuda, cufile, host
from gdrkit.cufile import parameters
from gdrkit.errors import ApiError

MIB = 1 << 20

tree = host.HostTree()
print("libcufile", *cufile.library_version(), "- the driver opens:", bool(cufile.probe().version))
print("nvidia-fs:", cufile.read_nvidia_fs(tree) or "not loaded")

# A program sets parameters before the driver opens. They override cufile.json.
print(
    "requests in a batch:",
    parameters.size(parameters.Size.IO_BATCHSIZE),
    parameters.limits(parameters.Size.IO_BATCHSIZE),
)
# Some versions of libcufile discard a size that was set before the driver opens.
if parameters.keeps_staged_size(parameters.Size.IO_BATCHSIZE, version=cufile.probe().version):
    parameters.set_size(parameters.Size.IO_BATCHSIZE, 64)
# These calls set parameters to the values that they already have.
parameters.set_flag(parameters.Flag.ALLOW_COMPAT_MODE, parameters.flag(parameters.Flag.ALLOW_COMPAT_MODE))
parameters.set_text(parameters.Text.LOGGING_LEVEL, parameters.text(parameters.Text.LOGGING_LEVEL))
parameters.set_posix_pool(*parameters.posix_pool())

folder = sys.argv[1] if len(sys.argv) > 1 else "/var/tmp"  # noqa: S108 - the folder must be on a disk.
with tempfile.NamedTemporaryFile(dir=folder) as file:
    file.write(os.urandom(MIB))
    file.flush()
    fd = os.open(file.name, os.O_RDWR | os.O_DIRECT)
    # obstacles() lists what prevents the direct path, before any transfer.
    for obstacle in cufile.obstacles(tree, fd):
        print(f"{obstacle.cause.value}: {obstacle.text}. To do: {obstacle.what_to_do}")
    with cuda.Device(0) as device, device.allocate(MIB) as memory, cufile.Driver() as driver:
        print("compat mode is allowed:", driver.properties().allows_compat)
        driver.statistics.start(cufile.Level.PER_GPU)
        monitor = cufile.RouteMonitor(driver, tree)
        try:
            file_handle = cufile.FileHandle(driver, fd)
        except ApiError as error:
            print(cufile.failed_registration_proof(tree, fd, error).why)
            sys.exit()
        with file_handle:
            # The monitor observes the route of synchronous calls, with and without registered memory.
            with monitor.watch(fd):
                assert file_handle.read(memory) == MIB
                with cufile.RegisteredBuffer(driver, memory):
                    assert file_handle.write(memory, length_bytes=4096) == 4096
            try:
                monitor.proof.require_direct()
            except cufile.DirectPathError as error:
                print(error)

            # A proof can also be derived from the counters of libcufile alone.
            snapshot_before = driver.statistics.snapshot()
            file_handle.read(memory)
            proof = cufile.proof_from_counters(delta=driver.statistics.snapshot().since(snapshot_before))
            print("route by the counters:", proof.state.value, proof.route.value)

            # The cache keeps the registration until the memory is freed.
            cache = cufile.BufferCache(driver)
            with cache.lease(memory):
                file_handle.read(memory, length_bytes=4096, offset_bytes=8192)

            # An asynchronous read on one stream.
            with device.stream() as stream, cufile.RegisteredStream(driver, stream.handle):
                pending_read = file_handle.read_async(stream, memory, length_bytes=65536)
                stream.synchronize()
                assert pending_read.bytes() == 65536

            # A batch of two reads.
            with cufile.IoBatch(driver, 2) as batch:
                memory_ranges = [
                    cufile.BufferRange(memory, offset_bytes=offset, length_bytes=4096) for offset in (0, 65536)
                ]
                batch.submit(
                    [
                        cufile.BatchRequest(
                            cufile.Opcode.READ, file_handle, memory_range, file_offset_bytes=memory_range.offset_bytes
                        )
                        for memory_range in memory_ranges
                    ]
                )
                events: list[cufile.BatchEvent] = []
                while len(events) < len(memory_ranges):
                    events += batch.fetch_events(count_min=1, timeout_s=5)
                assert {event.status for event in events} == {cufile.BatchStatus.COMPLETE}
    os.close(fd)
