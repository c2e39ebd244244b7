"""Litmus cases of visibility: a NIC writes to GPU memory, and after its completion the GPU reads the memory.

``python -m rdma.litmus`` runs all of them in a process of its own, for example on GPUs with another write ordering. It
prints, for each case, whether a stream saw the new bytes before and after :meth:`Ordering.make_visible`.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from gdrkit import cuda, pattern, verbs
from gdrkit.registration import Ordering, register
from gdrkit.units import KIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdrkit.cuda import Device, DeviceMemory
    from gdrkit.registration import Registration
    from gdrkit.verbs import Nic, QueuePair, Region

__all__ = ["CASES", "Litmus"]

LENGTH_BYTES, FLAG_BYTES = 64 * KIB, 8
FLAG = b"\x01" * FLAG_BYTES
_TIMEOUT_MS = 10_000.0


class Litmus:
    """Memory of a GPU for data, and separate memory for a flag. Two NICs, or one, can write both. A context manager."""

    def __init__(self, device: Device, nics: tuple[Nic, ...], *, seed: int) -> None:
        self.device, self.first, self.second = device, nics[0], nics[-1]
        self._stack = ExitStack()
        self.data = pattern.payload(LENGTH_BYTES, seed=seed)
        self.memory, self.registration = self._registered(LENGTH_BYTES + FLAG_BYTES)
        self.flag_memory, self.flag_registration = self._registered(FLAG_BYTES)

    def _registered(self, length_bytes: int) -> tuple[DeviceMemory, Registration]:
        memory = self._stack.enter_context(self.device.allocate(length_bytes))
        memory.fill(0)
        nics = dict.fromkeys([self.first, self.second])
        return memory, self._stack.enter_context(register(memory, list(nics)))

    def pair(self, nic: Nic) -> tuple[QueuePair, QueuePair]:
        """Return two connected queue pairs of a NIC."""
        pairs = [
            self._stack.enter_context(nic.queue_pair(self._stack.enter_context(nic.completion_queue())))
            for _ in range(2)
        ]
        pairs[0].connect(pairs[1].endpoint())
        pairs[1].connect(pairs[0].endpoint())
        return pairs[0], pairs[1]

    def host_region(self, nic: Nic, data: bytes) -> Region:
        """Return registered host memory with these bytes."""
        return self._stack.enter_context(nic.register_host(bytearray(data)))

    def write(self, nic: Nic, data: bytes, registration: Registration, offset_bytes: int) -> None:
        """Write bytes by RDMA WRITE, and wait for the completion."""
        remote = registration.remote(nic, offset_bytes=offset_bytes, length_bytes=len(data))
        requester, _ = self.pair(nic)
        requester.post_write(self.host_region(nic, data), remote, work_id=1)
        requester.wait(_TIMEOUT_MS).expect()

    def sees_all(self, flag_memory: DeviceMemory, flag_offset_bytes: int) -> bool:
        """Return whether a stream reads the new data and the new flag, the flag first."""
        flag, data = bytearray(FLAG_BYTES), bytearray(LENGTH_BYTES)
        with self.device.stream() as stream:
            stream.read_into(flag_memory, flag, offset_bytes=flag_offset_bytes)
            stream.read_into(self.memory, data)
            stream.synchronize()
        return flag == FLAG and data == self.data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def flag_in_the_region(litmus: Litmus) -> Callable[[], bool]:
    """The flag is behind the data, in the same region, and a second WRITE sets it."""
    litmus.write(litmus.first, litmus.data, litmus.registration, 0)
    litmus.write(litmus.first, FLAG, litmus.registration, LENGTH_BYTES)
    return lambda: litmus.sees_all(litmus.memory, LENGTH_BYTES)


def flag_in_another_region(litmus: Litmus) -> Callable[[], bool]:
    """The flag is in another allocation."""
    litmus.write(litmus.first, litmus.data, litmus.registration, 0)
    litmus.write(litmus.first, FLAG, litmus.flag_registration, 0)
    return lambda: litmus.sees_all(litmus.flag_memory, 0)


def flag_by_another_nic(litmus: Litmus) -> Callable[[], bool]:
    """Another NIC sets the flag after the completion of the data."""
    litmus.write(litmus.first, litmus.data, litmus.registration, 0)
    litmus.write(litmus.second, FLAG, litmus.flag_registration, 0)
    return lambda: litmus.sees_all(litmus.flag_memory, 0)


def data_by_read(litmus: Litmus) -> Callable[[], bool]:
    """The NIC of the GPU fetches the data by RDMA READ."""
    requester, _ = litmus.pair(litmus.first)
    source = litmus.host_region(litmus.first, litmus.data)
    target = litmus.registration.region(litmus.first)
    requester.post_read(target, source.remote(), work_id=1, length_bytes=LENGTH_BYTES)
    requester.wait(_TIMEOUT_MS).expect()
    litmus.write(litmus.first, FLAG, litmus.registration, LENGTH_BYTES)
    return lambda: litmus.sees_all(litmus.memory, LENGTH_BYTES)


def data_by_send(litmus: Litmus) -> Callable[[], bool]:
    """A peer sends the data, and a posted receive puts it into the GPU's memory."""
    sender, receiver = litmus.pair(litmus.first)
    receiver.post_receive(litmus.registration.region(litmus.first), work_id=1, length_bytes=LENGTH_BYTES)
    sender.post_send(litmus.host_region(litmus.first, litmus.data), work_id=2)
    receiver.wait_received(_TIMEOUT_MS).expect()
    sender.wait(_TIMEOUT_MS).expect()
    litmus.write(litmus.first, FLAG, litmus.registration, LENGTH_BYTES)
    return lambda: litmus.sees_all(litmus.memory, LENGTH_BYTES)


CASES: dict[str, Callable[[Litmus], Callable[[], bool]]] = {
    case.__name__: case
    for case in (flag_in_the_region, flag_in_another_region, flag_by_another_nic, data_by_read, data_by_send)
}


def _main() -> None:
    results: dict[str, tuple[bool, bool]] = {}
    with ExitStack() as stack:
        device = stack.enter_context(cuda.Device(0))
        nics = tuple(stack.enter_context(nic) for nic in verbs.open_active_nics())
        for name, case in CASES.items():
            with Litmus(device, nics, seed=1) as litmus:
                sees = case(litmus)
                before = sees()
                Ordering.of(device).make_visible(device)
                results[name] = before, sees()
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    _main()
