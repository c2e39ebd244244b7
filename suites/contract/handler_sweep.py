"""A program that runs a signal handler at every point of a call that takes a lock, for test_signal_handlers.py.

``python -m contract.handler_sweep SCENARIO FOLDER`` prints the number of points, as in ``87 points``, if the call and
the handler ended at every point and left no object open. A point is an instruction of gdrkit after which CPython may
run the handler. FOLDER has the file ``model.safetensors`` with the tensor ``a``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from support.interrupts import Interrupter

import gdrkit
from gdrkit import cuda, cufile, handles, safetensors, verbs
from gdrkit.errors import ClosedResource, GdrkitError, Reason, UsageError
from gdrkit.host import HostAllocator, HostMemory
from gdrkit.registration import BufferPool, MemoryPool, ReachTable, RegionCache
from gdrkit.units import GPU_RDMA_PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gdrkit.buffers import Allocator, DeviceBuffer

__all__ = ["SCENARIOS", "main"]

# A point that takes longer than this counts as a deadlock: the program prints its stacks and exits.
_TIMEOUT_S = 30.0
_MEMORY_BYTES = 4096
# The call and the handler may fail for these reasons, because each can close an object that the other uses.
_ALLOWED_REASONS = frozenset({Reason.CLOSED, Reason.BUSY, Reason.CANCELLED})


class _InterruptedCall(NamedTuple):
    """A call, the handler that interrupts it, and a check that runs after both.

    The handler runs only in contextlib, and in files of gdrkit whose path in the package begins with `source_path`.
    """

    call: Callable[[], object]
    handler: Callable[[], object]
    check: Callable[[], object] = lambda: None
    source_path: str = ""


@contextlib.contextmanager
def _retain_context(_folder: Path) -> Iterator[_InterruptedCall]:
    with cuda.Device(0) as device:
        yield _InterruptedCall(device.context_handle, device.context_handle)
    assert not any(kind.startswith("cuda") for kind in handles.live())


@contextlib.contextmanager
def _lease_buffer(_folder: Path, *, handler_closes_memory: bool = False) -> Iterator[_InterruptedCall]:
    with cuda.Device(0) as device, cufile.Driver() as driver, device.allocate(_MEMORY_BYTES) as memory:
        cache = cufile.BufferCache(driver)

        def lease() -> None:
            with cache.lease(memory):
                assert cache.registered_bytes in (0, _MEMORY_BYTES)

        yield _InterruptedCall(lease, memory.close if handler_closes_memory else lease)
        memory.close()
        assert cache.registered_bytes == 0
        assert "cufile.buffer" not in handles.live()


def _lease_buffer_and_close_memory(folder: Path) -> contextlib.AbstractContextManager[_InterruptedCall]:
    return _lease_buffer(folder, handler_closes_memory=True)


@contextlib.contextmanager
def _close_memory(_folder: Path) -> Iterator[_InterruptedCall]:
    with cuda.Device(0) as device, cufile.Driver() as driver, device.allocate(_MEMORY_BYTES) as memory:
        cache = cufile.BufferCache(driver)
        with cache.lease(memory):
            pass

        def lease() -> None:
            with cache.lease(memory):
                pass

        yield _InterruptedCall(memory.close, lease)
        memory.close()
        assert cache.registered_bytes == 0
        assert "cufile.buffer" not in handles.live()


@contextlib.contextmanager
def _use_stream(_folder: Path) -> Iterator[_InterruptedCall]:
    with cuda.Device(0) as device, cufile.Driver() as driver, device.allocate(_MEMORY_BYTES) as memory:
        stream, other_stream = device.stream(), device.stream()
        with cufile.RegisteredBuffer(driver, memory) as buffer:

            def use_stream(used_stream: cuda.Stream) -> None:
                with buffer.use_stream(used_stream, "read"):
                    pass

            yield _InterruptedCall(lambda: use_stream(stream), lambda: use_stream(other_stream))


@contextlib.contextmanager
def _wait_for_load(folder: Path, handler: Callable[[safetensors.ModelLoad], object]) -> Iterator[_InterruptedCall]:
    with safetensors.start_load_files([folder / "model.safetensors"], framework="dlpack") as load:
        results: list[safetensors.LoadedTensors] = []

        def check() -> None:
            # `results` is empty if the call failed because the handler had closed the load.
            if results:
                assert load.result() is results[0]
                assert list(results[0]) == ["a"]
            else:
                load.close()

        yield _InterruptedCall(lambda: results.append(load.result()), lambda: handler(load), check)


@contextlib.contextmanager
def _get_tensors(folder: Path) -> Iterator[_InterruptedCall]:
    with safetensors.safe_open(folder / "model.safetensors", "dlpack") as file:
        results = []
        yield _InterruptedCall(lambda: results.append(file.get_tensors()), file.get_tensors)
        assert file.get_tensors() is results[0]


@contextlib.contextmanager
def _allocate_host_memory(_folder: Path) -> Iterator[_InterruptedCall]:
    yield _InterruptedCall(lambda: HostMemory(_MEMORY_BYTES).close(), lambda: HostMemory(_MEMORY_BYTES).close())


@contextlib.contextmanager
def _allocate_from_memory_pool(_folder: Path) -> Iterator[_InterruptedCall]:
    with MemoryPool(HostAllocator(), idle_bytes_max=4 * GPU_RDMA_PAGE_BYTES) as pool:
        pool.allocate(_MEMORY_BYTES).close()

        def allocate_two_blocks() -> None:
            with pool.allocate(_MEMORY_BYTES), pool.allocate(_MEMORY_BYTES):
                assert pool.statistics().in_use_blocks >= 2

        yield _InterruptedCall(allocate_two_blocks, allocate_two_blocks)
        assert pool.statistics().in_use_blocks == 0


@contextlib.contextmanager
def _allocate_from_buffer_pool(_folder: Path) -> Iterator[_InterruptedCall]:
    (opened_nic,) = verbs.open_active_nics(count_max=1)
    with opened_nic as nic, BufferPool(HostAllocator(), [nic], buffer_bytes=64, count=2) as pool:

        def fill_buffer() -> None:
            with pool.allocate() as buffer:
                buffer.write(b"data")
                assert pool.statistics().free <= 1

        yield _InterruptedCall(fill_buffer, fill_buffer)
        assert pool.statistics().free == 2


class _CacheCalls:
    """Calls on one RegionCache, as methods. :func:`_use_region_cache` selects a call and a handler by method name."""

    def __init__(self, cache: RegionCache, memory: DeviceBuffer, other_memories: list[DeviceBuffer]) -> None:
        self.cache = cache
        self.memory = memory
        self.other_memories = other_memories
        # After invalidate(), the lease still holds its entry, but lookups no longer find the entry.
        self.unlinked_lease = cache.lease(memory)
        cache.invalidate(memory.address, length_bytes=1)

    def lease(self) -> None:
        with self.cache.lease(self.memory) as lease:
            assert lease.remote(self.cache.nics[0]).address == self.memory.address

    def lease_others(self) -> None:
        """Lease the other memories. If `memory` is registered, the cache exceeds two regions and evicts an entry."""
        for memory in self.other_memories:
            self.cache.lease(memory).close()

    def end_lease(self) -> None:
        self.unlinked_lease.close()

    def invalidate(self) -> None:
        self.cache.invalidate(self.memory.address, length_bytes=1)

    def close_memory(self) -> None:
        try:
            self.memory.close()
        except UsageError:
            assert not self.memory.closed  # A NIC may still access it.
            raise

    def close_cache(self) -> None:
        self.cache.close(timeout_ms=10)

    def statistics(self) -> None:
        assert self.cache.statistics().regions <= self.cache.regions_max

    def interrupt(self) -> None:
        raise KeyboardInterrupt

    def check(self) -> None:
        """Require that each call is possible after the handler, and that nothing stays registered."""
        if self.memory.closed:
            # close() of the memory has removed its entry from the cache, so that no freed memory is registered.
            assert self.cache.invalidate(self.memory.address, length_bytes=1) == 0
        self.end_lease()
        with contextlib.suppress(ClosedResource):  # The cache or the memory may be closed.
            self.lease_others()
            self.lease()
        self.memory.close()
        self.cache.close()
        for memory in self.other_memories:
            memory.close()
        assert self.cache.statistics().registered_bytes == 0
        assert "verbs.region" not in handles.live()


@contextlib.contextmanager
def _use_region_cache(
    call_name: str, handler_name: str, *, is_registered: bool = True, source_path: str = "registration"
) -> Iterator[_InterruptedCall]:
    """Interrupt one method of _CacheCalls by another method.

    `is_registered` is whether the cache has an entry of the memory before the call.
    """
    (opened_nic,) = verbs.open_active_nics(count_max=1)
    with cuda.Device(0) as device, opened_nic as nic, RegionCache([nic], regions_max=2) as cache:
        # CUDA memory does not support a close in a handler that interrupts its own cuMemFree.
        allocator: Allocator = HostAllocator() if call_name == handler_name == "close_memory" else device
        memory, *other_memories = (allocator.allocate(_MEMORY_BYTES) for _ in range(3))
        calls = _CacheCalls(cache, memory, other_memories)
        if handler_name != "end_lease":
            calls.end_lease()
        if is_registered:
            calls.lease()
        yield _InterruptedCall(getattr(calls, call_name), getattr(calls, handler_name), calls.check, source_path)


@contextlib.contextmanager
def _measure_reach(_folder: Path, *, handler_forgets: bool = False) -> Iterator[_InterruptedCall]:
    (opened_nic,) = verbs.open_active_nics(count_max=1)
    with cuda.Device(0) as device, opened_nic as nic:
        table = ReachTable()
        table.forget(device.uuid, [nic])  # The file of the table has the result of the previous point.

        def measure() -> None:
            (reach,) = table.get_results(device, [nic])
            assert reach.moved

        def forget() -> None:
            table.forget(device.uuid, [nic])

        handler = forget if handler_forgets else measure
        # A measurement has thousands of points in other files, which would take too long.
        yield _InterruptedCall(measure, handler, measure, source_path="registration/reach_table.py")


SCENARIOS: dict[str, Callable[[Path], contextlib.AbstractContextManager[_InterruptedCall]]] = {
    "retain": _retain_context,
    "lease": _lease_buffer,
    "lease_and_close": _lease_buffer_and_close_memory,
    "close_memory": _close_memory,
    "use_stream": _use_stream,
    "result": lambda folder: _wait_for_load(folder, lambda load: load.result()),
    "result_and_close": lambda folder: _wait_for_load(folder, lambda load: load.close()),
    "get_tensors": _get_tensors,
    "host_memory": _allocate_host_memory,
    "region_lease": lambda _folder: _use_region_cache("lease", "lease", is_registered=False),
    "region_lease_statistics": lambda _folder: _use_region_cache("lease", "statistics", is_registered=False),
    "region_lease_others": lambda _folder: _use_region_cache("lease", "lease_others", is_registered=False),
    "region_lease_end": lambda _folder: _use_region_cache("lease", "end_lease", is_registered=False),
    "region_lease_close_memory": lambda _folder: _use_region_cache("lease", "close_memory", is_registered=False),
    "region_hit": lambda _folder: _use_region_cache("lease", "lease"),
    "region_hit_invalidate": lambda _folder: _use_region_cache("lease", "invalidate"),
    "region_evict": lambda _folder: _use_region_cache("lease_others", "lease"),
    "region_close_memory": lambda _folder: _use_region_cache("close_memory", "close_memory"),
    "region_close_memory_lease": lambda _folder: _use_region_cache("close_memory", "lease"),
    "region_close": lambda _folder: _use_region_cache("close_cache", "close_cache"),
    "region_close_end": lambda _folder: _use_region_cache("close_cache", "end_lease"),
    # An interrupt between the end of lease() and the `with` block would leave the lease open. So the handler runs only
    # in registration/_*.py, not in cache.py and lease.py.
    "region_lease_interrupt": lambda _folder: _use_region_cache(
        "lease", "interrupt", is_registered=False, source_path="registration/_"
    ),
    "region_evict_interrupt": lambda _folder: _use_region_cache(
        "lease_others", "interrupt", source_path="registration/_"
    ),
    "region_invalidate_interrupt": lambda _folder: _use_region_cache("invalidate", "interrupt"),
    # After an interrupt in ibv_dereg_mr, the next call must not deregister the region again.
    "region_deregister_interrupt": lambda _folder: _use_region_cache(
        "invalidate", "interrupt", source_path="verbs/_pyverbs.py"
    ),
    "region_close_memory_interrupt": lambda _folder: _use_region_cache("close_memory", "interrupt"),
    "region_close_interrupt": lambda _folder: _use_region_cache("close_cache", "interrupt"),
    "reach": _measure_reach,
    "reach_forget": lambda folder: _measure_reach(folder, handler_forgets=True),
    "memory_pool": _allocate_from_memory_pool,
    "buffer_pool": _allocate_from_buffer_pool,
}


def _raise_unexpected(errors: list[GdrkitError]) -> None:
    """Raise the first error whose reason is not allowed."""
    for error in errors:
        if error.reason not in _ALLOWED_REASONS:
            raise error


def _run_handler_at(interrupted_call: _InterruptedCall, point: int) -> str:
    """Run the handler at a point of the call. Return the point's source line, or "" if the call has fewer points."""
    errors: list[GdrkitError] = []

    def handle() -> None:
        try:
            interrupted_call.handler()
        except GdrkitError as handler_error:
            errors.append(handler_error)

    source_path = Path(gdrkit.__file__).parent / interrupted_call.source_path
    interrupter = Interrupter(point, str(source_path), handler=handle)
    try:
        interrupter.call(interrupted_call.call)
    except GdrkitError as call_error:
        errors.append(call_error)
    _raise_unexpected(errors)
    interrupted_call.check()
    return interrupter.interrupted_at


def _sweep(scenario: str, folder: Path) -> int:
    """Run the handler at each point of the call. Return the number of points."""
    for point in itertools.count(1):
        faulthandler.dump_traceback_later(_TIMEOUT_S, exit=True)
        source_line = ""
        try:
            with SCENARIOS[scenario](folder) as interrupted_call:
                source_line = _run_handler_at(interrupted_call, point)
        except BaseException as error:
            error.add_note(f"the handler ran at point {point}: {source_line}")
            raise
        faulthandler.cancel_dump_traceback_later()
        if not source_line:
            return point - 1
    raise AssertionError


def main() -> None:
    """Sweep the scenario that the arguments name."""
    warnings.simplefilter("error")  # An object that is not closed causes a warning.
    sys.stdout.write(f"{_sweep(sys.argv[1], Path(sys.argv[2]))} points\n")


if __name__ == "__main__":
    main()
