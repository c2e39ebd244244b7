"""One use of GPU memory by a stock Python package: ``cuda_peer.py CASE``.

CASE is the name of a function below, such as torch_copies. The function gets the imported package, and a second
argument if one follows after a colon, as in kvikio_files:off. The program runs in an environment that has the packages
and not gdrkit. It checks all data itself, and prints one line at its end. Only torch_kernel launches a kernel, which a
twin must refuse.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

LENGTH_BYTES = (4 << 20) + 1000
_TIMEOUT_S, _PAUSE_S = 40.0, 0.002
# The source device and the target device of each copy, as device indices.
_DEVICE_PAIRS = ((0, 1), (1, 0))


def _make_pattern(seed: int = 0) -> Any:  # noqa: ANN401 - numpy does not name the type of its arrays.
    """Return an array of LENGTH_BYTES random bytes, which depend only on the seed."""
    return np.random.default_rng(seed).integers(0, 256, LENGTH_BYTES, dtype=np.uint8)


def _check_bytes(actual: Any, expected: Any, subject: str) -> None:  # noqa: ANN401 - as in _make_pattern().
    if not np.array_equal(actual, expected):
        sys.exit(f"{subject}: {int(np.count_nonzero(actual != expected))} bytes are wrong")


def torch_copies(torch: Any) -> str:  # noqa: ANN401 - the package is imported by name.
    """Copy to each of two devices, within a device, between the devices, and back."""
    content = torch.from_numpy(_make_pattern())
    for source_index, target_index in _DEVICE_PAIRS:
        source = torch.empty(LENGTH_BYTES, dtype=torch.uint8, device=f"cuda:{source_index}")
        source.copy_(content)
        # Tensors are not filled on the device, because torch fills them by a kernel.
        target = torch.empty(LENGTH_BYTES, dtype=torch.uint8, device=f"cuda:{target_index}")
        target.copy_(source)
        _check_bytes(target.clone().cpu().numpy(), _make_pattern(), f"device {source_index} to {target_index}")
        # The first bytes are also copied as a matrix.
        matrix = torch.empty((64, 4096), dtype=torch.uint8, device=f"cuda:{target_index}")
        matrix.copy_(source[: 64 * 4096].view(64, 4096))
        _check_bytes(matrix.cpu().numpy().ravel(), _make_pattern()[: 64 * 4096], "matrix")
    return f"{torch.cuda.device_count()} devices"


def torch_pinned(torch: Any) -> str:  # noqa: ANN401 - as torch_copies().
    """Copy from and to pinned memory with non-blocking copies, and then wait for both."""
    source = torch.from_numpy(_make_pattern()).pin_memory()
    target = torch.empty(LENGTH_BYTES, dtype=torch.uint8, pin_memory=True)
    device_tensor = torch.empty(LENGTH_BYTES, dtype=torch.uint8, device="cuda")
    device_tensor.copy_(source, non_blocking=True)
    target.copy_(device_tensor, non_blocking=True)
    torch.cuda.synchronize()
    _check_bytes(target.numpy(), _make_pattern(), "pinned memory")
    if not (source.is_pinned() and target.is_pinned()):
        sys.exit("the memory is not pinned")
    return "pinned"


def torch_streams(torch: Any) -> str:  # noqa: ANN401 - as torch_copies().
    """Order two streams by an event, and measure the time between two events."""
    first_stream, second_stream = torch.cuda.Stream(), torch.cuda.Stream()
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    device_tensor = torch.empty(LENGTH_BYTES, dtype=torch.uint8, device="cuda")
    source, zeros = torch.from_numpy(_make_pattern()).pin_memory(), torch.from_numpy(0 * _make_pattern()).pin_memory()
    target = torch.empty(LENGTH_BYTES, dtype=torch.uint8, pin_memory=True)
    for _ in range(20):
        target.zero_()
        with torch.cuda.stream(first_stream):
            device_tensor.copy_(zeros, non_blocking=True)
            begin_event.record()
            device_tensor.copy_(source, non_blocking=True)
            end_event.record()
        # Without this order, the second stream could copy the zeros, or a part of them.
        second_stream.wait_event(end_event)
        with torch.cuda.stream(second_stream):
            target.copy_(device_tensor, non_blocking=True)
        second_stream.synchronize()
        _check_bytes(target.numpy(), _make_pattern(), "the second stream")
    if not end_event.query() or begin_event.elapsed_time(end_event) < 0:
        sys.exit("the events are wrong")
    return "two streams"


def _change_shared_tensor(tensor_queue: Any, reply_queue: Any) -> None:  # noqa: ANN401 - queues of torch.multiprocessing.
    torch = importlib.import_module("torch")
    tensor = tensor_queue.get()
    _check_bytes(tensor.cpu().numpy(), _make_pattern(), "the tensor in the second process")
    tensor.copy_(torch.from_numpy(_make_pattern(1)))
    torch.cuda.synchronize()
    del tensor
    reply_queue.put("changed")


def torch_shared(torch: Any) -> str:  # noqa: ANN401 - as torch_copies().
    """Pass a tensor to a second process, which checks and changes it."""
    context = importlib.import_module("torch.multiprocessing").get_context("spawn")
    tensor_queue, reply_queue = context.Queue(), context.Queue()
    process = context.Process(target=_change_shared_tensor, args=(tensor_queue, reply_queue), daemon=True)
    process.start()
    # The tensor begins inside an allocation. torch shares the whole allocation with the other process.
    storage = torch.empty(LENGTH_BYTES + 4096, dtype=torch.uint8, device="cuda")
    tensor = storage[4096:]
    tensor.copy_(torch.from_numpy(_make_pattern()))
    tensor_queue.put(tensor)
    reply_queue.get(timeout=40)
    process.join(20)
    _check_bytes(tensor.cpu().numpy(), _make_pattern(1), "the tensor that the second process changed")
    return f"shared, exit code {process.exitcode}"


def torch_expandable(torch: Any) -> str:  # noqa: ANN401 - as torch_copies().
    """Allocate tensors of growing size, and check that one expandable segment contains all of them with their data."""
    tensors = []
    for index in range(12):
        tensors.append(torch.empty(LENGTH_BYTES * (index + 1), dtype=torch.uint8, device="cuda"))
        tensors[-1][:LENGTH_BYTES].copy_(torch.from_numpy(_make_pattern(index)))
    for index, tensor in enumerate(tensors):
        _check_bytes(tensor[:LENGTH_BYTES].cpu().numpy(), _make_pattern(index), f"tensor {index}")
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment.get("is_expandable")]
    if len(segments) != 1:
        sys.exit(f"{len(segments)} expandable segments, not one")
    del tensors, tensor
    torch.cuda.empty_cache()
    if torch.cuda.memory_reserved():
        sys.exit(f"{torch.cuda.memory_reserved()} bytes are reserved after empty_cache")
    return f"one expandable segment of {segments[0]['total_size']} bytes"


def torch_kernel(torch: Any) -> str:  # noqa: ANN401 - as torch_copies().
    """Launch a kernel, which a twin refuses."""
    memory = torch.empty(16, dtype=torch.float32, device="cuda")
    try:
        memory.add_(1)
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"refused: {str(error).partition(chr(10))[0]}"
    sys.exit("the kernel was not refused")


def kvikio_files(kvikio: Any, mode: str) -> str:  # noqa: ANN401 - as torch_copies().
    """Write GPU memory to a file. Read the file by pread, by raw_read, by read at an offset, and into host memory."""
    importlib.import_module("kvikio.defaults")
    kvikio.defaults.set("compat_mode", kvikio.CompatMode[mode.upper()])
    driver = _Driver()
    path = Path("kvikio-data")
    # pread splits a transfer into tasks of this size, which threads run at the same time.
    for task_size in (1 << 20, 4 << 20):
        kvikio.defaults.set("task_size", task_size)
        source, target = driver.allocate(LENGTH_BYTES), driver.allocate(LENGTH_BYTES)
        driver.write(source, _make_pattern())
        driver.write(target, 0 * _make_pattern())
        with kvikio.CuFile(path, "w") as file:
            if file.write(source) != LENGTH_BYTES:
                sys.exit("only a part was written")
        _check_bytes(np.fromfile(path, dtype=np.uint8), _make_pattern(), "the file")
        with kvikio.CuFile(path, "r") as file:
            if file.pread(target).get() != LENGTH_BYTES:
                sys.exit("only a part was read")
            _check_bytes(driver.read(target), _make_pattern(), "pread")
            driver.write(target, 0 * _make_pattern())
            if file.raw_read(target, file_offset=0) != LENGTH_BYTES:
                sys.exit("raw_read read only a part")
            _check_bytes(driver.read(target), _make_pattern(), "raw_read")
            page = driver.allocate(4096)
            file.read(page, file_offset=8192)
            _check_bytes(driver.read(page), _make_pattern()[8192 : 8192 + 4096], "a range")
            host_array = np.zeros(LENGTH_BYTES, dtype=np.uint8)
            file.read(host_array)
            _check_bytes(host_array, _make_pattern(), "host memory")
    return f"compat_mode {mode}"


def nixl_files(nixl: Any, backend: str) -> str:  # noqa: ANN401 - as torch_copies().
    """Write GPU memory to a file by a storage backend of NIXL, and read it back.

    The backend POSIX takes only host memory, so it writes a copy of the GPU memory.
    """
    driver = _Driver()
    memory = driver.allocate(LENGTH_BYTES)
    driver.write(memory, _make_pattern())
    api = importlib.import_module(f"{nixl.__name__}._api")
    agent = api.nixl_agent("files", api.nixl_agent_config(backends=[backend]))
    host_array = driver.read(memory)
    address, memory_type = (host_array.ctypes.data, "DRAM") if backend == "POSIX" else (memory.address, "VRAM")
    with Path("nixl-data").open("w+b") as file:
        # A region is (address or offset, length, device or file descriptor).
        region_by_type = {memory_type: (address, LENGTH_BYTES, 0), "FILE": (0, LENGTH_BYTES, file.fileno())}
        registrations = [
            agent.register_memory([(*region, "")], region_type) for region_type, region in region_by_type.items()
        ]
        memory_ranges, file_ranges = (
            agent.get_xfer_descs([region], region_type) for region_type, region in region_by_type.items()
        )
        for operation in ("WRITE", "READ"):
            # A storage backend has no remote agent, so the agent names itself.
            handle = agent.initialize_xfer(operation, memory_ranges, file_ranges, "files")
            state = agent.transfer(handle)
            deadline_s = time.monotonic() + _TIMEOUT_S
            while state != "DONE":
                if state == "ERR" or time.monotonic() > deadline_s:
                    sys.exit(f"{operation} ended in state {state}")
                time.sleep(_PAUSE_S)
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)
            if operation == "WRITE":
                _check_bytes(np.fromfile("nixl-data", dtype=np.uint8), _make_pattern(), "the file")
                driver.write(memory, 0 * _make_pattern())
                host_array[:] = 0
        _check_bytes(host_array if memory_type == "DRAM" else driver.read(memory), _make_pattern(), "the memory")
        for registration in registrations:
            agent.deregister_memory(registration)
    return f"backend {backend}, {memory_type}"


class _GpuMemory:
    """GPU memory, with ``__cuda_array_interface__`` so that kvikio accepts it."""

    def __init__(self, address: int, length_bytes: int) -> None:
        self.address, self.length_bytes = address, length_bytes
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (length_bytes,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }


class _Driver:
    """The CUDA driver in cuda.bindings, with methods that allocate and copy GPU memory."""

    def __init__(self) -> None:
        self._bindings: Any = importlib.import_module("cuda.bindings.driver")
        self._call("cuInit", 0)
        self._call("cuCtxSetCurrent", self._call("cuDevicePrimaryCtxRetain", 0))

    def _call(self, name: str, *arguments: Any) -> Any:  # noqa: ANN401 - the types of cuda.bindings.
        status, *results = getattr(self._bindings, name)(*arguments)
        if int(status):
            sys.exit(f"{name} failed: {status!r}")
        return results[0] if results else None

    def allocate(self, length_bytes: int) -> _GpuMemory:
        """Return new GPU memory of this size."""
        return _GpuMemory(int(self._call("cuMemAlloc", length_bytes)), length_bytes)

    def write(self, memory: _GpuMemory, content: Any) -> None:  # noqa: ANN401 - as in _make_pattern().
        """Replace the content of the GPU memory."""
        self._call("cuMemcpyHtoD", memory.address, content.ctypes.data, memory.length_bytes)

    def read(self, memory: _GpuMemory) -> Any:  # noqa: ANN401 - as in _make_pattern().
        """Return a copy of the content of the GPU memory."""
        content = np.empty(memory.length_bytes, dtype=np.uint8)
        self._call("cuMemcpyDtoH", content.ctypes.data, memory.address, memory.length_bytes)
        return content


def cupy_refusal(cupy: Any) -> str:  # noqa: ANN401 - as torch_copies().
    """Count the devices by cupy, which contains the CUDA runtime as a static library. A twin refuses such a runtime."""
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"refused: {error}"
    sys.exit("the static CUDA runtime was not refused")


def bindings_refusal(runtime: Any) -> str:  # noqa: ANN401 - as torch_copies().
    """Count the devices by cuda.bindings.runtime, which also contains the CUDA runtime as a static library."""
    status = runtime.cudaGetDeviceCount()[0]
    if not int(status):
        sys.exit("the static CUDA runtime was not refused")
    return f"refused: {status!r}"


def main() -> None:
    """Run the case that the command line names."""
    case, _, argument = sys.argv[1].partition(":")
    case_function = globals()[case]
    # The name of a case begins with the name of the package that it uses, or with a short name of the package.
    prefix = case.partition("_")[0]
    package = {"bindings": "cuda.bindings.runtime"}.get(prefix, prefix)
    result_text = case_function(importlib.import_module(package), *filter(None, [argument]))
    print(f"{case}: right ({result_text})")  # noqa: T201 - the output of a program.


if __name__ == "__main__":
    main()
