"""Calls of the CUDA runtime for graphs, captures, arrays, managed memory and shared pools.

They are made as in ``cuda_runtime_calls.py``. The folder ``suites`` must be in PYTHONPATH.
``cuda_runtime_graph_calls.json`` has the results of an H200, as far as they are recorded, and
``cuda_runtime_graph_calls_not_recorded.json`` lists the other calls.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p

from qualify.cuda_runtime_calls import (
    DEFAULT,
    DEVICE_TO_DEVICE,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    KIB,
    Calls,
    Handle,
    run,
)


class Location(ctypes.Structure):
    """The structure cudaMemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class PoolProperties(ctypes.Structure):
    """The structure cudaMemPoolProps."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("security", c_void_p),
        ("size_max_bytes", c_size_t),
        ("others", ctypes.c_byte * 56),
    )


class Memset(ctypes.Structure):
    """The structure cudaMemsetParams."""

    _fields_ = (
        ("to", c_void_p),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("element_bytes", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    )


class ChannelFormat(ctypes.Structure):
    """The structure cudaChannelFormatDesc."""

    _fields_ = (("x", c_int), ("y", c_int), ("z", c_int), ("w", c_int), ("kind", c_int))


def shared_pools(calls: Calls) -> None:
    """Pools that processes share. The handle type 1 is a file descriptor."""
    pool, private, imported, pointer, mapped = c_void_p(), c_void_p(), c_void_p(), c_void_p(), c_void_p()
    fd, data = c_int(-1), Handle()
    calls.call("unknown handle type", "cudaMemPoolCreate", byref(pool), byref(PoolProperties(1, 0x40, Location(1, 0))))
    calls.call("private", "cudaMemPoolCreate", byref(private), byref(PoolProperties(1, 0, Location(1, 0))))
    calls.call("shared", "cudaMemPoolCreate", byref(pool), byref(PoolProperties(1, 1, Location(1, 0))))
    export, zero = "cudaMemPoolExportToShareableHandle", c_uint(0)
    calls.call("private pool", export, byref(fd), private, 1, zero)
    calls.call("unknown flags", export, byref(fd), pool, 1, c_uint(1))
    calls.call("another type", export, byref(fd), pool, 8, zero)
    calls.call("shared pool", export, byref(fd), pool, 1, zero)
    calls.call("1 KiB from a shared pool", "cudaMallocFromPoolAsync", byref(pointer), c_size_t(KIB), pool, None)
    calls.call("memory of a shared pool", "cudaMemPoolExportPointer", byref(data), pointer)
    calls.call("no memory", "cudaMemPoolExportPointer", byref(data), c_void_p(0x1000))
    restore = "cudaMemPoolImportFromShareableHandle"
    calls.call("closed descriptor", restore, byref(imported), c_void_p(0xFFFF), 1, zero)
    calls.call("unknown flags", restore, byref(imported), c_void_p(fd.value), 1, c_uint(1))
    calls.call("another type", restore, byref(imported), c_void_p(fd.value), 8, zero)
    calls.call("pool that is not imported", "cudaMemPoolImportPointer", byref(mapped), pool, byref(data))
    calls.call("of a shared pool", "cudaFreeAsync", pointer, None)
    calls.runtime.cudaDeviceSynchronize()
    for created in (pool, private):
        calls.call("created", "cudaMemPoolDestroy", created)


def managed(calls: Calls) -> None:
    """Prefetch and advice. CUDA 12 has the forms with a location under names with _v2."""
    name = "_v2" if calls.is_version_12 else ""
    memory, host = calls.pointer("cudaMallocManaged", c_size_t(64 * KIB), c_uint(1)), ctypes.create_string_buffer(KIB)
    device, number = calls.pointer("cudaMalloc", c_size_t(KIB)), c_int()
    first, missing, on_host, nowhere = Location(1, 0), Location(1, 99), Location(2, 0), Location(0, 0)
    for title, address, length_bytes, location, flags in (
        ("to the device", memory, KIB, first, 0),
        ("to the host", memory, KIB, on_host, 0),
        ("no bytes", memory, 0, first, 0),
        ("too many bytes", memory, 1 << 30, first, 0),
        ("device 99", memory, KIB, missing, 0),
        ("no location", memory, KIB, nowhere, 0),
        ("unknown flags", memory, KIB, first, 1),
        ("memory of the device", device, KIB, first, 0),
        ("null", None, KIB, first, 0),
    ):
        size, symbol = c_size_t(length_bytes), f"cudaMemPrefetchAsync{name}"
        calls.call(title, "cudaMemPrefetchAsync", address, size, location, c_uint(flags), None, symbol=symbol)
    for title, address, advice, location in (
        ("read mostly", memory, 1, first),
        ("preferred location", memory, 3, first),
        ("accessed by", memory, 5, first),
        ("unknown", memory, 9, first),
        ("preferred location, device 99", memory, 3, missing),
        ("accessed by a NUMA node", memory, 5, Location(3, 0)),
        ("memory of the device", device, 1, first),
    ):
        symbol = f"cudaMemAdvise{name}"
        calls.call(title, "cudaMemAdvise", address, c_size_t(KIB), advice, location, symbol=symbol)
    size, query = c_size_t(4), "cudaMemRangeGetAttribute"
    for attribute in (1, 2, 3, 4, 5, 6, 9):
        title = f"attribute {attribute}"
        calls.call(title, query, byref(number), size, attribute, memory, c_size_t(KIB), output=number)
    calls.call("of all pages", query, byref(number), size, 1, memory, c_size_t(64 * KIB), output=number)
    calls.call("8 bytes", query, byref(number), c_size_t(8), 1, memory, c_size_t(KIB))
    calls.call("memory of the device", query, byref(number), size, 1, device, c_size_t(KIB))
    attach = "cudaStreamAttachMemAsync"
    for title, length_bytes, flags in (("single", 0, 4), ("unknown flags", 0, 3), ("a part", KIB, 1)):
        calls.call(title, attach, None, memory, c_size_t(length_bytes), c_uint(flags))
    calls.call("host memory", attach, None, host, c_size_t(0), c_uint(1))
    calls.runtime.cudaDeviceSynchronize()
    for address in (memory, device):
        calls.call("after prefetch and advice", "cudaFree", address)


def captures(calls: Calls) -> None:
    """Captures of streams, and calls that invalidate them."""
    stream, other = calls.pointer("cudaStreamCreateWithFlags", c_uint(1)), calls.pointer("cudaStreamCreate")
    memory, event = calls.pointer("cudaMalloc", c_size_t(KIB)), calls.pointer("cudaEventCreate")
    graph, pointer, status, host = c_void_p(), c_void_p(), c_int(), ctypes.create_string_buffer(KIB)
    calls.call("not captured", "cudaStreamEndCapture", stream, byref(graph))
    calls.call("unknown mode", "cudaStreamBeginCapture", stream, 9)
    begin, end, size = calls.runtime.cudaStreamBeginCapture, "cudaStreamEndCapture", c_size_t(KIB)
    for title, captured, mode, function, arguments in (
        ("nothing", stream, 0, "cudaStreamBeginCapture", (stream, 0)),
        ("memset", stream, 0, "cudaMemsetAsync", (memory, 1, size, stream)),
        ("copy from the host", stream, 0, "cudaMemcpyAsync", (memory, host, size, HOST_TO_DEVICE, stream)),
        ("copy of freed memory", stream, 0, "cudaMemcpyAsync", (memory, c_void_p(0x1000), size, 3, stream)),
        ("allocation", stream, 0, "cudaMalloc", (byref(pointer), size)),
        ("allocation, relaxed", stream, 2, "cudaMalloc", (byref(pointer), size)),
        ("allocation in the stream", stream, 0, "cudaMallocAsync", (byref(pointer), size, stream)),
        ("synchronous copy", stream, 0, "cudaMemcpy", (memory, host, size, HOST_TO_DEVICE)),
        ("synchronous copy, blocking", other, 0, "cudaMemcpy", (memory, host, size, HOST_TO_DEVICE)),
        ("synchronous copy, blocking, relaxed", other, 2, "cudaMemcpy", (memory, host, size, HOST_TO_DEVICE)),
        ("default stream", stream, 0, "cudaMemsetAsync", (memory, 1, size, None)),
        ("default stream, blocking", other, 0, "cudaMemsetAsync", (memory, 1, size, None)),
        ("status of the default stream, blocking", other, 0, "cudaStreamIsCapturing", (None, byref(status))),
        ("synchronise the stream", stream, 0, "cudaStreamSynchronize", (stream,)),
        ("query the stream", stream, 0, "cudaStreamQuery", (stream,)),
        ("synchronise another stream", stream, 0, "cudaStreamSynchronize", (other,)),
        ("synchronise the device", stream, 0, "cudaDeviceSynchronize", ()),
        ("query an event", stream, 0, "cudaEventQuery", (event,)),
        ("query an event, thread", stream, 1, "cudaEventQuery", (event,)),
        ("wait for an outer event", stream, 0, "cudaStreamWaitEvent", (stream, event, c_uint(0))),
        ("free", stream, 0, "cudaFree", (None,)),
        ("properties", stream, 0, "cudaStreamGetPriority", (stream, byref(status))),
        ("callback without a function", stream, 0, "cudaStreamAddCallback", (stream, None, None, c_uint(0))),
    ):
        begin(captured, mode)
        calls.call(f"captured, {title}", function, *arguments)
        calls.call(f"after {title}", "cudaStreamIsCapturing", captured, byref(status), output=status)
        calls.call(f"after {title}", end, captured, byref(graph))
        if graph.value is not None:
            calls.runtime.cudaGraphDestroy(graph)
    begin(stream, 0)
    calls.call("in a captured stream", "cudaEventRecord", event, stream)
    calls.call("join", "cudaStreamWaitEvent", other, event, c_uint(0))
    calls.call("joined", "cudaStreamIsCapturing", other, byref(status), output=status)
    calls.call("joined stream", "cudaMemsetAsync", memory, 1, size, other)
    calls.call("not joined", end, stream, byref(graph))
    calls.call("recorded in an ended capture", "cudaEventQuery", event)
    calls.call("recorded again", "cudaEventRecord", event, None)
    for created in (stream, other):
        calls.call("captured before", "cudaStreamDestroy", created)
    calls.call("captured before", "cudaEventDestroy", event)


def graphs(calls: Calls) -> None:
    """Graphs of memsets and empty nodes."""
    graph, node, second, executable, clone = c_void_p(), c_void_p(), c_void_p(), c_void_p(), c_void_p()
    memory, number, count, none = calls.pointer("cudaMalloc", c_size_t(KIB)), c_int(), c_size_t(), c_size_t(0)
    calls.call("unknown flags", "cudaGraphCreate", byref(graph), c_uint(1))
    calls.call("null", "cudaGraphCreate", None, c_uint(0))
    calls.call("empty", "cudaGraphCreate", byref(graph), c_uint(0))
    calls.call("empty", "cudaGraphInstantiate", byref(executable), graph, ctypes.c_uint64(0))
    calls.call("empty", "cudaGraphLaunch", executable, None)
    calls.call("empty", "cudaGraphExecDestroy", executable)
    calls.call("first", "cudaGraphAddEmptyNode", byref(node), graph, None, none)
    calls.call("no list", "cudaGraphAddEmptyNode", byref(second), graph, None, c_size_t(1))
    for title, to, width, element_bytes in (
        ("of device memory", memory, KIB, 1),
        ("too long", memory, KIB + 1, 1),
        ("elements of 3 bytes", memory, 3, 3),
        ("null", None, KIB, 1),
    ):
        memset = Memset(to, 0, 7, element_bytes, width, 1)
        calls.call(title, "cudaGraphAddMemsetNode", byref(second), graph, byref(node), c_size_t(1), byref(memset))
    calls.call("number", "cudaGraphGetNodes", graph, None, byref(count), output=count)
    calls.call("number", "cudaGraphGetRootNodes", graph, None, byref(count), output=count)
    calls.call("memset", "cudaGraphNodeGetType", second, byref(number), output=number)
    calls.call("memset", "cudaGraphMemsetNodeGetParams", second, byref(Memset()))
    calls.call("memset", "cudaGraphHostNodeGetParams", second, byref(Memset()))
    calls.call("unknown flags", "cudaGraphInstantiate", byref(executable), graph, ctypes.c_uint64(0x100))
    calls.call("graph", "cudaGraphInstantiate", byref(executable), graph, ctypes.c_uint64(0))
    calls.call("graph", "cudaGraphClone", byref(clone), graph)
    calls.call("graph", "cudaGraphLaunch", executable, None)
    calls.call("graph", "cudaGraphUpload", executable, None)
    calls.call("null", "cudaGraphLaunch", None, None)
    calls.runtime.cudaDeviceSynchronize()
    for made in (graph, clone):
        calls.call("made", "cudaGraphDestroy", made)
    calls.call("graph", "cudaGraphExecDestroy", executable)


def arrays(calls: Calls) -> None:
    """Arrays and mipmapped arrays, as memory."""
    array, level, host, zero = c_void_p(), c_void_p(), ctypes.create_string_buffer(64 * KIB), c_uint(0)
    two_shorts = ChannelFormat(16, 16, 0, 0, 1)
    for title, channels, width, height, flags in (
        ("no elements", two_shorts, 0, 0, 0),
        ("three channels", ChannelFormat(8, 8, 8, 0, 1), 8, 8, 0),
        ("channels of two sizes", ChannelFormat(8, 16, 0, 0, 1), 8, 8, 0),
        ("8-bit floats", ChannelFormat(8, 0, 0, 0, 2), 8, 8, 0),
        ("no channel", ChannelFormat(0, 0, 0, 0, 1), 8, 8, 0),
        ("too wide", two_shorts, 1 << 30, 8, 0),
        ("unknown flags", two_shorts, 8, 8, 0x4000),
        ("20 x 5", two_shorts, 20, 5, 0),
    ):
        sizes = (c_size_t(width), c_size_t(height), c_uint(flags))
        calls.call(title, "cudaMallocArray", byref(array), byref(channels), *sizes)
    calls.call("null", "cudaMallocArray", byref(array), None, c_size_t(8), c_size_t(8), zero)
    nothing, row, rows = c_size_t(0), c_size_t(80), c_size_t(5)
    for title, x_bytes, pitch, width, height, kind in (
        ("all", 0, 80, 80, 5, HOST_TO_DEVICE),
        ("default", 0, 80, 80, 5, DEFAULT),
        ("unknown direction", 0, 80, 80, 5, 9),
        ("from the device", 0, 80, 80, 5, DEVICE_TO_DEVICE),
        ("beyond a row", 4, 80, 80, 5, HOST_TO_DEVICE),
        ("beyond the rows", 0, 80, 80, 6, HOST_TO_DEVICE),
        ("small pitch", 0, 79, 80, 5, HOST_TO_DEVICE),
        ("nothing", 0, 80, 0, 5, HOST_TO_DEVICE),
    ):
        region = (c_size_t(pitch), c_size_t(width), c_size_t(height))
        calls.call(title, "cudaMemcpy2DToArray", array, c_size_t(x_bytes), nothing, host, *region, kind)
    calls.call("all", "cudaMemcpy2DFromArray", host, row, array, nothing, nothing, row, rows, DEVICE_TO_HOST)
    calls.call("a part", "cudaMemcpyToArray", array, c_size_t(4), c_size_t(1), host, c_size_t(16), HOST_TO_DEVICE)
    calls.call("beyond the end", "cudaMemcpyToArray", array, c_size_t(4), c_size_t(4), host, row, HOST_TO_DEVICE)
    calls.call("array", "cudaGetChannelDesc", byref(ChannelFormat()), array)
    calls.call("array", "cudaArrayGetInfo", byref(ChannelFormat()), None, None, array)
    calls.call("array", "cudaFreeArray", array)
    calls.call("null", "cudaFreeArray", None)
    calls.call("null", "cudaGetMipmappedArrayLevel", byref(level), None, zero)
    calls.call("null", "cudaFreeMipmappedArray", None)


if __name__ == "__main__":
    run(shared_pools, managed, captures, graphs, arrays)
