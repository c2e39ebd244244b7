"""Calls of the CUDA runtime with right and wrong arguments. The program prints the result of each call as JSON.

Its argument is the name of the library. ``cuda_runtime_calls.json`` has the results of the same calls on an H200 with
driver 580.159.04. They are the same for the runtimes 12.9.79 and 13.5.37. ``test_cuda_runtime.py`` compares the
software twins with them. No call frees memory twice, because the twins end a program that does.

The list of a result has the returned error, the last error of the thread, and a value if the call returns one.
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
HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, DEFAULT = range(5)
DISABLE_TIMING, INTERPROCESS = 2, 4


class Handle(ctypes.Structure):
    """A handle of IPC, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class Attributes(ctypes.Structure):
    """The first members of the structure cudaPointerAttributes, and space for the others."""

    _fields_ = (("type", c_int), ("device", c_int), ("others", ctypes.c_byte * 80))


class Calls:
    """Calls the runtime and keeps the results."""

    def __init__(self, library: str) -> None:
        self.runtime = ctypes.CDLL(library)
        self.results: dict[str, list[Any]] = {}
        version = c_int()
        assert self.runtime.cudaRuntimeGetVersion(byref(version)) == 0
        self.is_version_12 = version.value < 13000

    def call(
        self, title: str, function: str, *arguments: object, output: object = None, symbol: str | None = None
    ) -> int:
        """Call a function, and keep its result, the last error of the thread and a value that it returned.

        ``symbol`` is its name in the library if that is another one.
        """
        error = self.runtime[symbol or function](*arguments)
        value = output.value if isinstance(output, ctypes._SimpleCData) else output  # noqa: SLF001
        self.results[f"{function}: {title}"] = [error, self.runtime.cudaGetLastError(), value if error == 0 else None]
        return int(error)

    def pointer(self, function: str, *arguments: object) -> c_void_p:
        """Call a function whose first argument returns a pointer. The call must succeed."""
        pointer = c_void_p()
        assert self.runtime[function](byref(pointer), *arguments) == 0, function
        return pointer


def devices(calls: Calls) -> None:
    """Devices, their attributes and the flags of a device."""
    number = c_int()
    calls.call("one device", "cudaGetDeviceCount", byref(number), output=number)
    calls.call("null", "cudaGetDeviceCount", None)
    for device in (-1, 99):
        calls.call(str(device), "cudaSetDevice", device)
    calls.call("first", "cudaGetDevice", byref(number), output=number)
    calls.call("null", "cudaGetDevice", None)
    for attribute in (0, -1, 9999):
        calls.call(f"attribute {attribute} of device 0", "cudaDeviceGetAttribute", byref(number), attribute, 0)
    calls.call("device 99", "cudaDeviceGetAttribute", byref(number), 1, 99)
    for attribute in (1, 10, 14, 41, 89, 115, 116, 119):
        calls.call(f"value of {attribute}", "cudaDeviceGetAttribute", byref(number), attribute, 0, output=number)
    text = ctypes.create_string_buffer(64)
    for length_bytes in (0, 4, 13, 64):
        calls.call(f"{length_bytes} bytes", "cudaDeviceGetPCIBusId", text, length_bytes, 0)
    calls.call("device 99", "cudaDeviceGetPCIBusId", text, 64, 99)
    for name in (b"", b"no address", b"ffff:ff:1f.0"):
        calls.call(repr(name.decode()), "cudaDeviceGetByPCIBusId", byref(number), c_char_p(name))
    calls.call("itself", "cudaDeviceCanAccessPeer", byref(number), 0, 0, output=number)
    calls.call("device 99", "cudaDeviceCanAccessPeer", byref(number), 0, 99)
    calls.call("itself", "cudaDeviceEnablePeerAccess", 0, 0)
    calls.call("device 99", "cudaDeviceEnablePeerAccess", 99, 0)
    calls.call("itself", "cudaDeviceDisablePeerAccess", 0)
    calls.call("unknown", "cudaSetDeviceFlags", c_uint(0x4000))
    flags = c_uint()
    calls.call("default", "cudaGetDeviceFlags", byref(flags))
    for limit in (0, 2, 99):
        size = c_size_t()
        calls.call(str(limit), "cudaDeviceGetLimit", byref(size), limit)


