"""Program of one rank of an NCCL all-reduce over buffers of a gdrkit buffer pool.

:mod:`support.rank_processes` starts one process per rank. The first rank prints the ncclUniqueId of the communicator,
and the other ranks read it from standard input. The last line that a rank prints is a JSON object with its
measurements.

To show where a rank hangs, it prints a line to standard error before each step, and its stack on SIGABRT.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import resource
import sys
import time
from typing import TYPE_CHECKING

from support.nccl import Communicator, Nccl, loaded_library
from support.rates import cpu_time_s

from gdrkit import pattern
from gdrkit.cuda import Device, VmmMemory
from gdrkit.registration import BufferPool
from gdrkit.verbs import open_active_nics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gdrkit.buffers import DeviceBuffer
    from gdrkit.registration import RdmaBuffer

__all__ = ["VmmAllocator", "main", "visible_devices"]


class VmmAllocator:
    """An allocator of memory by CUDA virtual memory management (cuMemCreate), with the interface of a `Device`."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def allocate(self, length_bytes: int) -> DeviceBuffer:
        """Allocate memory that is one physical chunk."""
        return VmmMemory.create(self._device, length_bytes)


def main() -> None:
    """Run the rank, and print its measurements."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--memory", choices=["malloc", "vmm"], default="vmm")
    parser.add_argument("--registered", action="store_true")
    parser.add_argument("--length-bytes", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    faulthandler.enable()
    # A core dump would be as large as the device memory, and the stack that faulthandler prints is sufficient.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible_devices(os.environ, rank=options.rank, ranks=options.ranks))
    _print_line(json.dumps(_measure(options)))
    _log_step("end")


def visible_devices(environ: Mapping[str, str], *, rank: int, ranks: int) -> list[str]:
    """Return the value of CUDA_VISIBLE_DEVICES for a rank: the device of the rank, then the devices of the other ranks.

    The CUDA runtime, and so NCCL, uses the first device. The other devices stay visible, so that NCCL can use
    peer-to-peer copies.
    """
    names = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = list(map(str, range(ranks))) if names == [""] else names
    return [*names[rank:], *names[:rank]]


def _measure(options: argparse.Namespace) -> dict[str, object]:
    """Measure all-reduces from one buffer of a pool into another, and check the result."""
    with contextlib.ExitStack() as stack:
        _log_step("open the device")
        device = stack.enter_context(Device(0))
        nics = open_active_nics(count_max=1)
        for nic in nics:
            stack.enter_context(nic)
        allocator = VmmAllocator(device) if options.memory == "vmm" else device
        pool = stack.enter_context(BufferPool(allocator, nics, buffer_bytes=options.length_bytes, count=2))
        stream = stack.enter_context(device.stream())
        source, target = (stack.enter_context(pool.allocate()) for _ in range(2))
        _fill(source, target, options)
        # NCCL uses the current device.
        stack.enter_context(device.current())
        _log_step("get the id of the communicator")
        nccl = Nccl()
        communicator = Communicator(
            nccl, rank=options.rank, ranks_count=options.ranks, unique_id=_shared_id(nccl, rank=options.rank)
        )
        stack.callback(communicator.close)
        stack.callback(_log_step, "destroy the communicator")
        if options.registered:
            _log_step("register the buffers with NCCL")
            for buffer in (source, target):
                stack.enter_context(communicator.registered(buffer.address, options.length_bytes))

        def reduce_once() -> None:
            communicator.all_reduce(
                source.address, target.address, length_bytes=options.length_bytes, stream=stream.handle
            )

        _log_step("first all-reduce")
        reduce_once()
        stream.synchronize()
        _log_step("measured all-reduces")
        times_s, cpu_times_s = [], []
        for _ in range(options.rounds):
            cpu_before_s = cpu_time_s()
            times_s.append(_mean_duration_s(reduce_once, stream.synchronize, options.repeats))
            cpu_times_s.append((cpu_time_s() - cpu_before_s) / options.repeats)
        _log_step("check the bytes")
        # Each rank wrote an equal share of the pattern. The bytes after the last share are zeros.
        checked_bytes = options.length_bytes // options.ranks * options.ranks
        pattern.check(target.read(length_bytes=checked_bytes), seed=options.seed)
        return {"times_s": times_s, "cpu_s": cpu_times_s, "version": nccl.version, "libraries": loaded_library()}


def _fill(source: RdmaBuffer, target: RdmaBuffer, options: argparse.Namespace) -> None:
    """Write a share of the pattern into the source, and zeros elsewhere. The sum over all ranks is the pattern."""
    share_bytes = options.length_bytes // options.ranks
    offset_bytes = options.rank * share_bytes
    for buffer in (source, target):
        buffer.write(bytes(options.length_bytes))
    source.write(pattern.payload(share_bytes, seed=options.seed, offset_bytes=offset_bytes), offset_bytes=offset_bytes)


def _shared_id(nccl: Nccl, *, rank: int) -> bytes:
    """Return the ncclUniqueId of the communicator: rank 0 creates and prints it, the other ranks read it."""
    if rank == 0:
        unique_id = nccl.unique_id()
        _print_line(unique_id.hex())
    else:
        unique_id = bytes.fromhex(sys.stdin.readline())
    _log_step("connect the ranks")
    return unique_id


def _mean_duration_s(work: Callable[[], object], wait: Callable[[], object], repeats: int) -> float:
    begin_ns = time.perf_counter_ns()
    for _ in range(repeats):
        work()
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
