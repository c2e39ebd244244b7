"""A program that uses the CUDA runtime in two processes. Its argument is the name of the runtime library.

The second process maps memory of the first process, writes to the memory, and records an event. The first process
waits for the event. A launch of a kernel must fail, because the software twin of the runtime runs no kernels. The
program prints ``done`` at its end.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading

SUCCESS, INVALID_DEVICE, NOT_SUPPORTED = 0, 101, 801
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
DEVICE_MEMORY = 2  # cudaMemoryTypeDevice.
EVENT_INTERPROCESS_FLAGS = 6  # cudaEventDisableTiming and cudaEventInterprocess.
LENGTH_BYTES = 5000
# With this second argument, the program runs as the second process, which imports the memory.
IMPORTER_ARGUMENT = "importer"


class IpcHandle(ctypes.Structure):
    """The structure cudaIpcMemHandle_t or cudaIpcEventHandle_t, which the functions of the runtime take by value."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class Dimensions(ctypes.Structure):
    """The structure dim3: the numbers of blocks, or of threads in a block, along each axis."""

    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


class PointerAttributes(ctypes.Structure):
    """The first members of the structure cudaPointerAttributes, and space for the others."""

    _fields_ = (("type", ctypes.c_int), ("device", ctypes.c_int), ("other_members", ctypes.c_byte * 80))


def require_status(status: int, expected: int = SUCCESS) -> None:
    """Require that `status`, the result of a function of the runtime, is the expected status."""
    assert status == expected, f"the status is {runtime.cudaGetErrorName(status).decode()} ({status}), not {expected}"


def allocate_device_memory() -> ctypes.c_void_p:
    """Allocate LENGTH_BYTES of device memory, and return the address."""
    memory = ctypes.c_void_p()
    require_status(runtime.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(LENGTH_BYTES)))
    return memory


def write_memory(memory: ctypes.c_void_p, data: bytes) -> None:
    """Copy bytes to the beginning of device memory."""
    require_status(runtime.cudaMemcpy(memory, data, ctypes.c_size_t(len(data)), HOST_TO_DEVICE))


def read_memory(memory: ctypes.c_void_p) -> bytes:
    """Return the first LENGTH_BYTES of device memory."""
    buffer = ctypes.create_string_buffer(LENGTH_BYTES)
    require_status(runtime.cudaMemcpy(buffer, memory, ctypes.c_size_t(LENGTH_BYTES), DEVICE_TO_HOST))
    return buffer.raw


