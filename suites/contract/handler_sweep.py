"""A program that runs a signal handler at every point of a call that takes a lock, for test_signal_handlers.py.

``python -m contract.handler_sweep SCENARIO FOLDER`` prints ``POINTS points`` if the call and the handler have ended at
every point, and nothing was left open. FOLDER has the file ``model.safetensors`` with the tensor ``a``.
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
from gdrkit.errors import GdrkitError, Reason
from gdrkit.host import HostAllocator, HostMemory
from gdrkit.registration import BufferPool, MemoryPool
from gdrkit.units import GPU_RDMA_PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["SCENARIOS", "main"]

# A call that does not end in this time has stopped for ever.
_TIMEOUT_S = 30.0
_LENGTH_BYTES = 4096
# The errors that a call or a handler may raise, because the other one has closed what it uses.
_ALLOWED = frozenset({Reason.CLOSED, Reason.BUSY, Reason.CANCELLED})


class _Round(NamedTuple):
    """A call, the handler that interrupts it, and a check after both."""

    call: Callable[[], object]
    handler: Callable[[], object]
    check: Callable[[], object] = lambda: None


@contextlib.contextmanager
def _retain(_folder: Path) -> Iterator[_Round]:
    with cuda.Device(0) as device:
        yield _Round(device.context_handle, device.context_handle)
    assert not any(kind.startswith("cuda") for kind in handles.live())


@contextlib.contextmanager
def _lease(_folder: Path, *, closes: bool = False) -> Iterator[_Round]:
    with cuda.Device(0) as device, cufile.Driver() as driver, device.allocate(_LENGTH_BYTES) as memory:
        cache = cufile.BufferCache(driver)

        def lease() -> None:
            with cache.lease(memory):
                assert cache.registered_bytes in (0, _LENGTH_BYTES)

        yield _Round(lease, memory.close if closes else lease)
        memory.close()
        assert cache.registered_bytes == 0
        assert "cufile.buffer" not in handles.live()


def _lease_and_close(folder: Path) -> contextlib.AbstractContextManager[_Round]:
    return _lease(folder, closes=True)


@contextlib.contextmanager
def _close_memory(_folder: Path) -> Iterator[_Round]:
    with cuda.Device(0) as device, cufile.Driver() as driver, device.allocate(_LENGTH_BYTES) as memory:
        cache = cufile.BufferCache(driver)
        with cache.lease(memory):
            pass

        def lease() -> None:
            with cache.lease(memory):
                pass

        yield _Round(memory.close, lease)
        memory.close()
        assert cache.registered_bytes == 0
        assert "cufile.buffer" not in handles.live()


@contextlib.contextmanager
def _use_stream(_folder: Path) -> Iterator[_Round]:
    with cuda.Device(0) as device, cufile.Driver() as driver, device.allocate(_LENGTH_BYTES) as memory:
        stream, other_stream = device.stream(), device.stream()
        with cufile.RegisteredBuffer(driver, memory) as buffer:

            def use(used_stream: cuda.Stream) -> None:
                with buffer.use_stream(used_stream, "read"):
                    pass

            yield _Round(lambda: use(stream), lambda: use(other_stream))


@contextlib.contextmanager
def _load(folder: Path, handler: Callable[[safetensors.ModelLoad], object]) -> Iterator[_Round]:
    with safetensors.start_load_files([folder / "model.safetensors"], framework="dlpack") as load:
        results: list[safetensors.LoadedTensors] = []

        def check() -> None:
            if results:
                assert load.result() is results[0]
                assert list(results[0]) == ["a"]
            else:
                load.close()

        yield _Round(lambda: results.append(load.result()), lambda: handler(load), check)


@contextlib.contextmanager
def _open(folder: Path) -> Iterator[_Round]:
    with safetensors.safe_open(folder / "model.safetensors", "dlpack") as file:
        results = []
        yield _Round(lambda: results.append(file.get_tensors()), file.get_tensors)
        assert file.get_tensors() is results[0]


@contextlib.contextmanager
def _host_memory(_folder: Path) -> Iterator[_Round]:
    yield _Round(lambda: HostMemory(_LENGTH_BYTES).close(), lambda: HostMemory(_LENGTH_BYTES).close())


@contextlib.contextmanager
def _memory_pool(_folder: Path) -> Iterator[_Round]:
    with MemoryPool(HostAllocator(), idle_bytes_max=4 * GPU_RDMA_PAGE_BYTES) as pool:
        pool.allocate(_LENGTH_BYTES).close()

        def use() -> None:
            with pool.allocate(_LENGTH_BYTES), pool.allocate(_LENGTH_BYTES):
                assert pool.statistics().in_use_blocks >= 2

        yield _Round(use, use)
        assert pool.statistics().in_use_blocks == 0


@contextlib.contextmanager
def _buffer_pool(_folder: Path) -> Iterator[_Round]:
    (opened_nic,) = verbs.open_active_nics(count_max=1)
    with opened_nic as nic, BufferPool(HostAllocator(), [nic], buffer_bytes=64, count=2) as pool:

        def use() -> None:
            with pool.allocate() as buffer:
                buffer.write(b"data")
                assert pool.statistics().free <= 1

        yield _Round(use, use)
        assert pool.statistics().free == 2


SCENARIOS: dict[str, Callable[[Path], contextlib.AbstractContextManager[_Round]]] = {
    "retain": _retain,
    "lease": _lease,
    "lease_and_close": _lease_and_close,
    "close_memory": _close_memory,
    "use_stream": _use_stream,
    "result": lambda folder: _load(folder, lambda load: load.result()),
    "result_and_close": lambda folder: _load(folder, lambda load: load.close()),
    "get_tensors": _open,
    "host_memory": _host_memory,
    "memory_pool": _memory_pool,
    "buffer_pool": _buffer_pool,
}


def _raise_unexpected(errors: list[GdrkitError]) -> None:
    for error in errors:
        if error.reason not in _ALLOWED:
            raise error


def _run(one: _Round, point: int) -> str:
    """Run the handler at one point of the call. Return where that was."""
    errors: list[GdrkitError] = []

    def handle() -> None:
        try:
            one.handler()
        except GdrkitError as handler_error:
            errors.append(handler_error)

    interrupter = Interrupter(point, str(Path(gdrkit.__file__).parent), handler=handle)
    try:
        interrupter.call(one.call)
    except GdrkitError as call_error:
        errors.append(call_error)
    _raise_unexpected(errors)
    one.check()
    return interrupter.where


def _sweep(scenario: str, folder: Path) -> int:
    """Run the handler at each point of the call. Return the number of points."""
    for point in itertools.count(1):
        faulthandler.dump_traceback_later(_TIMEOUT_S, exit=True)
        where = ""
        try:
            with SCENARIOS[scenario](folder) as one:
                where = _run(one, point)
        except BaseException as error:
            error.add_note(f"the handler ran at point {point}: {where}")
            raise
        faulthandler.cancel_dump_traceback_later()
        if not where:
            return point - 1
    raise AssertionError


def main() -> None:
    """Run the sweep of the arguments."""
    warnings.simplefilter("error")  # An object that a handler makes superfluous is closed, too.
    sys.stdout.write(f"{_sweep(sys.argv[1], Path(sys.argv[2]))} points\n")


if __name__ == "__main__":
    main()