def memory(calls: Calls) -> None:
    """Allocations of devices and of the host."""
    pointer, other = c_void_p(), c_void_p()
    calls.call("null", "cudaMalloc", None, c_size_t(16))
    calls.call("no bytes", "cudaMalloc", byref(pointer), c_size_t(0), output=pointer)
    calls.call("too many bytes", "cudaMalloc", byref(pointer), c_size_t(1 << 60))
    calls.call("null", "cudaFree", None)
    calls.call("no allocation", "cudaFree", c_void_p(0x1000))
    pointer = calls.pointer("cudaMalloc", c_size_t(KIB))
    assert pointer.value is not None
    calls.call("in the middle", "cudaFree", c_void_p(pointer.value + 16))
    calls.call("memory of the device", "cudaFreeHost", pointer)
    calls.call("once", "cudaFree", pointer)
    calls.call("no bytes", "cudaMallocHost", byref(pointer), c_size_t(0), output=pointer)
    calls.call("null", "cudaFreeHost", None)
    calls.call("no allocation", "cudaFreeHost", c_void_p(0x1000))
    calls.call("unknown flags", "cudaHostAlloc", byref(pointer), c_size_t(KIB), c_uint(0x80))
    calls.call("unknown flags", "cudaMallocManaged", byref(pointer), c_size_t(KIB), c_uint(0x80))
    calls.call("no bytes", "cudaMallocManaged", byref(pointer), c_size_t(0), c_uint(1), output=pointer)
    pitch = c_size_t()
    calls.call("100 x 10", "cudaMallocPitch", byref(pointer), byref(pitch), c_size_t(100), c_size_t(10), output=pitch)
    calls.call("of rows", "cudaFree", pointer)
    calls.call("0 x 10", "cudaMallocPitch", byref(pointer), byref(pitch), c_size_t(0), c_size_t(10))
    buffer = ctypes.create_string_buffer(64 * KIB)
    address = c_void_p((ctypes.addressof(buffer) + 4095) & ~4095)
    calls.call("no bytes", "cudaHostRegister", address, c_size_t(0), c_uint(0))
    calls.call("null", "cudaHostRegister", None, c_size_t(KIB), c_uint(0))
    calls.call("unknown flags", "cudaHostRegister", address, c_size_t(KIB), c_uint(0x8000))
    calls.call("not registered", "cudaHostUnregister", address)
    calls.call("once", "cudaHostRegister", address, c_size_t(8 * KIB), c_uint(0))
    calls.call("twice", "cudaHostRegister", address, c_size_t(8 * KIB), c_uint(0))
    calls.call("registered", "cudaHostGetDevicePointer", byref(other), address, c_uint(0))
    calls.call("registered", "cudaHostUnregister", address)
    calls.call("not registered", "cudaHostGetDevicePointer", byref(other), address, c_uint(0))
    free, total = c_size_t(), c_size_t()
    calls.call("free and total", "cudaMemGetInfo", byref(free), byref(total))


def copies(calls: Calls) -> None:
    """Copies and memsets, with wrong directions, lengths and pitches."""
    device = calls.pointer("cudaMalloc", c_size_t(4 * KIB))
    pinned = calls.pointer("cudaMallocHost", c_size_t(4 * KIB))
    host, second = ctypes.create_string_buffer(4 * KIB), ctypes.create_string_buffer(4 * KIB)
    size = c_size_t(KIB)
    for title, target, source, direction in (
        ("to the device", device, host, HOST_TO_DEVICE),
        ("from the device", host, device, DEVICE_TO_HOST),
        ("within the device", device, device, DEVICE_TO_DEVICE),
        ("within the host", host, second, HOST_TO_HOST),
        ("within the host, default", host, second, DEFAULT),
        ("to the device, default", device, host, DEFAULT),
        ("from pinned memory, default", device, pinned, DEFAULT),
        ("unknown direction", device, host, 9),
        ("negative direction", device, host, -1),
        ("to the host, but named to the device", host, device, HOST_TO_DEVICE),
        ("within the host, but named to the device", host, second, HOST_TO_DEVICE),
        ("to the device, but named within the host", device, host, HOST_TO_HOST),
        ("from pinned memory, but named within the device", device, pinned, DEVICE_TO_DEVICE),
        ("null target", None, host, HOST_TO_DEVICE),
        ("null source", device, None, HOST_TO_DEVICE),
    ):
        calls.call(title, "cudaMemcpy", target, source, size, direction)
        calls.call(f"async, {title}", "cudaMemcpyAsync", target, source, size, direction, None)
    calls.call("nothing between null pointers", "cudaMemcpy", None, None, c_size_t(0), DEFAULT)
    calls.call("nothing, unknown direction", "cudaMemcpy", device, host, c_size_t(0), 9)
    calls.call("nothing, unknown direction", "cudaMemcpyAsync", device, host, c_size_t(0), 9, None)
    rows = (c_size_t(64), c_size_t(8))
    calls.call("rows", "cudaMemcpy2D", device, c_size_t(128), host, c_size_t(64), *rows, HOST_TO_DEVICE)
    calls.call("small target pitch", "cudaMemcpy2D", device, c_size_t(32), host, c_size_t(64), *rows, HOST_TO_DEVICE)
    calls.call("small source pitch", "cudaMemcpy2D", device, c_size_t(64), host, c_size_t(32), *rows, HOST_TO_DEVICE)
    calls.call("huge pitch", "cudaMemcpy2D", device, c_size_t(1 << 40), host, c_size_t(64), *rows, HOST_TO_DEVICE)
    calls.call("unknown direction", "cudaMemcpy2D", device, c_size_t(64), host, c_size_t(64), *rows, 9)
    calls.call(
        "no rows, unknown direction",
        "cudaMemcpy2D",
        device,
        c_size_t(64),
        host,
        c_size_t(64),
        c_size_t(64),
        c_size_t(0),
        9,
    )
    calls.call(
        "no rows, small pitch", "cudaMemcpy2D", device, c_size_t(4), host, c_size_t(64), c_size_t(64), c_size_t(0), 1
    )
    calls.call("no rows", "cudaMemcpy2D", device, c_size_t(64), host, c_size_t(64), c_size_t(64), c_size_t(0), 1)
    calls.call("device memory", "cudaMemset", device, 7, size)
    calls.call("nothing", "cudaMemset", None, 7, c_size_t(0))
    calls.call("null", "cudaMemset", None, 7, size)
    calls.call("pinned memory", "cudaMemset", pinned, 7, size)
    calls.call("rows", "cudaMemset2D", device, c_size_t(128), 7, *rows)
    calls.call("small pitch", "cudaMemset2D", device, c_size_t(32), 7, *rows)
    calls.call("to itself", "cudaMemcpyPeer", device, 0, device, 0, size)
    calls.call("device 99", "cudaMemcpyPeer", device, 99, device, 0, size)
    calls.call("after the copies", "cudaDeviceSynchronize")
    calls.runtime.cudaFree(device)
    calls.runtime.cudaFreeHost(pinned)


