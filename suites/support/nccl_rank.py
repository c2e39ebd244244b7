"""One rank of an all-reduce over buffers of a pool, as a program.

The first rank prints the id by which the ranks find each other, and the others read it. The last line that each prints
is a JSON object of what it measured. What it is about to do it says on its standard error, so that one that hangs tells
where; SIGABRT has it print its stack.
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

from gdrkit import pattern
from gdrkit.cuda import Device, VmmMemory
from gdrkit.registration import BufferPool
from gdrkit.verbs import open_active_nics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gdrkit.buffers import DeviceBuffer
    from gdrkit.registration import RdmaBuffer

__all__ = ["VmmAllocator", "main", "own_first"]


class VmmAllocator:
    """Gives memory of the driver's virtual memory management, as a device gives that of cuMemAlloc."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def allocate(self, length_bytes: int) -> DeviceBuffer:
        """In one chunk."""
        return VmmMemory.create(self._device, length_bytes)


def main() -> None:
    """Print what was measured."""
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
    # Its stack is enough; an image of a process with a device is as large as that.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own_first(os.environ, rank=options.rank, ranks=options.ranks))
    _tell(json.dumps(_measure(options)))
    _doing("the end")


def own_first(environ: Mapping[str, str], *, rank: int, ranks: int) -> list[str]:
    """What CUDA_VISIBLE_DEVICES is to be for this rank: its own device is the first, and the others are seen as well.

    So it is the current one for whoever asks the runtime, as NCCL does, and still a peer of the others.
    """
    names = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = list(map(str, range(ranks))) if names == [""] else names
    return [*names[rank:], *names[:rank]]


def _measure(options: argparse.Namespace) -> dict[str, object]:
    """Of all-reduces between two buffers of a pool, registered with NCCL or not."""
    with contextlib.ExitStack() as stack:
        _doing("the device")
        device = stack.enter_context(Device(0))
        nics = open_active_nics(count_max=1)
        for nic in nics:
            stack.enter_context(nic)
        allocator = VmmAllocator(device) if options.memory == "vmm" else device
        pool = stack.enter_context(BufferPool(allocator, nics, buffer_bytes=options.length_bytes, count=2))
        stream = stack.enter_context(device.stream())
        source, target = (stack.enter_context(pool.allocate()) for _ in range(2))
        _fill(source, target, options)
        # NCCL takes the device that is current.
        stack.enter_context(device.current())
        _doing("the id of the communicator")
        nccl = Nccl()
        communicator = Communicator(
            nccl, rank=options.rank, ranks_count=options.ranks, unique_id=_shared_id(nccl, rank=options.rank)
        )
        stack.callback(communicator.close)
        stack.callback(_doing, "destroying the communicator")
        if options.registered:
            _doing("registering with NCCL")
            for buffer in (source, target):
                stack.enter_context(communicator.registered(buffer.address, options.length_bytes))

        def reduce_once() -> None:
            communicator.all_reduce(
                source.address, target.address, length_bytes=options.length_bytes, stream=stream.handle
            )

        _doing("the first all-reduce")
        reduce_once()
        stream.synchronize()
        _doing("more of them")
        times_s = [_timed(reduce_once, stream.synchronize, options.repeats) for _ in range(options.rounds)]
        _doing("checking the bytes")
        whole_bytes = options.length_bytes // options.ranks * options.ranks
        pattern.check(target.read(length_bytes=whole_bytes), seed=options.seed)
        return {"times_s": times_s, "version": nccl.version, "libraries": loaded_library()}


def _fill(source: RdmaBuffer, target: RdmaBuffer, options: argparse.Namespace) -> None:
    """A part of the whole that is this rank's, and zeros elsewhere: the sum is the whole, if all took part."""
    share_bytes = options.length_bytes // options.ranks
    offset_bytes = options.rank * share_bytes
    for buffer in (source, target):
        buffer.write(bytes(options.length_bytes))
    source.write(pattern.payload(share_bytes, seed=options.seed, offset_bytes=offset_bytes), offset_bytes=offset_bytes)


def _shared_id(nccl: Nccl, *, rank: int) -> bytes:
    if rank == 0:
        made = nccl.unique_id()
        _tell(made.hex())
    else:
        made = bytes.fromhex(sys.stdin.readline())
    _doing("bringing the ranks together")
    return made


def _timed(work: Callable[[], object], wait: Callable[[], object], repeats: int) -> float:
    begin_ns = time.perf_counter_ns()
    for _ in range(repeats):
        work()
    wait()
    return (time.perf_counter_ns() - begin_ns) / 1e9 / repeats


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _doing(what: str) -> None:
    sys.stderr.write(f"[{time.monotonic():.3f}] {what}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
