"""Program of one rank of an NCCL all-reduce over buffers of a gdrkit buffer pool.

:mod:`support.rank_processes` starts one process per rank. The first rank prints the ncclUniqueId of the communicator,
and the other ranks read it from standard input. The last line that a rank prints is a JSON object with its
measurements.

A rank prints a line to standard error before each step, and its stack on SIGABRT. So a log shows where a rank hangs.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import json
import os
import resource
import sys
import time
from typing import TYPE_CHECKING

from support.rates import cpu_time_s

from gdrkit import evidence, nccl, pattern
from gdrkit.cuda import Device, VmmMemory
from gdrkit.registration import BufferPool
from gdrkit.verbs import open_active_nics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gdrkit.buffers import DeviceBuffer
    from gdrkit.registration import RdmaBuffer

__all__ = ["Allocator", "main", "order_visible_devices"]


class Allocator:
    """An allocator of one kind of device memory, with the interface of a `Device`."""

    def __init__(self, device: Device, memory_kind: str) -> None:
        self._device = device
        self._memory_kind = memory_kind

    def allocate(self, length_bytes: int) -> DeviceBuffer:
        """Allocate memory: by cuMemAlloc, as one chunk by cuMemCreate, or by ncclMemAlloc."""
        if self._memory_kind == "vmm":
            return VmmMemory.create(self._device, length_bytes)
        if self._memory_kind == "nccl":
            return nccl.NcclMemory(self._device, length_bytes)
        return self._device.allocate(length_bytes)


def main() -> None:
    """Run the rank, and print its measurements."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--memory", choices=["malloc", "vmm", "nccl"], default="vmm")
    parser.add_argument(
        "--registered", action="store_true", help="measure also with buffers that are registered with NCCL"
    )
    parser.add_argument("--length-bytes", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=10, help="number of measured rounds")
    parser.add_argument("--repeats", type=int, default=10, help="number of all-reduces in a round")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    faulthandler.enable()
    # A core dump would be as large as the device memory, and the stack that faulthandler prints is sufficient.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(
        order_visible_devices(os.environ, rank=options.rank, rank_count=options.ranks)
    )
    _print_line(json.dumps(_measure(options)))
    _log_step("end")


def order_visible_devices(environ: Mapping[str, str], *, rank: int, rank_count: int) -> list[str]:
    """Return the devices in CUDA_VISIBLE_DEVICES of a rank: first its own device, then the devices of the other ranks.

    The CUDA runtime, and so NCCL, uses the first device. The other devices stay visible, so that NCCL can use
    peer-to-peer copies.
    """
    device_names = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    device_names = list(map(str, range(rank_count))) if device_names == [""] else device_names
    return [*device_names[rank:], *device_names[:rank]]


def _measure(options: argparse.Namespace) -> dict[str, object]:
    """Measure all-reduces from one buffer of a pool into another buffer, and check the results.

    With `--registered`, each round is made twice: with unregistered buffers, and with buffers registered with NCCL.
    """
    with contextlib.ExitStack() as stack:
        _log_step("open the device")
        device = stack.enter_context(Device(0))
        nics = open_active_nics(count_max=1)
        for nic in nics:
            stack.enter_context(nic)
        pair_names = ["plain", "registered"] if options.registered else ["plain"]
        stream = stack.enter_context(device.stream())
        buffer_pairs: dict[str, tuple[RdmaBuffer, RdmaBuffer]] = {}
        for pair_name in pair_names:
            # Each pair has a pool of its own, because the buffers of a pool share one allocation.
            allocator = Allocator(device, options.memory)
            pool = stack.enter_context(BufferPool(allocator, nics, buffer_bytes=options.length_bytes, count=2))
            source, destination = (stack.enter_context(pool.allocate()) for _ in range(2))
            _fill_buffers(source, destination, options)
            buffer_pairs[pair_name] = (source, destination)
        _log_step("get the id of the communicator")
        unique_id = _exchange_unique_id(rank=options.rank)
        communicator = stack.enter_context(
            nccl.Communicator(device, rank=options.rank, ranks_count=options.ranks, unique_id=unique_id)
        )
        stack.callback(_log_step, "destroy the communicator")
        for buffer in buffer_pairs.get("registered", ()):
            _log_step("register a buffer with NCCL")
            stack.enter_context(communicator.register(buffer))

        def all_reduce_once(pair_name: str) -> None:
            source, destination = buffer_pairs[pair_name]
            communicator.all_reduce(source, destination, data_type=nccl.DataType.INT32, stream=stream)

        for pair_name in pair_names:
            _log_step(f"first all-reduce with {pair_name} buffers")
            all_reduce_once(pair_name)
            stream.synchronize()
        _log_step("measured all-reduces")
        times_s: dict[str, list[float]] = {pair_name: [] for pair_name in pair_names}
        cpu_times_s: dict[str, list[float]] = {pair_name: [] for pair_name in pair_names}
        for _ in range(options.rounds):
            for pair_name in pair_names:
                cpu_before_s = cpu_time_s()
                queue_work = functools.partial(all_reduce_once, pair_name)
                times_s[pair_name].append(_measure_mean_duration_s(queue_work, stream.synchronize, options.repeats))
                cpu_times_s[pair_name].append((cpu_time_s() - cpu_before_s) / options.repeats)
        communicator.check()
        _log_step("check the bytes")
        # Each source had an equal share of the pattern. The bytes after the last share are zeros.
        checked_bytes = options.length_bytes // options.ranks * options.ranks
        for _, destination in buffer_pairs.values():
            pattern.check(destination.read(length_bytes=checked_bytes), seed=options.seed)
        return {
            "times_s": times_s,
            "cpu_s": cpu_times_s,
            "addresses": {pair_name: [buffer.address for buffer in pair] for pair_name, pair in buffer_pairs.items()},
            "version": ".".join(map(str, nccl.library_version())),
            "libraries": _find_nccl_library(),
        }


def _find_nccl_library() -> dict[str, str | None]:
    """Return the build id of the loaded NCCL library, by its SONAME."""
    libraries = [library for library in evidence.libraries() if (library.soname or "").startswith("libnccl.so")]
    return {library.soname or "": library.build_id for library in libraries}


def _fill_buffers(source: RdmaBuffer, destination: RdmaBuffer, options: argparse.Namespace) -> None:
    """Write a share of the pattern into the source, and zeros elsewhere. The sum over all ranks is the pattern."""
    share_bytes = options.length_bytes // options.ranks
    offset_bytes = options.rank * share_bytes
    for buffer in (source, destination):
        buffer.write(bytes(options.length_bytes))
    source.write(pattern.payload(share_bytes, seed=options.seed, offset_bytes=offset_bytes), offset_bytes=offset_bytes)


def _exchange_unique_id(*, rank: int) -> bytes:
    """Return the ncclUniqueId of the communicator: rank 0 creates and prints it, the other ranks read it."""
    if rank == 0:
        unique_id = nccl.create_unique_id()
        _print_line(unique_id.hex())
    else:
        unique_id = bytes.fromhex(sys.stdin.readline())
    _log_step("connect the ranks")
    return unique_id


def _measure_mean_duration_s(queue_work: Callable[[], object], wait: Callable[[], object], repeats: int) -> float:
    begin_ns = time.perf_counter_ns()
    for _ in range(repeats):
        queue_work()
    wait()
    return (time.perf_counter_ns() - begin_ns) / 1e9 / repeats


def _print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _log_step(step: str) -> None:
    sys.stderr.write(f"[{time.monotonic():.3f}] {step}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