def streams(calls: Calls) -> None:
    """Streams and events."""
    pointer, number = c_void_p(), c_int()
    least, greatest = c_int(), c_int()
    calls.call("least", "cudaDeviceGetStreamPriorityRange", byref(least), byref(greatest), output=least)
    calls.call("greatest", "cudaDeviceGetStreamPriorityRange", byref(least), byref(greatest), output=greatest)
    calls.call("null", "cudaStreamCreate", None)
    calls.call("unknown flags", "cudaStreamCreateWithFlags", byref(pointer), c_uint(6))
    for priority in (-99, 99):
        calls.call(f"{priority}", "cudaStreamCreateWithPriority", byref(pointer), c_uint(1), priority)
        calls.call(f"of {priority}", "cudaStreamGetPriority", pointer, byref(number), output=number)
        flags = c_uint()
        calls.call(f"of {priority}", "cudaStreamGetFlags", pointer, byref(flags), output=flags)
        calls.call(f"of {priority}", "cudaStreamDestroy", pointer)
    calls.call("default stream", "cudaStreamDestroy", None)
    for name, default in (("null", 0), ("legacy", 1), ("of the thread", 2)):
        calls.call(name, "cudaStreamSynchronize", c_void_p(default))
        calls.call(name, "cudaStreamQuery", c_void_p(default))
        calls.call(name, "cudaStreamIsCapturing", c_void_p(default), byref(number), output=number)
    calls.call("legacy", "cudaStreamBeginCapture", c_void_p(1), 0)
    calls.call("unknown mode", "cudaThreadExchangeStreamCaptureMode", byref(c_int(9)))
    calls.call("unknown flags", "cudaEventCreateWithFlags", byref(pointer), c_uint(0x80))
    calls.call("with timing", "cudaEventCreateWithFlags", byref(pointer), c_uint(INTERPROCESS))
    calls.call("null", "cudaEventDestroy", None)
    first, second = calls.pointer("cudaEventCreate"), calls.pointer("cudaEventCreateWithFlags", c_uint(DISABLE_TIMING))
    time_ms = ctypes.c_float()
    calls.call("not recorded", "cudaEventQuery", first)
    calls.call("not recorded", "cudaEventSynchronize", first)
    calls.call("not recorded", "cudaEventElapsedTime", byref(time_ms), first, first)
    calls.call("default stream", "cudaEventRecord", first, None)
    calls.call("default stream", "cudaEventRecord", second, None)
    calls.call("without timing", "cudaEventElapsedTime", byref(time_ms), first, second)
    calls.call("unknown flags", "cudaStreamWaitEvent", None, first, c_uint(8))
    calls.call("recorded", "cudaStreamWaitEvent", None, first, c_uint(0))
    handle = Handle()
    calls.call("event of one process", "cudaIpcGetEventHandle", byref(handle), first)
    calls.call("no handle", "cudaIpcOpenEventHandle", byref(pointer), Handle())
    for event in (first, second):
        calls.call("event", "cudaEventDestroy", event)


