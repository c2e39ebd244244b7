"""Experiments on this machine, for properties that no file states.

The module runs as ``python -m gdrkit.inventory.experiments NAME DESCRIPTOR`` in a child process with a time limit. An
experiment allocates a little memory, registers it, transfers bytes over each NIC in loopback, and releases everything.
Its result is its observations, in words. The rules of the doctor decide what these mean.
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

__all__ = ["EXPERIMENTS", "main"]

_TRANSFER_BYTES = 64 * KIB
_COPY_BYTES = 64 * MIB
_ROUNDS = 50
_COPIES_MIN = 20
_SEED = 0x6D6F76
_COMPLETION_TIMEOUT_MS = 2000.0
_COPY_TIMEOUT_S = 10.0
_PCI = "/sys/bus/pci/devices"


class _Loopback:
    """A loopback: two queue pairs of one NIC, connected to each other, and registered host memory."""

    def __init__(self, nic: Nic) -> None:
        self._stack = ExitStack()
        with ExitStack() as stack:
            pairs = []
            for _ in range(2):
                queue = stack.enter_context(nic.completion_queue(depth=16))
                pairs.append(stack.enter_context(nic.queue_pair(queue)))
            requester, responder = pairs
            requester.connect(responder.endpoint())
            responder.connect(requester.endpoint())
            self._pair: QueuePair = requester
            self.data = bytearray(_TRANSFER_BYTES)
            self._region = stack.enter_context(nic.register_host(self.data))
            self._stack = stack.pop_all()

    def write(self, remote: RemoteRange) -> Completion:
        """Write :attr:`data` to `remote` and return the completion."""
        self._pair.post_write(self._region, remote, work_id=1)
        return self._pair.wait(_COMPLETION_TIMEOUT_MS)

    def read(self, remote: RemoteRange) -> Completion:
        """Read from `remote` into :attr:`data` and return the completion."""
        self._pair.post_read(self._region, remote, work_id=2)
        return self._pair.wait(_COMPLETION_TIMEOUT_MS)

    def fill(self, seed: int) -> None:
        """Fill :attr:`data` with the pattern of `seed`."""
        memoryview(self.data)[:] = pattern.payload(_TRANSFER_BYTES, seed=seed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _p2p() -> dict[str, str]:
    """Write to and read from the memory of each CUDA device by each active NIC, and return the result of each."""
    from gdrkit import cuda, registration

    observations: dict[str, str] = {}
    for nic_name, port in _active_nics():
        for index in range(cuda.device_count()):
            with ExitStack() as stack:
                nic, device = _open(stack, nic_name, port, index)
                memory = stack.enter_context(device.allocate(_TRANSFER_BYTES))
                registered = stack.enter_context(registration.register(memory, [nic]))
                loop = stack.enter_context(_Loopback(nic))
                name = f"GPU {index} and {nic_name}"
                loop.fill(_SEED)
                status = loop.write(registered.remote(nic)).status.name
                observations[f"RDMA WRITE into {name}"] = _result(status, memory.read(), _SEED)
                if status != "SUCCESS":
                    # The queue pair is in the error state, so the read needs a new one.
                    loop = stack.enter_context(_Loopback(nic))
                memory.write(pattern.payload(_TRANSFER_BYTES, seed=_SEED + 1))
                status = loop.read(registered.remote(nic)).status.name
                observations[f"RDMA READ from {name}"] = _result(status, bytes(loop.data), _SEED + 1)
    return observations


def _result(status: str, data: bytes, seed: int) -> str:
    """Return the status of a completion, or the mismatch if it is SUCCESS and the data is not that of `seed`."""
    if status != "SUCCESS":
        return status
    try:
        pattern.check(data, seed=seed)
    except DataMismatch as error:
        return str(error)
    return status


def _stale_key() -> dict[str, str]:
    """Write with the rkey of freed memory, and return whether the write reached the next owner of the address.

    The result also says whether the driver's buffer id distinguishes the freed memory from its successor.
    """
    from gdrkit import cuda, registration

    nics = _active_nics()
    with ExitStack() as stack:
        nic, device = _open(stack, *nics[0], 0)
        first = stack.enter_context(device.allocate(2 * MIB))
        # The owner does not know about a registration of a borrowed view, so its free does not deregister.
        view = stack.enter_context(cuda.borrow(device, first.address, length_bytes=first.length_bytes))
        registered: Registration = stack.enter_context(registration.register(view, [nic]))
        remote = registered.remote(nic, length_bytes=_TRANSFER_BYTES)
        old_id, address = first.buffer_id(), first.address
        first.close()
        successor = stack.enter_context(device.allocate(2 * MIB))
        successor.fill(0x5A)
        is_same_address = successor.address == address
        new_id = successor.buffer_id()
        loop = stack.enter_context(_Loopback(nic))
        loop.fill(_SEED)
        status = loop.write(remote).status.name
        reached = successor.read(length_bytes=_TRANSFER_BYTES) != b"\x5a" * _TRANSFER_BYTES
        registered.close()
    return {
        "the address came back": "yes" if is_same_address else "no",
        "buffer id": "the same" if is_same_address and new_id == old_id else f"{old_id}, then {new_id}",
        "a write by the old key": status,
        "the new owner was reached by the old key": "yes" if reached else "no",
    }


def _flush() -> dict[str, str]:
    """Count how often a copy by a device, after completion and flush, does not see the bytes that a NIC wrote."""
    from gdrkit import cuda, registration

    observations: dict[str, str] = {}
    nics = _active_nics()
    for index in range(cuda.device_count()):
        with ExitStack() as stack:
            nic, device = _open(stack, *nics[0], index)
            ordering = registration.Ordering.of(device)
            memory, copy = stack.enter_context(device.allocate(_TRANSFER_BYTES)), bytearray(_TRANSFER_BYTES)
            registered = stack.enter_context(registration.register(memory, [nic]))
            loop, stream = stack.enter_context(_Loopback(nic)), stack.enter_context(device.stream())
            observations[f"writes of NICs are visible to GPU {index}"] = (
                "without a flush" if not ordering.needs_flush else "after one"
            )
            stale_count = 0
            for turn in range(_ROUNDS):
                loop.fill(_SEED + turn)
                loop.write(registered.remote(nic)).expect()
                # If the device offers a flush, the call must work, whether a flush is needed or not.
                if ordering.flush_options & registration.FlushOption.HOST:
                    device.flush_remote_writes()
                stream.read_into(memory, copy)
                stream.synchronize()
                stale_count += copy != loop.data
            observations[f"old data on GPU {index} in {_ROUNDS} rounds"] = str(stale_count)
    return observations


def _load() -> dict[str, str]:
    """Return the trained speed of each PCIe link above each device while copies run."""
    from gdrkit import cuda, host

    tree, observations = host.HostTree(), {}
    for index in range(cuda.device_count()):
        with cuda.Device(index) as device, device.allocate(_COPY_BYTES) as memory:
            done = threading.Event()
            data, copies = bytes(_COPY_BYTES), [0]

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
                    observations[part] = tree.text(f"{_PCI}/{part}/current_link_speed") or "unknown"
            finally:
                done.set()
                join_threads([worker], timeout_s=_COPY_TIMEOUT_S)
    return observations


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
        memory = stack.enter_context(device.allocate(_TRANSFER_BYTES))
        driver = stack.enter_context(cufile.Driver(timeout_s=None))
        # The parent process chooses the folder of temporary files (TMPDIR) and removes it.
        path = Path(tempfile.mkdtemp(), "data")
        path.write_bytes(pattern.payload(_TRANSFER_BYTES, seed=_SEED))
        data = stack.enter_context(path.open("rb"))
        file = stack.enter_context(cufile.FileHandle(driver, data.fileno()))
        count = driver.properties().max_batch_io
        batch = stack.enter_context(cufile.IoBatch(driver, count))
        batch.submit([cufile.BatchRequest(cufile.Opcode.READ, file, cufile.BufferRange(memory))] * count)
        ended = Counter(event.status.name for event in batch.status(count_min=count))
    return {
        f"{count} reads of {_TRANSFER_BYTES} bytes in one batch": ", ".join(f"{n} {name}" for name, n in ended.items())
    }


def _active_nics() -> list[tuple[str, int]]:
    from gdrkit import verbs

    nics = [(info.name, info.active_port) for info in verbs.list_nics() if info.active_port is not None]
    if not nics:
        message = "no NIC has an active port"
        raise UsageError(message)
    return nics


def _open(stack: ExitStack, nic_name: str, port: int, index: int) -> tuple[Nic, Device]:
    from gdrkit import cuda, verbs

    nic = stack.enter_context(verbs.Nic.open(nic_name, port=port))
    return nic, stack.enter_context(cuda.Device(index))


EXPERIMENTS: dict[str, Callable[[], dict[str, str]]] = {
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
    if name not in EXPERIMENTS:
        message = f"the experiment must be one of {', '.join(EXPERIMENTS)}, not {name!r}"
        raise UsageError(message)
    result: dict[str, serialization.Json]
    try:
        result = {"facts": serialization.to_json_data(EXPERIMENTS[name]())}
    except GdrkitError as error:
        result = {"failure": serialization.to_json_data(ApiFailure.of(error, api=name, operation=name))}
    with os.fdopen(int(descriptor), "w", encoding="utf-8") as file:
        json.dump(result, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
