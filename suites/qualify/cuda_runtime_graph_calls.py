"""A program that calls the CUDA runtime for graphs, stream captures, arrays, managed memory and shared memory pools.

It prints the results as ``cuda_runtime_calls.py`` does. The folder ``suites`` must be in PYTHONPATH.
``cuda_runtime_graph_calls.json`` has the results of an H200. The runtimes of CUDA 12 and CUDA 13 gave the same results.
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
    MEM_ATTACH_GLOBAL,
    CallRecorder,
    IpcHandle,
    run_groups,
)


class Location(ctypes.Structure):
    """The structure cudaMemLocation. Its type is 0 (invalid), 1 (device), 2 (host) or 3 (NUMA node)."""

    _fields_ = (("type", c_int), ("id", c_int))


class PoolProperties(ctypes.Structure):
    """The structure cudaMemPoolProps. Type 1 is pinned memory. Handle types are 0 (private) or 1 (file descriptor)."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("security_attributes", c_void_p),
        ("size_max_bytes", c_size_t),
        ("other_members", ctypes.c_byte * 56),
    )


class MemsetParameters(ctypes.Structure):
    """The structure cudaMemsetParams. The width is a number of elements, and the height is a number of rows."""

    _fields_ = (
        ("destination", c_void_p),
        ("pitch_bytes", c_size_t),
        ("value", c_uint),
        ("element_bytes", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    )


class ChannelFormat(ctypes.Structure):
    """The structure cudaChannelFormatDesc: bits of each channel, and the kind 0 (signed), 1 (unsigned) or 2 (float)."""

    _fields_ = (("x", c_int), ("y", c_int), ("z", c_int), ("w", c_int), ("kind", c_int))


def call_shared_pool_functions(recorder: CallRecorder) -> None:
    """Call the functions of pools that processes share. The handle type 1 is a file descriptor.

    No call imports a descriptor as a fabric handle (type 8), because the real runtimes would use the number of the
    descriptor as a pointer.
    """
    shared_pool, private_pool, imported_pool, pointer, imported_pointer = (
        c_void_p(),
        c_void_p(),
        c_void_p(),
        c_void_p(),
        c_void_p(),
    )
    # An IpcHandle has the size of cudaMemPoolPtrExportData, 64 bytes.
    fd, export_data = c_int(-1), IpcHandle()
    recorder.call(
        "unknown handle type", "cudaMemPoolCreate", byref(shared_pool), byref(PoolProperties(1, 0x40, Location(1, 0)))
    )
    recorder.call("private", "cudaMemPoolCreate", byref(private_pool), byref(PoolProperties(1, 0, Location(1, 0))))
    recorder.call("shared", "cudaMemPoolCreate", byref(shared_pool), byref(PoolProperties(1, 1, Location(1, 0))))
    export_function_name, no_flags = "cudaMemPoolExportToShareableHandle", c_uint(0)
    recorder.call("private pool", export_function_name, byref(fd), private_pool, 1, no_flags)
    recorder.call("unknown flags", export_function_name, byref(fd), shared_pool, 1, c_uint(1))
    recorder.call("another type", export_function_name, byref(fd), shared_pool, 8, no_flags)
    recorder.call("shared pool", export_function_name, byref(fd), shared_pool, 1, no_flags)
    recorder.call(
        "1 KiB from a shared pool", "cudaMallocFromPoolAsync", byref(pointer), c_size_t(KIB), shared_pool, None
    )
    recorder.call("memory of a shared pool", "cudaMemPoolExportPointer", byref(export_data), pointer)
    recorder.call("no memory", "cudaMemPoolExportPointer", byref(export_data), c_void_p(0x1000))
    import_function_name = "cudaMemPoolImportFromShareableHandle"
    recorder.call("closed descriptor", import_function_name, byref(imported_pool), c_void_p(0xFFFF), 1, no_flags)
    recorder.call("unknown flags", import_function_name, byref(imported_pool), c_void_p(fd.value), 1, c_uint(1))
    recorder.call(
        "pool that is not imported",
        "cudaMemPoolImportPointer",
        byref(imported_pointer),
        shared_pool,
        byref(export_data),
    )
    recorder.call("of a shared pool", "cudaFreeAsync", pointer, None)
    recorder.runtime.cudaDeviceSynchronize()
    for pool in (shared_pool, private_pool):
        recorder.call("created", "cudaMemPoolDestroy", pool)


def call_managed_memory_functions(recorder: CallRecorder) -> None:
    """Call the functions that prefetch managed memory, give advice about it, query its ranges and attach it to streams.

    In the library of CUDA 12, the functions that take a cudaMemLocation have the suffix _v2.
    """
    suffix = "_v2" if recorder.is_version_12 else ""
    managed_memory, host_buffer = (
        recorder.call_for_pointer("cudaMallocManaged", c_size_t(64 * KIB), c_uint(MEM_ATTACH_GLOBAL)),
        ctypes.create_string_buffer(KIB),
    )
    device_memory, attribute_value = recorder.call_for_pointer("cudaMalloc", c_size_t(KIB)), c_int()
    first_device, missing_device, host_location, no_location = (
        Location(1, 0),
        Location(1, 99),
        Location(2, 0),
        Location(0, 0),
    )
    for title, address, length_bytes, location, flags in (
        ("to the device", managed_memory, KIB, first_device, 0),
        ("to the host", managed_memory, KIB, host_location, 0),
        ("no bytes", managed_memory, 0, first_device, 0),
        ("too many bytes", managed_memory, 1 << 30, first_device, 0),
        ("device 99", managed_memory, KIB, missing_device, 0),
        ("no location", managed_memory, KIB, no_location, 0),
        ("unknown flags", managed_memory, KIB, first_device, 1),
        ("memory of the device", device_memory, KIB, first_device, 0),
        ("null", None, KIB, first_device, 0),
    ):
        length, symbol = c_size_t(length_bytes), f"cudaMemPrefetchAsync{suffix}"
        recorder.call(title, "cudaMemPrefetchAsync", address, length, location, c_uint(flags), None, symbol=symbol)
    # cudaMemoryAdvise: 1 is SetReadMostly, 3 is SetPreferredLocation, 5 is SetAccessedBy, and 9 is unknown.
    for title, address, advice, location in (
        ("read mostly", managed_memory, 1, first_device),
        ("preferred location", managed_memory, 3, first_device),
        ("accessed by", managed_memory, 5, first_device),
        ("unknown", managed_memory, 9, first_device),
        ("preferred location, device 99", managed_memory, 3, missing_device),
        ("accessed by a NUMA node", managed_memory, 5, Location(3, 0)),
        ("memory of the device", device_memory, 1, first_device),
    ):
        symbol = f"cudaMemAdvise{suffix}"
        recorder.call(title, "cudaMemAdvise", address, c_size_t(KIB), advice, location, symbol=symbol)
    value_bytes, query_function_name = c_size_t(4), "cudaMemRangeGetAttribute"
    # cudaMemRangeAttribute: ReadMostly, PreferredLocation, AccessedBy, LastPrefetchLocation, PreferredLocationType,
    # PreferredLocationId, and an unknown attribute.
    for attribute in (1, 2, 3, 4, 5, 6, 9):
        title = f"attribute {attribute}"
        recorder.call(
            title,
            query_function_name,
            byref(attribute_value),
            value_bytes,
            attribute,
            managed_memory,
            c_size_t(KIB),
            output=attribute_value,
        )
    recorder.call(
        "of all pages",
        query_function_name,
        byref(attribute_value),
        value_bytes,
        1,
        managed_memory,
        c_size_t(64 * KIB),
        output=attribute_value,
    )
    recorder.call("8 bytes", query_function_name, byref(attribute_value), c_size_t(8), 1, managed_memory, c_size_t(KIB))
    recorder.call(
        "memory of the device",
        query_function_name,
        byref(attribute_value),
        value_bytes,
        1,
        device_memory,
        c_size_t(KIB),
    )
    attach_function_name = "cudaStreamAttachMemAsync"
    # The flag 1 is cudaMemAttachGlobal, and 4 is cudaMemAttachSingle.
    for title, length_bytes, flags in (("single", 0, 4), ("unknown flags", 0, 3), ("a part", KIB, 1)):
        recorder.call(title, attach_function_name, None, managed_memory, c_size_t(length_bytes), c_uint(flags))
    recorder.call("host memory", attach_function_name, None, host_buffer, c_size_t(0), c_uint(1))
    recorder.runtime.cudaDeviceSynchronize()
    for address in (managed_memory, device_memory):
        recorder.call("after prefetch and advice", "cudaFree", address)


def call_capture_functions(recorder: CallRecorder) -> None:
    """Capture streams, and make calls that invalidate the captures.

    The capture modes are 0 (global), 1 (thread-local) and 2 (relaxed). `stream` is a non-blocking stream (flag 1): it
    does not synchronise with the default stream. `blocking_stream` does.
    """
    stream, blocking_stream = (
        recorder.call_for_pointer("cudaStreamCreateWithFlags", c_uint(1)),
        recorder.call_for_pointer("cudaStreamCreate"),
    )
    memory, event = recorder.call_for_pointer("cudaMalloc", c_size_t(KIB)), recorder.call_for_pointer("cudaEventCreate")
    graph, allocated_pointer, status, host_buffer = c_void_p(), c_void_p(), c_int(), ctypes.create_string_buffer(KIB)
    recorder.call("not captured", "cudaStreamEndCapture", stream, byref(graph))
    recorder.call("unknown mode", "cudaStreamBeginCapture", stream, 9)
    begin_capture, end_function_name, one_kib = (
        recorder.runtime.cudaStreamBeginCapture,
        "cudaStreamEndCapture",
        c_size_t(KIB),
    )
    for title, captured_stream, mode, function_name, arguments in (
        ("nothing", stream, 0, "cudaStreamBeginCapture", (stream, 0)),
        ("memset", stream, 0, "cudaMemsetAsync", (memory, 1, one_kib, stream)),
        ("copy from the host", stream, 0, "cudaMemcpyAsync", (memory, host_buffer, one_kib, HOST_TO_DEVICE, stream)),
        (
            "copy of freed memory",
            stream,
            0,
            "cudaMemcpyAsync",
            (memory, c_void_p(0x1000), one_kib, DEVICE_TO_DEVICE, stream),
        ),
        ("allocation", stream, 0, "cudaMalloc", (byref(allocated_pointer), one_kib)),
        ("allocation, relaxed", stream, 2, "cudaMalloc", (byref(allocated_pointer), one_kib)),
        ("allocation in the stream", stream, 0, "cudaMallocAsync", (byref(allocated_pointer), one_kib, stream)),
        ("synchronous copy", stream, 0, "cudaMemcpy", (memory, host_buffer, one_kib, HOST_TO_DEVICE)),
        (
            "synchronous copy, blocking",
            blocking_stream,
            0,
            "cudaMemcpy",
            (memory, host_buffer, one_kib, HOST_TO_DEVICE),
        ),
        (
            "synchronous copy, blocking, relaxed",
            blocking_stream,
            2,
            "cudaMemcpy",
            (memory, host_buffer, one_kib, HOST_TO_DEVICE),
        ),
        ("default stream", stream, 0, "cudaMemsetAsync", (memory, 1, one_kib, None)),
        ("default stream, blocking", blocking_stream, 0, "cudaMemsetAsync", (memory, 1, one_kib, None)),
        ("status of the default stream, blocking", blocking_stream, 0, "cudaStreamIsCapturing", (None, byref(status))),
        ("synchronise the stream", stream, 0, "cudaStreamSynchronize", (stream,)),
        ("query the stream", stream, 0, "cudaStreamQuery", (stream,)),
        ("synchronise another stream", stream, 0, "cudaStreamSynchronize", (blocking_stream,)),
        ("synchronise the device", stream, 0, "cudaDeviceSynchronize", ()),
        ("query an event", stream, 0, "cudaEventQuery", (event,)),
        ("query an event, thread", stream, 1, "cudaEventQuery", (event,)),
        ("wait for an outer event", stream, 0, "cudaStreamWaitEvent", (stream, event, c_uint(0))),
        ("free", stream, 0, "cudaFree", (None,)),
        ("properties", stream, 0, "cudaStreamGetPriority", (stream, byref(status))),
        ("callback without a function", stream, 0, "cudaStreamAddCallback", (stream, None, None, c_uint(0))),
    ):
        begin_capture(captured_stream, mode)
        recorder.call(f"captured, {title}", function_name, *arguments)
        recorder.call(f"after {title}", "cudaStreamIsCapturing", captured_stream, byref(status), output=status)
        recorder.call(f"after {title}", end_function_name, captured_stream, byref(graph))
        if graph.value is not None:
            recorder.runtime.cudaGraphDestroy(graph)
    # The wait for an event of the captured stream makes the other stream a part of the capture. The end of the capture
    # then fails, because the first stream has not joined the other stream again.
    begin_capture(stream, 0)
    recorder.call("in a captured stream", "cudaEventRecord", event, stream)
    recorder.call("join", "cudaStreamWaitEvent", blocking_stream, event, c_uint(0))
    recorder.call("joined", "cudaStreamIsCapturing", blocking_stream, byref(status), output=status)
    recorder.call("joined stream", "cudaMemsetAsync", memory, 1, one_kib, blocking_stream)
    recorder.call("not joined", end_function_name, stream, byref(graph))
    recorder.call("recorded in an ended capture", "cudaEventQuery", event)
    recorder.call("recorded again", "cudaEventRecord", event, None)
    for ended_stream in (stream, blocking_stream):
        recorder.call("captured before", "cudaStreamDestroy", ended_stream)
    recorder.call("captured before", "cudaEventDestroy", event)


def call_graph_functions(recorder: CallRecorder) -> None:
    """Call the functions of graphs, which have empty nodes and memset nodes."""
    graph, empty_node, memset_node, executable_graph, clone = c_void_p(), c_void_p(), c_void_p(), c_void_p(), c_void_p()
    device_memory, node_type, node_count, no_dependencies = (
        recorder.call_for_pointer("cudaMalloc", c_size_t(KIB)),
        c_int(),
        c_size_t(),
        c_size_t(0),
    )
    recorder.call("unknown flags", "cudaGraphCreate", byref(graph), c_uint(1))
    recorder.call("null", "cudaGraphCreate", None, c_uint(0))
    recorder.call("empty", "cudaGraphCreate", byref(graph), c_uint(0))
    recorder.call("empty", "cudaGraphInstantiate", byref(executable_graph), graph, ctypes.c_uint64(0))
    recorder.call("empty", "cudaGraphLaunch", executable_graph, None)
    recorder.call("empty", "cudaGraphExecDestroy", executable_graph)
    recorder.call("first", "cudaGraphAddEmptyNode", byref(empty_node), graph, None, no_dependencies)
    recorder.call("no list", "cudaGraphAddEmptyNode", byref(memset_node), graph, None, c_size_t(1))
    for title, destination, width, element_bytes in (
        ("of device memory", device_memory, KIB, 1),
        ("too long", device_memory, KIB + 1, 1),
        ("elements of 3 bytes", device_memory, 3, 3),
        ("null", None, KIB, 1),
    ):
        memset_parameters = MemsetParameters(destination, 0, 7, element_bytes, width, 1)
        recorder.call(
            title,
            "cudaGraphAddMemsetNode",
            byref(memset_node),
            graph,
            byref(empty_node),
            c_size_t(1),
            byref(memset_parameters),
        )
    recorder.call("number", "cudaGraphGetNodes", graph, None, byref(node_count), output=node_count)
    recorder.call("number", "cudaGraphGetRootNodes", graph, None, byref(node_count), output=node_count)
    recorder.call("memset", "cudaGraphNodeGetType", memset_node, byref(node_type), output=node_type)
    recorder.call("memset", "cudaGraphMemsetNodeGetParams", memset_node, byref(MemsetParameters()))
    recorder.call("memset", "cudaGraphHostNodeGetParams", memset_node, byref(MemsetParameters()))
    recorder.call("unknown flags", "cudaGraphInstantiate", byref(executable_graph), graph, ctypes.c_uint64(0x100))
    recorder.call("graph", "cudaGraphInstantiate", byref(executable_graph), graph, ctypes.c_uint64(0))
    recorder.call("graph", "cudaGraphClone", byref(clone), graph)
    recorder.call("graph", "cudaGraphLaunch", executable_graph, None)
    recorder.call("graph", "cudaGraphUpload", executable_graph, None)
    recorder.call("null", "cudaGraphLaunch", None, None)
    recorder.runtime.cudaDeviceSynchronize()
    for existing_graph in (graph, clone):
        recorder.call("made", "cudaGraphDestroy", existing_graph)
    recorder.call("graph", "cudaGraphExecDestroy", executable_graph)


def call_array_functions(recorder: CallRecorder) -> None:
    """Call the functions that create, copy, query and free arrays and mipmapped arrays."""
    array, level_array, host_buffer, no_flags = c_void_p(), c_void_p(), ctypes.create_string_buffer(64 * KIB), c_uint(0)
    two_16_bit_channels = ChannelFormat(16, 16, 0, 0, 1)
    # The last call of the loop creates an array of 5 rows with 20 elements of 4 bytes. The copies below use this array.
    for title, channels, width, height, flags in (
        ("no elements", two_16_bit_channels, 0, 0, 0),
        ("three channels", ChannelFormat(8, 8, 8, 0, 1), 8, 8, 0),
        ("channels of two sizes", ChannelFormat(8, 16, 0, 0, 1), 8, 8, 0),
        ("8-bit floats", ChannelFormat(8, 0, 0, 0, 2), 8, 8, 0),
        ("no channel", ChannelFormat(0, 0, 0, 0, 1), 8, 8, 0),
        ("too wide", two_16_bit_channels, 1 << 30, 8, 0),
        ("unknown flags", two_16_bit_channels, 8, 8, 0x4000),
        ("20 x 5", two_16_bit_channels, 20, 5, 0),
    ):
        sizes_and_flags = (c_size_t(width), c_size_t(height), c_uint(flags))
        recorder.call(title, "cudaMallocArray", byref(array), byref(channels), *sizes_and_flags)
    recorder.call("null", "cudaMallocArray", byref(array), None, c_size_t(8), c_size_t(8), no_flags)
    # The arguments of cudaMemcpy2DToArray are array, x offset in bytes, y offset in rows, source, source pitch, width
    # in bytes, height in rows, and direction.
    zero_offset, row_bytes, row_count = c_size_t(0), c_size_t(80), c_size_t(5)
    for title, x_offset_bytes, pitch_bytes, width, height, direction in (
        ("all", 0, 80, 80, 5, HOST_TO_DEVICE),
        ("default", 0, 80, 80, 5, DEFAULT),
        ("unknown direction", 0, 80, 80, 5, 9),
        ("from the device", 0, 80, 80, 5, DEVICE_TO_DEVICE),
        ("beyond a row", 4, 80, 80, 5, HOST_TO_DEVICE),
        ("beyond the rows", 0, 80, 80, 6, HOST_TO_DEVICE),
        ("small pitch", 0, 79, 80, 5, HOST_TO_DEVICE),
        ("nothing", 0, 80, 0, 5, HOST_TO_DEVICE),
    ):
        pitch_and_size = (c_size_t(pitch_bytes), c_size_t(width), c_size_t(height))
        recorder.call(
            title,
            "cudaMemcpy2DToArray",
            array,
            c_size_t(x_offset_bytes),
            zero_offset,
            host_buffer,
            *pitch_and_size,
            direction,
        )
    recorder.call(
        "all",
        "cudaMemcpy2DFromArray",
        host_buffer,
        row_bytes,
        array,
        zero_offset,
        zero_offset,
        row_bytes,
        row_count,
        DEVICE_TO_HOST,
    )
    recorder.call(
        "a part", "cudaMemcpyToArray", array, c_size_t(4), c_size_t(1), host_buffer, c_size_t(16), HOST_TO_DEVICE
    )
    recorder.call(
        "beyond the end", "cudaMemcpyToArray", array, c_size_t(4), c_size_t(4), host_buffer, row_bytes, HOST_TO_DEVICE
    )
    recorder.call("array", "cudaGetChannelDesc", byref(ChannelFormat()), array)
    recorder.call("array", "cudaArrayGetInfo", byref(ChannelFormat()), None, None, array)
    recorder.call("array", "cudaFreeArray", array)
    recorder.call("null", "cudaFreeArray", None)
    recorder.call("null", "cudaGetMipmappedArrayLevel", byref(level_array), None, no_flags)
    recorder.call("null", "cudaFreeMipmappedArray", None)


if __name__ == "__main__":
    run_groups(
        call_shared_pool_functions,
        call_managed_memory_functions,
        call_capture_functions,
        call_graph_functions,
        call_array_functions,
    )