def pointers(calls: Calls) -> None:
    """Attributes of pointers, and handles of IPC."""
    device, pinned = calls.pointer("cudaMalloc", c_size_t(KIB)), calls.pointer("cudaMallocHost", c_size_t(KIB))
    managed = calls.pointer("cudaMallocManaged", c_size_t(KIB), c_uint(1))
    host, handle, pointer = ctypes.create_string_buffer(KIB), Handle(), c_void_p()
    assert device.value is not None
    middle = c_void_p(device.value + 16)
    for title, address in (
        ("device", device),
        ("middle of device", middle),
        ("pinned", pinned),
        ("managed", managed),
        ("host", host),
        ("null", None),
    ):
        attributes = Attributes()
        calls.call(title, "cudaPointerGetAttributes", byref(attributes), address)
        kinds = calls.results[f"cudaPointerGetAttributes: {title}"]
        kinds[2] = [attributes.type, attributes.device] if kinds[0] == 0 else None
        calls.call(title, "cudaIpcGetMemHandle", byref(handle), address)
    calls.call("device", "cudaIpcGetMemHandle", byref(handle), device)
    calls.call("unknown flags", "cudaIpcOpenMemHandle", byref(pointer), handle, c_uint(8))
    calls.call("own handle", "cudaIpcOpenMemHandle", byref(pointer), handle, c_uint(1))
    calls.call("no handle", "cudaIpcOpenMemHandle", byref(pointer), Handle(), c_uint(1))
    calls.call("not opened", "cudaIpcCloseMemHandle", device)
    flags = c_uint()
    calls.call("pinned", "cudaHostGetFlags", byref(flags), pinned)
    calls.call("host", "cudaHostGetFlags", byref(flags), host)
    calls.runtime.cudaFree(managed)
    calls.runtime.cudaFreeHost(pinned)
    calls.runtime.cudaFree(device)


def pools(calls: Calls) -> None:
    """Allocations in the order of a stream."""
    pool, pointer = c_void_p(), c_void_p()
    calls.call("device 0", "cudaDeviceGetDefaultMemPool", byref(pool), 0)
    calls.call("device 99", "cudaDeviceGetDefaultMemPool", byref(pointer), 99)
    calls.call("no bytes", "cudaMallocAsync", byref(pointer), c_size_t(0), None, output=pointer)
    calls.call("too many bytes", "cudaMallocAsync", byref(pointer), c_size_t(1 << 60), None)
    calls.call("1 KiB", "cudaMallocAsync", byref(pointer), c_size_t(KIB), None)
    calls.call("1 KiB", "cudaFreeAsync", pointer, None)
    calls.call("null", "cudaFreeAsync", None, None)
    calls.call("no allocation", "cudaFreeAsync", c_void_p(0x1000), None)
    threshold = ctypes.c_uint64()
    calls.call("threshold", "cudaMemPoolGetAttribute", pool, 4, byref(threshold), output=threshold)
    calls.call("unknown", "cudaMemPoolGetAttribute", pool, 99, byref(threshold))
    calls.call("default pool", "cudaMemPoolDestroy", pool)
    calls.call("default pool", "cudaMemPoolTrimTo", pool, c_size_t(0))
    calls.call("1 KiB from the pool", "cudaMallocFromPoolAsync", byref(pointer), c_size_t(KIB), pool, None)
    calls.call("from the pool", "cudaFree", pointer)


def kernels_and_reset(calls: Calls) -> None:
    """Kernels and symbols that are not registered, names of errors, and the reset of a device."""
    unknown, pointer = c_int(), c_void_p()
    calls.call("unknown", "cudaFuncGetAttributes", ctypes.create_string_buffer(512), byref(unknown))
    calls.call("unknown", "cudaGetSymbolAddress", byref(pointer), byref(unknown))
    calls.runtime.cudaGetErrorName.restype = c_char_p
    for error in (0, 1, 2, 12, 21, 98, 100, 101, 201, 217, 400, 600, 704, 705, 712, 713, 719, 801, 900, 999, 12345):
        name = calls.runtime.cudaGetErrorName(error)
        calls.results[f"cudaGetErrorName: {error}"] = [0, 0, name.decode()]
    calls.pointer("cudaMalloc", c_size_t(KIB))
    calls.call("with memory", "cudaDeviceReset")
    calls.call("after the reset", "cudaMalloc", byref(pointer), c_size_t(KIB))
    calls.call("after the reset", "cudaFree", pointer)


def run(*groups: Callable[[Calls], None]) -> None:
    """Make all calls of the groups, and print the results."""
    calls = Calls(sys.argv[1])
    for group in groups:
        sys.stderr.write(f"{group.__name__}\n")
        sys.stderr.flush()
        group(calls)
    json.dump(calls.results, sys.stdout, indent=0)


if __name__ == "__main__":
    run(devices, memory, copies, streams, pointers, pools, kernels_and_reset)
