"""A program that calls the CUDA runtime with right and wrong arguments, and prints the result of each call as JSON.

Its argument is the name of the runtime library. ``cuda_runtime_calls.json`` has the results on an H200 with driver
580.159.04, which are equal for the runtimes 12.9.79 and 13.5.37. ``test_cuda_runtime.py`` compares the results of the
software twins with that file. No call frees memory twice, because the twins end a program that does so.

Each result is a list: the returned error, the last error of the thread, and the output value or null.
"""

from __future__ import annotations

import ctypes
import json
import sys
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

KIB = 1024
# Values of cudaMemcpyKind. With DEFAULT, the runtime derives the direction from the addresses.
HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, DEFAULT = range(5)
EVENT_DISABLE_TIMING, EVENT_INTERPROCESS = 2, 4
# cudaMemAttachGlobal, a flag of managed memory that every stream may access.
MEM_ATTACH_GLOBAL = 1


class IpcHandle(ctypes.Structure):
    """The structure cudaIpcMemHandle_t or cudaIpcEventHandle_t, which the functions of the runtime take by value."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class PointerAttributes(ctypes.Structure):
    """The first members of the structure cudaPointerAttributes, and space for the others."""

    _fields_ = (("type", c_int), ("device", c_int), ("other_members", ctypes.c_byte * 80))


class CallRecorder:
    """Calls functions of the runtime and records their results."""

    def __init__(self, library_name: str) -> None:
        self.runtime = ctypes.CDLL(library_name)
        self.results: dict[str, list[Any]] = {}
        version = c_int()
        assert self.runtime.cudaRuntimeGetVersion(byref(version)) == 0
        self.is_version_12 = version.value < 13000  # The version is 1000 * major + 10 * minor.

    def call(
        self, title: str, function_name: str, *arguments: object, output: object = None, symbol: str | None = None
    ) -> int:
        """Call a function, and record its result under ``function_name: title``.

        ``title`` describes the arguments. ``output`` is the ctypes object in which the function stores its output.
        ``symbol`` is the name of the function in the library, if it is not ``function_name``.
        """
        error = self.runtime[symbol or function_name](*arguments)
        output_value = output.value if isinstance(output, ctypes._SimpleCData) else output  # noqa: SLF001
        self.results[f"{function_name}: {title}"] = [
            error,
            self.runtime.cudaGetLastError(),
            output_value if error == 0 else None,
        ]
        return int(error)

    def call_for_pointer(self, function_name: str, *arguments: object) -> c_void_p:
        """Call a function that must succeed and that stores a pointer at its first argument. Return the pointer."""
        pointer = c_void_p()
        assert self.runtime[function_name](byref(pointer), *arguments) == 0, function_name
        return pointer


def call_device_functions(recorder: CallRecorder) -> None:
    """Call the functions that select devices, and that query their attributes, addresses, flags and limits."""
    int_output = c_int()
    recorder.call("one device", "cudaGetDeviceCount", byref(int_output), output=int_output)
    recorder.call("null", "cudaGetDeviceCount", None)
    for device in (-1, 99):
        recorder.call(str(device), "cudaSetDevice", device)
    recorder.call("first", "cudaGetDevice", byref(int_output), output=int_output)
    recorder.call("null", "cudaGetDevice", None)
    # These attributes do not exist.
    for attribute in (0, -1, 9999):
        recorder.call(f"attribute {attribute} of device 0", "cudaDeviceGetAttribute", byref(int_output), attribute, 0)
    recorder.call("device 99", "cudaDeviceGetAttribute", byref(int_output), 1, 99)
    # cudaDevAttr: MaxThreadsPerBlock, WarpSize, TextureAlignment, UnifiedAddressing, ConcurrentManagedAccess,
    # MemoryPoolsSupported, GPUDirectRDMASupported, MemoryPoolSupportedHandleTypes.
    for attribute in (1, 10, 14, 41, 89, 115, 116, 119):
        recorder.call(
            f"value of {attribute}", "cudaDeviceGetAttribute", byref(int_output), attribute, 0, output=int_output
        )
    bus_id_buffer = ctypes.create_string_buffer(64)
    for length_bytes in (0, 4, 13, 64):
        recorder.call(f"{length_bytes} bytes", "cudaDeviceGetPCIBusId", bus_id_buffer, length_bytes, 0)
    recorder.call("device 99", "cudaDeviceGetPCIBusId", bus_id_buffer, 64, 99)
    for bus_id in (b"", b"no address", b"ffff:ff:1f.0"):
        recorder.call(repr(bus_id.decode()), "cudaDeviceGetByPCIBusId", byref(int_output), c_char_p(bus_id))
    recorder.call("itself", "cudaDeviceCanAccessPeer", byref(int_output), 0, 0, output=int_output)
    recorder.call("device 99", "cudaDeviceCanAccessPeer", byref(int_output), 0, 99)
    recorder.call("itself", "cudaDeviceEnablePeerAccess", 0, 0)
    recorder.call("device 99", "cudaDeviceEnablePeerAccess", 99, 0)
    recorder.call("itself", "cudaDeviceDisablePeerAccess", 0)
    recorder.call("unknown", "cudaSetDeviceFlags", c_uint(0x4000))
    flags = c_uint()
    recorder.call("default", "cudaGetDeviceFlags", byref(flags))
    # cudaLimit: StackSize, MallocHeapSize, and an unknown limit.
    for limit in (0, 2, 99):
        limit_bytes = c_size_t()
        recorder.call(str(limit), "cudaDeviceGetLimit", byref(limit_bytes), limit)


def call_memory_functions(recorder: CallRecorder) -> None:
    """Call the functions that allocate memory of devices and of the host."""
    pointer, device_pointer = c_void_p(), c_void_p()
    recorder.call("null", "cudaMalloc", None, c_size_t(16))
    recorder.call("no bytes", "cudaMalloc", byref(pointer), c_size_t(0), output=pointer)
    recorder.call("too many bytes", "cudaMalloc", byref(pointer), c_size_t(1 << 60))
    recorder.call("null", "cudaFree", None)
    recorder.call("no allocation", "cudaFree", c_void_p(0x1000))
    pointer = recorder.call_for_pointer("cudaMalloc", c_size_t(KIB))
    assert pointer.value is not None
    recorder.call("in the middle", "cudaFree", c_void_p(pointer.value + 16))
    recorder.call("memory of the device", "cudaFreeHost", pointer)
    recorder.call("once", "cudaFree", pointer)
    recorder.call("no bytes", "cudaMallocHost", byref(pointer), c_size_t(0), output=pointer)
    recorder.call("null", "cudaFreeHost", None)
    recorder.call("no allocation", "cudaFreeHost", c_void_p(0x1000))
    recorder.call("unknown flags", "cudaHostAlloc", byref(pointer), c_size_t(KIB), c_uint(0x80))
    recorder.call("unknown flags", "cudaMallocManaged", byref(pointer), c_size_t(KIB), c_uint(0x80))
    recorder.call(
        "no bytes", "cudaMallocManaged", byref(pointer), c_size_t(0), c_uint(MEM_ATTACH_GLOBAL), output=pointer
    )
    pitch_bytes = c_size_t()
    recorder.call(
        "100 x 10",
        "cudaMallocPitch",
        byref(pointer),
        byref(pitch_bytes),
        c_size_t(100),
        c_size_t(10),
        output=pitch_bytes,
    )
    recorder.call("of rows", "cudaFree", pointer)
    recorder.call("0 x 10", "cudaMallocPitch", byref(pointer), byref(pitch_bytes), c_size_t(0), c_size_t(10))
    host_buffer = ctypes.create_string_buffer(64 * KIB)
    # The address of the first page that begins in the buffer. A page has 4096 bytes.
    page_address = c_void_p((ctypes.addressof(host_buffer) + 4095) & ~4095)
    recorder.call("no bytes", "cudaHostRegister", page_address, c_size_t(0), c_uint(0))
    recorder.call("null", "cudaHostRegister", None, c_size_t(KIB), c_uint(0))
    recorder.call("unknown flags", "cudaHostRegister", page_address, c_size_t(KIB), c_uint(0x8000))
    recorder.call("not registered", "cudaHostUnregister", page_address)
    recorder.call("once", "cudaHostRegister", page_address, c_size_t(8 * KIB), c_uint(0))
    recorder.call("twice", "cudaHostRegister", page_address, c_size_t(8 * KIB), c_uint(0))
    recorder.call("registered", "cudaHostGetDevicePointer", byref(device_pointer), page_address, c_uint(0))
    recorder.call("registered", "cudaHostUnregister", page_address)
    recorder.call("not registered", "cudaHostGetDevicePointer", byref(device_pointer), page_address, c_uint(0))
    free_bytes, total_bytes = c_size_t(), c_size_t()
    recorder.call("free and total", "cudaMemGetInfo", byref(free_bytes), byref(total_bytes))


def call_copy_functions(recorder: CallRecorder) -> None:
    """Call the functions that copy and set memory, also with wrong directions, lengths and pitches."""
    device_memory = recorder.call_for_pointer("cudaMalloc", c_size_t(4 * KIB))
    pinned_memory = recorder.call_for_pointer("cudaMallocHost", c_size_t(4 * KIB))
    host_buffer, second_host_buffer = ctypes.create_string_buffer(4 * KIB), ctypes.create_string_buffer(4 * KIB)
    one_kib = c_size_t(KIB)
    for title, target, source, direction in (
        ("to the device", device_memory, host_buffer, HOST_TO_DEVICE),
        ("from the device", host_buffer, device_memory, DEVICE_TO_HOST),
        ("within the device", device_memory, device_memory, DEVICE_TO_DEVICE),
        ("within the host", host_buffer, second_host_buffer, HOST_TO_HOST),
        ("within the host, default", host_buffer, second_host_buffer, DEFAULT),
        ("to the device, default", device_memory, host_buffer, DEFAULT),
        ("from pinned memory, default", device_memory, pinned_memory, DEFAULT),
        ("unknown direction", device_memory, host_buffer, 9),
        ("negative direction", device_memory, host_buffer, -1),
        ("to the host, but named to the device", host_buffer, device_memory, HOST_TO_DEVICE),
        ("within the host, but named to the device", host_buffer, second_host_buffer, HOST_TO_DEVICE),
        ("to the device, but named within the host", device_memory, host_buffer, HOST_TO_HOST),
        ("from pinned memory, but named within the device", device_memory, pinned_memory, DEVICE_TO_DEVICE),
        ("null target", None, host_buffer, HOST_TO_DEVICE),
        ("null source", device_memory, None, HOST_TO_DEVICE),
    ):
        recorder.call(title, "cudaMemcpy", target, source, one_kib, direction)
        recorder.call(f"async, {title}", "cudaMemcpyAsync", target, source, one_kib, direction, None)
    recorder.call("nothing between null pointers", "cudaMemcpy", None, None, c_size_t(0), DEFAULT)
    recorder.call("nothing, unknown direction", "cudaMemcpy", device_memory, host_buffer, c_size_t(0), 9)
    recorder.call("nothing, unknown direction", "cudaMemcpyAsync", device_memory, host_buffer, c_size_t(0), 9, None)
    # The arguments of cudaMemcpy2D are target, target pitch, source, source pitch, extent (width in bytes, height in
    # rows) and direction.
    extent = (c_size_t(64), c_size_t(8))
    recorder.call(
        "rows", "cudaMemcpy2D", device_memory, c_size_t(128), host_buffer, c_size_t(64), *extent, HOST_TO_DEVICE
    )
    recorder.call(
        "small target pitch",
        "cudaMemcpy2D",
        device_memory,
        c_size_t(32),
        host_buffer,
        c_size_t(64),
        *extent,
        HOST_TO_DEVICE,
    )
    recorder.call(
        "small source pitch",
        "cudaMemcpy2D",
        device_memory,
        c_size_t(64),
        host_buffer,
        c_size_t(32),
        *extent,
        HOST_TO_DEVICE,
    )
    recorder.call(
        "huge pitch",
        "cudaMemcpy2D",
        device_memory,
        c_size_t(1 << 40),
        host_buffer,
        c_size_t(64),
        *extent,
        HOST_TO_DEVICE,
    )
    recorder.call(
        "unknown direction", "cudaMemcpy2D", device_memory, c_size_t(64), host_buffer, c_size_t(64), *extent, 9
    )
    recorder.call(
        "no rows, unknown direction",
        "cudaMemcpy2D",
        device_memory,
        c_size_t(64),
        host_buffer,
        c_size_t(64),
        c_size_t(64),
        c_size_t(0),
        9,
    )
    recorder.call(
        "no rows, small pitch",
        "cudaMemcpy2D",
        device_memory,
        c_size_t(4),
        host_buffer,
        c_size_t(64),
        c_size_t(64),
        c_size_t(0),
        HOST_TO_DEVICE,
    )
    recorder.call(
        "no rows",
        "cudaMemcpy2D",
        device_memory,
        c_size_t(64),
        host_buffer,
        c_size_t(64),
        c_size_t(64),
        c_size_t(0),
        HOST_TO_DEVICE,
    )
    recorder.call("device memory", "cudaMemset", device_memory, 7, one_kib)
    recorder.call("nothing", "cudaMemset", None, 7, c_size_t(0))
    recorder.call("null", "cudaMemset", None, 7, one_kib)
    recorder.call("pinned memory", "cudaMemset", pinned_memory, 7, one_kib)
    recorder.call("rows", "cudaMemset2D", device_memory, c_size_t(128), 7, *extent)
    recorder.call("small pitch", "cudaMemset2D", device_memory, c_size_t(32), 7, *extent)
    # The arguments of cudaMemcpyPeer are target, target device, source, source device and length.
    recorder.call("to itself", "cudaMemcpyPeer", device_memory, 0, device_memory, 0, one_kib)
    recorder.call("device 99", "cudaMemcpyPeer", device_memory, 99, device_memory, 0, one_kib)
    recorder.call("after the copies", "cudaDeviceSynchronize")
    recorder.runtime.cudaFree(device_memory)
    recorder.runtime.cudaFreeHost(pinned_memory)


def call_stream_functions(recorder: CallRecorder) -> None:
    """Call the functions of streams and events."""
    # Each function that creates a stream or an event stores it in `created_object`.
    created_object, int_output = c_void_p(), c_int()
    least_priority, greatest_priority = c_int(), c_int()
    recorder.call(
        "least",
        "cudaDeviceGetStreamPriorityRange",
        byref(least_priority),
        byref(greatest_priority),
        output=least_priority,
    )
    recorder.call(
        "greatest",
        "cudaDeviceGetStreamPriorityRange",
        byref(least_priority),
        byref(greatest_priority),
        output=greatest_priority,
    )
    recorder.call("null", "cudaStreamCreate", None)
    recorder.call("unknown flags", "cudaStreamCreateWithFlags", byref(created_object), c_uint(6))
    for priority in (-99, 99):
        # The flag 1 is cudaStreamNonBlocking.
        recorder.call(f"{priority}", "cudaStreamCreateWithPriority", byref(created_object), c_uint(1), priority)
        recorder.call(f"of {priority}", "cudaStreamGetPriority", created_object, byref(int_output), output=int_output)
        flags = c_uint()
        recorder.call(f"of {priority}", "cudaStreamGetFlags", created_object, byref(flags), output=flags)
        recorder.call(f"of {priority}", "cudaStreamDestroy", created_object)
    recorder.call("default stream", "cudaStreamDestroy", None)
    # Special values of cudaStream_t are 0 (the default stream), 1 (cudaStreamLegacy) and 2 (cudaStreamPerThread).
    for title, stream_value in (("null", 0), ("legacy", 1), ("of the thread", 2)):
        recorder.call(title, "cudaStreamSynchronize", c_void_p(stream_value))
        recorder.call(title, "cudaStreamQuery", c_void_p(stream_value))
        recorder.call(title, "cudaStreamIsCapturing", c_void_p(stream_value), byref(int_output), output=int_output)
    recorder.call("legacy", "cudaStreamBeginCapture", c_void_p(1), 0)
    recorder.call("unknown mode", "cudaThreadExchangeStreamCaptureMode", byref(c_int(9)))
    recorder.call("unknown flags", "cudaEventCreateWithFlags", byref(created_object), c_uint(0x80))
    # The runtime requires EVENT_DISABLE_TIMING together with EVENT_INTERPROCESS.
    recorder.call("with timing", "cudaEventCreateWithFlags", byref(created_object), c_uint(EVENT_INTERPROCESS))
    recorder.call("null", "cudaEventDestroy", None)
    timed_event, untimed_event = (
        recorder.call_for_pointer("cudaEventCreate"),
        recorder.call_for_pointer("cudaEventCreateWithFlags", c_uint(EVENT_DISABLE_TIMING)),
    )
    time_ms = ctypes.c_float()
    recorder.call("not recorded", "cudaEventQuery", timed_event)
    recorder.call("not recorded", "cudaEventSynchronize", timed_event)
    recorder.call("not recorded", "cudaEventElapsedTime", byref(time_ms), timed_event, timed_event)
    recorder.call("default stream", "cudaEventRecord", timed_event, None)
    recorder.call("default stream", "cudaEventRecord", untimed_event, None)
    recorder.call("without timing", "cudaEventElapsedTime", byref(time_ms), timed_event, untimed_event)
    recorder.call("unknown flags", "cudaStreamWaitEvent", None, timed_event, c_uint(8))
    recorder.call("recorded", "cudaStreamWaitEvent", None, timed_event, c_uint(0))
    event_handle = IpcHandle()
    recorder.call("event of one process", "cudaIpcGetEventHandle", byref(event_handle), timed_event)
    recorder.call("no handle", "cudaIpcOpenEventHandle", byref(created_object), IpcHandle())
    for event in (timed_event, untimed_event):
        recorder.call("event", "cudaEventDestroy", event)


def call_pointer_functions(recorder: CallRecorder) -> None:
    """Call the functions that query the attributes of pointers, and that make and open IPC handles of memory."""
    device_memory, pinned_memory = (
        recorder.call_for_pointer("cudaMalloc", c_size_t(KIB)),
        recorder.call_for_pointer("cudaMallocHost", c_size_t(KIB)),
    )
    managed_memory = recorder.call_for_pointer("cudaMallocManaged", c_size_t(KIB), c_uint(MEM_ATTACH_GLOBAL))
    host_buffer, memory_handle, opened_pointer = ctypes.create_string_buffer(KIB), IpcHandle(), c_void_p()
    assert device_memory.value is not None
    middle_address = c_void_p(device_memory.value + 16)
    for title, address in (
        ("device", device_memory),
        ("middle of device", middle_address),
        ("pinned", pinned_memory),
        ("managed", managed_memory),
        ("host", host_buffer),
        ("null", None),
    ):
        attributes = PointerAttributes()
        recorder.call(title, "cudaPointerGetAttributes", byref(attributes), address)
        # The output value of this call is the type of the memory and its device.
        result = recorder.results[f"cudaPointerGetAttributes: {title}"]
        result[2] = [attributes.type, attributes.device] if result[0] == 0 else None
        recorder.call(title, "cudaIpcGetMemHandle", byref(memory_handle), address)
    recorder.call("device", "cudaIpcGetMemHandle", byref(memory_handle), device_memory)
    # The flag 1 is cudaIpcMemLazyEnablePeerAccess.
    recorder.call("unknown flags", "cudaIpcOpenMemHandle", byref(opened_pointer), memory_handle, c_uint(8))
    recorder.call("own handle", "cudaIpcOpenMemHandle", byref(opened_pointer), memory_handle, c_uint(1))
    recorder.call("no handle", "cudaIpcOpenMemHandle", byref(opened_pointer), IpcHandle(), c_uint(1))
    recorder.call("not opened", "cudaIpcCloseMemHandle", device_memory)
    flags = c_uint()
    recorder.call("pinned", "cudaHostGetFlags", byref(flags), pinned_memory)
    recorder.call("host", "cudaHostGetFlags", byref(flags), host_buffer)
    recorder.runtime.cudaFree(managed_memory)
    recorder.runtime.cudaFreeHost(pinned_memory)
    recorder.runtime.cudaFree(device_memory)


def call_pool_functions(recorder: CallRecorder) -> None:
    """Call the functions of stream-ordered allocation (cudaMallocAsync) and of its memory pools."""
    pool, pointer = c_void_p(), c_void_p()
    recorder.call("device 0", "cudaDeviceGetDefaultMemPool", byref(pool), 0)
    recorder.call("device 99", "cudaDeviceGetDefaultMemPool", byref(pointer), 99)
    recorder.call("no bytes", "cudaMallocAsync", byref(pointer), c_size_t(0), None, output=pointer)
    recorder.call("too many bytes", "cudaMallocAsync", byref(pointer), c_size_t(1 << 60), None)
    recorder.call("1 KiB", "cudaMallocAsync", byref(pointer), c_size_t(KIB), None)
    recorder.call("1 KiB", "cudaFreeAsync", pointer, None)
    recorder.call("null", "cudaFreeAsync", None, None)
    recorder.call("no allocation", "cudaFreeAsync", c_void_p(0x1000), None)
    threshold_bytes = ctypes.c_uint64()
    # Attribute 4 is cudaMemPoolAttrReleaseThreshold.
    recorder.call("threshold", "cudaMemPoolGetAttribute", pool, 4, byref(threshold_bytes), output=threshold_bytes)
    recorder.call("unknown", "cudaMemPoolGetAttribute", pool, 99, byref(threshold_bytes))
    recorder.call("default pool", "cudaMemPoolDestroy", pool)
    recorder.call("default pool", "cudaMemPoolTrimTo", pool, c_size_t(0))
    recorder.call("1 KiB from the pool", "cudaMallocFromPoolAsync", byref(pointer), c_size_t(KIB), pool, None)
    recorder.call("from the pool", "cudaFree", pointer)


def call_kernel_and_reset_functions(recorder: CallRecorder) -> None:
    """Query a kernel and a symbol that are not registered, query the names of errors, and reset the device."""
    unregistered_symbol, pointer = c_int(), c_void_p()
    recorder.call("unknown", "cudaFuncGetAttributes", ctypes.create_string_buffer(512), byref(unregistered_symbol))
    recorder.call("unknown", "cudaGetSymbolAddress", byref(pointer), byref(unregistered_symbol))
    recorder.runtime.cudaGetErrorName.restype = c_char_p
    for error in (0, 1, 2, 12, 21, 98, 100, 101, 201, 217, 400, 600, 704, 705, 712, 713, 719, 801, 900, 999, 12345):
        error_name = recorder.runtime.cudaGetErrorName(error)
        recorder.results[f"cudaGetErrorName: {error}"] = [0, 0, error_name.decode()]
    recorder.call_for_pointer("cudaMalloc", c_size_t(KIB))
    recorder.call("with memory", "cudaDeviceReset")
    recorder.call("after the reset", "cudaMalloc", byref(pointer), c_size_t(KIB))
    recorder.call("after the reset", "cudaFree", pointer)


def run_groups(*groups: Callable[[CallRecorder], None]) -> None:
    """Make the calls of each group with the runtime that the first argument of the program names. Print the results.

    A group is a function that makes calls. Its name goes to stderr before its calls, so that a crash shows the group.
    """
    recorder = CallRecorder(sys.argv[1])
    for make_calls in groups:
        sys.stderr.write(f"{make_calls.__name__}\n")
        sys.stderr.flush()
        make_calls(recorder)
    json.dump(recorder.results, sys.stdout, indent=0)


if __name__ == "__main__":
    run_groups(
        call_device_functions,
        call_memory_functions,
        call_copy_functions,
        call_stream_functions,
        call_pointer_functions,
        call_pool_functions,
        call_kernel_and_reset_functions,
    )