def check_copies_and_memset() -> None:
    """Copy to and from the device, fill memory in a stream, and check the bytes."""
    data = bytes(range(250)) * (LENGTH_BYTES // 250)
    memory, stream, event, attributes = (
        allocate_device_memory(),
        ctypes.c_void_p(),
        ctypes.c_void_p(),
        PointerAttributes(),
    )
    write_memory(memory, data)
    assert read_memory(memory) == data
    require_status(runtime.cudaPointerGetAttributes(ctypes.byref(attributes), memory))
    assert (attributes.type, attributes.device) == (DEVICE_MEMORY, 0)
    require_status(runtime.cudaStreamCreate(ctypes.byref(stream)))
    require_status(runtime.cudaEventCreate(ctypes.byref(event)))
    require_status(runtime.cudaMemsetAsync(memory, 7, ctypes.c_size_t(LENGTH_BYTES), stream))
    require_status(runtime.cudaEventRecord(event, stream))
    require_status(runtime.cudaEventSynchronize(event))
    assert read_memory(memory) == bytes([7]) * LENGTH_BYTES
    require_status(runtime.cudaEventDestroy(event))
    require_status(runtime.cudaStreamDestroy(stream))
    require_status(runtime.cudaFree(memory))


def check_last_error_of_threads() -> None:
    """Check that each thread has its own last error."""
    require_status(runtime.cudaSetDevice(99), INVALID_DEVICE)
    errors_of_new_thread: list[int] = []
    thread = threading.Thread(target=lambda: errors_of_new_thread.append(runtime.cudaGetLastError()))
    thread.start()
    thread.join()
    assert errors_of_new_thread == [SUCCESS]
    require_status(runtime.cudaGetLastError(), INVALID_DEVICE)
    # The first call has reset the last error.
    require_status(runtime.cudaGetLastError())


def check_kernel_is_refused() -> None:
    """Register a kernel, as a compiled program does, and require that its launch fails."""
    # A compiled program identifies a kernel by the address of a host function. Here, it is the address of a C integer.
    # The fat binary, 16 zero bytes, has no code.
    kernel, one_block = ctypes.c_int(), Dimensions(1, 1, 1)
    register_binary, register_function = runtime["__cudaRegisterFatBinary"], runtime["__cudaRegisterFunction"]
    register_binary.restype = ctypes.c_void_p
    binary = ctypes.c_void_p(register_binary(bytes(16)))
    # The mangled name means scale(float*, float).
    register_function(binary, ctypes.byref(kernel), None, b"_Z5scalePff", -1, None, None, None, None, None)
    require_status(
        runtime.cudaLaunchKernel(ctypes.byref(kernel), one_block, one_block, None, ctypes.c_size_t(0), None),
        expected=NOT_SUPPORTED,
    )
    require_status(runtime.cudaGetLastError(), NOT_SUPPORTED)


def share_memory() -> None:
    """Let another process write to memory of this process, and wait for the event that the other process records."""
    memory, event = allocate_device_memory(), ctypes.c_void_p()
    memory_handle, event_handle = IpcHandle(), IpcHandle()
    write_memory(memory, bytes([1]) * LENGTH_BYTES)
    require_status(runtime.cudaEventCreateWithFlags(ctypes.byref(event), EVENT_INTERPROCESS_FLAGS))
    require_status(runtime.cudaIpcGetMemHandle(ctypes.byref(memory_handle), memory))
    require_status(runtime.cudaIpcGetEventHandle(ctypes.byref(event_handle), event))
    command = [sys.executable, __file__, sys.argv[1], IMPORTER_ARGUMENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as importer:
        assert importer.stdin is not None
        assert importer.stdout is not None
        importer.stdin.write(bytes(memory_handle) + bytes(event_handle))
        importer.stdin.flush()
        assert importer.stdout.readline() == b"recorded\n"
        require_status(runtime.cudaEventSynchronize(event))
        assert read_memory(memory) == bytes([2]) * LENGTH_BYTES
    assert importer.returncode == 0
    require_status(runtime.cudaFree(memory))


def import_memory() -> None:
    """Write to memory of the first process, and record the event for which the first process waits."""
    handle_bytes = sys.stdin.buffer.read(2 * ctypes.sizeof(IpcHandle))
    memory_handle, event_handle = (
        IpcHandle.from_buffer_copy(handle_bytes),
        IpcHandle.from_buffer_copy(handle_bytes[64:]),
    )
    memory, event = ctypes.c_void_p(), ctypes.c_void_p()
    # The flag 1 is cudaIpcMemLazyEnablePeerAccess.
    require_status(runtime.cudaIpcOpenMemHandle(ctypes.byref(memory), memory_handle, 1))
    require_status(runtime.cudaIpcOpenEventHandle(ctypes.byref(event), event_handle))
    assert read_memory(memory) == bytes([1]) * LENGTH_BYTES
    require_status(runtime.cudaMemsetAsync(memory, 2, ctypes.c_size_t(LENGTH_BYTES), None))
    require_status(runtime.cudaEventRecord(event, None))
    sys.stdout.write("recorded\n")
    sys.stdout.flush()
    require_status(runtime.cudaDeviceSynchronize())
    require_status(runtime.cudaIpcCloseMemHandle(memory))


runtime = ctypes.CDLL(sys.argv[1])
runtime.cudaGetErrorName.restype = ctypes.c_char_p
if sys.argv[2:] == [IMPORTER_ARGUMENT]:
    import_memory()
else:
    check_copies_and_memset()
    check_last_error_of_threads()
    check_kernel_is_refused()
    share_memory()
    sys.stdout.write("done\n")
