"""Experiments on this machine, for properties that no file states.

The module runs as ``python -m gdrkit.inventory.act NAME DESCRIPTOR`` in a child process with a time limit. An
experiment allocates a little memory, registers it, moves bytes over each NIC in loopback, and releases everything. Its
result is what it observed, in words. The rules decide what that means.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

from gdrkit import pattern, serialization
from gdrkit.children import join_threads
from gdrkit.errors import DataMismatch, GdrkitError, UsageError
from gdrkit.inventory.facts import ApiFailure
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdrkit.cuda import Device
    from gdrkit.registration import Registration
    from gdrkit.verbs import Completion, Nic, QueuePair, RemoteRange

__all__ = ["ACTS", "main"]

_MOVED_BYTES = 64 * KIB
_COPIED_BYTES = 64 * MIB
_ROUNDS = 50
_COPIES_MIN = 20
_SEED = 0x6D6F76
_WAIT_MS = 2000.0
_COPY_TIMEOUT_S = 10.0
_PCI = "/sys/bus/pci/devices"


class _Loop:
    """A loopback: two queue pairs of one NIC, connected to each other, and registered host memory."""

    def __init__(self, nic: Nic) -> None:
        self._stack = ExitStack()
        with ExitStack() as stack:
            pairs = []
            for _ in range(2):
                queue = stack.enter_context(nic.completion_queue(depth=16))
                pairs.append(stack.enter_context(nic.queue_pair(queue)))
            ours, theirs = pairs
            ours.connect(theirs.endpoint())
            theirs.connect(ours.endpoint())
            self._pair: QueuePair = ours
            self.data = bytearray(_MOVED_BYTES)
            self._region = stack.enter_context(nic.register_host(self.data))
            self._stack = stack.pop_all()

    def write(self, remote: RemoteRange) -> Completion:
        """Write :attr:`data` to `remote` and return the completion."""
        self._pair.post_write(self._region, remote, work_id=1)
        return self._pair.wait(_WAIT_MS)

    def read(self, remote: RemoteRange) -> Completion:
        """Read from `remote` into :attr:`data` and return the completion."""
        self._pair.post_read(self._region, remote, work_id=2)
        return self._pair.wait(_WAIT_MS)

    def fill(self, seed: int) -> None:
        """Fill :attr:`data` with the pattern of `seed`."""
        memoryview(self.data)[:] = pattern.payload(_MOVED_BYTES, seed=seed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _p2p() -> dict[str, str]:
    """Write into and read from memory of each CUDA device by each active NIC, and return the result of each."""
    from gdrkit import cuda, registration

    seen: dict[str, str] = {}
    for nic_name, port in _active_nics():
        for index in range(cuda.device_count()):
            with ExitStack() as stack:
                nic, device = _opened(stack, nic_name, port, index)
                memory = stack.enter_context(device.allocate(_MOVED_BYTES))
                made = stack.enter_context(registration.register(memory, [nic]))
                loop = stack.enter_context(_Loop(nic))
                name = f"GPU {index} and {nic_name}"
                loop.fill(_SEED)
                status = loop.write(made.remote(nic)).status.name
                seen[f"RDMA WRITE into {name}"] = _checked(status, memory.read(), _SEED)
                if status != "SUCCESS":
                    # The queue pair is in the error state, so the read needs a new one.
                    loop = stack.enter_context(_Loop(nic))
                memory.write(pattern.payload(_MOVED_BYTES, seed=_SEED + 1))
                status = loop.read(made.remote(nic)).status.name
                seen[f"RDMA READ from {name}"] = _checked(status, bytes(loop.data), _SEED + 1)
    return seen


def _checked(status: str, data: bytes, seed: int) -> str:
    if status != "SUCCESS":
        return status
    try:
        pattern.check(data, seed=seed)
    except DataMismatch as error:
        return str(error)
    return status


def _stale_key() -> dict[str, str]:
    """Write by the key of freed memory, and return whether the write reached the next owner of the address.

    The result also says whether the driver's buffer id distinguishes the freed memory from its successor.
    """
    from gdrkit import cuda, registration

    nics = _active_nics()
    with ExitStack() as stack:
        nic, device = _opened(stack, *nics[0], 0)
        first = stack.enter_context(device.allocate(2 * MIB))
        # The owner does not know about a registration of a borrowed view, so its free does not deregister.
        view = stack.enter_context(cuda.borrow(device, first.address, length_bytes=first.length_bytes))
        made: Registration = stack.enter_context(registration.register(view, [nic]))
        remote = made.remote(nic, length_bytes=_MOVED_BYTES)
        old_id, address = first.buffer_id(), first.address
        first.close()
        successor = stack.enter_context(device.allocate(2 * MIB))
        successor.fill(0x5A)
        came_back = successor.address == address
        new_id = successor.buffer_id()
        loop = stack.enter_context(_Loop(nic))
        loop.fill(_SEED)
        status = loop.write(remote).status.name
        reached = successor.read(length_bytes=_MOVED_BYTES) != b"\x5a" * _MOVED_BYTES
        made.close()
    return {
        "the address came back": "yes" if came_back else "no",
        "buffer id": "the same" if came_back and new_id == old_id else f"{old_id}, then {new_id}",
        "a write by the old key": status,
        "the new owner was reached by the old key": "yes" if reached else "no",
    }


def _flush() -> dict[str, str]:
    """Count how often a copy by a device, after completion and flush, does not see the bytes that a NIC wrote."""
    from gdrkit import cuda, registration

    seen: dict[str, str] = {}
    nics = _active_nics()
    for index in range(cuda.device_count()):
        with ExitStack() as stack:
            nic, device = _opened(stack, *nics[0], index)
            ordering = registration.Ordering.of(device)
            memory, copy = stack.enter_context(device.allocate(_MOVED_BYTES)), bytearray(_MOVED_BYTES)
            made = stack.enter_context(registration.register(memory, [nic]))
            loop, stream = stack.enter_context(_Loop(nic)), stack.enter_context(device.stream())
            seen[f"writes of NICs are visible to GPU {index}"] = (
                "without a flush" if not ordering.needs_flush else "after one"
            )
            old = 0
            for turn in range(_ROUNDS):
                loop.fill(_SEED + turn)
                loop.write(made.remote(nic)).expect()
                # If the device offers a flush, the call must work, whether a flush is needed or not.
                if ordering.flush_options & registration.FlushOption.HOST:
                    device.flush_remote_writes()
                stream.read_into(memory, copy)
                stream.synchronize()
                old += copy != loop.data
            seen[f"old data on GPU {index} in {_ROUNDS} rounds"] = str(old)
    return seen


def _load() -> dict[str, str]:
    """Return the trained speed of each PCIe link above each device while copies run."""
    from gdrkit import cuda, host

    tree, seen = host.HostTree(), {}
    for index in range(cuda.device_count()):
        with cuda.Device(index) as device, device.allocate(_COPIED_BYTES) as memory:
            done = threading.Event()
            data, copies = bytes(_COPIED_BYTES), [0]

            def copy(
                memory: object = memory, data: bytes = data, done: threading.Event = done, copies: list[int] = copies
            ) -> None:
                while not done.is_set():
                    memory.write(data)  # type: ignore[attr-defined]
                    copies[0] += 1

            for _ in range(_COPIES_MIN):
                memory.write(data)
            worker = threading.Thread(target=copy, name=f"copies to GPU {index}", daemon=True)
            worker.start()
            try:
                for part in host.pci_path(tree, device.pci_bus_id.lower())[1:]:
                    seen[part] = tree.text(f"{_PCI}/{part}/current_link_speed") or "not said"
            finally:
                done.set()
                join_threads([worker], timeout_s=_COPY_TIMEOUT_S)
    return seen


def _driver_open() -> dict[str, str]:
    """Open and close the driver of cuFile."""
    from gdrkit import cufile

    # The parent process has the time limit, and kills this process if the call hangs.
    with cufile.Driver(timeout_s=None):
        major, minor = cufile.library_version()
    return {f"cuFileDriverOpen of cuFile {major}.{minor}": "opened"}


def _pool() -> dict[str, str]:
    """Submit a batch of as many reads as cuFile accepts at once, and count the results.

    Each of the reads may need a bounce buffer.
    """
    from gdrkit import cuda, cufile

    with ExitStack() as stack:
        device = stack.enter_context(cuda.Device(0))
        memory = stack.enter_context(device.allocate(_MOVED_BYTES))
        driver = stack.enter_context(cufile.Driver(timeout_s=None))
        # The parent process chooses the folder of temporary files (TMPDIR) and removes it.
        path = Path(tempfile.mkdtemp(), "data")
        path.write_bytes(pattern.payload(_MOVED_BYTES, seed=_SEED))
        data = stack.enter_context(path.open("rb"))
        file = stack.enter_context(cufile.FileHandle(driver, data.fileno()))
        count = driver.properties().max_batch_io
        batch = stack.enter_context(cufile.IoBatch(driver, count))
        batch.submit([cufile.BatchRequest(cufile.Opcode.READ, file, cufile.BufferRange(memory))] * count)
        ended = Counter(event.status.name for event in batch.status(count_min=count))
    return {
        f"{count} reads of {_MOVED_BYTES} bytes in one batch": ", ".join(f"{n} {name}" for name, n in ended.items())
    }


def _active_nics() -> list[tuple[str, int]]:
    from gdrkit import verbs

    found = [(info.name, info.active_port) for info in verbs.list_nics() if info.active_port is not None]
    if not found:
        message = "no NIC has an active port"
        raise UsageError(message)
    return found


def _opened(stack: ExitStack, nic_name: str, port: int, index: int) -> tuple[Nic, Device]:
    from gdrkit import cuda, verbs

    nic = stack.enter_context(verbs.Nic.open(nic_name, port=port))
    return nic, stack.enter_context(cuda.Device(index))


ACTS: dict[str, Callable[[], dict[str, str]]] = {
    "p2p": _p2p,
    "stale_key": _stale_key,
    "flush": _flush,
    "load": _load,
    "driver_open": _driver_open,
    "pool": _pool,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the experiment NAME and write the result or the failure as one JSON object to DESCRIPTOR.

    The arguments are ``NAME DESCRIPTOR``.

    Raises
    ------
    UsageError
        There is no experiment of that name.
    """
    name, descriptor = sys.argv[1:] if arguments is None else arguments
    if name not in ACTS:
        message = f"no act {name!r}"
        raise UsageError(message)
    answer: dict[str, serialization.Json]
    try:
        answer = {"facts": serialization.to_json_data(ACTS[name]())}
    except GdrkitError as error:
        answer = {"failure": serialization.to_json_data(ApiFailure.of(error, api=name, operation=name))}
    with os.fdopen(int(descriptor), "w", encoding="utf-8") as file:
        json.dump(answer, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
