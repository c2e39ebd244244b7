"""Experiments on this machine, for properties that no file states.

The module runs as ``python -m gdrkit.inventory.experiments NAME DESCRIPTOR`` in a child process with a time limit. An
experiment allocates a little memory, registers it, transfers bytes over each NIC in loopback, and releases everything.
For each of its steps, it returns a text that says what was observed. The rules of the doctor decide what that means.
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
from typing import TYPE_CHECKING

from gdrkit import pattern, serialization
from gdrkit.children import join_threads
from gdrkit.errors import DataMismatch, GdrkitError, UsageError
from gdrkit.inventory.facts import ApiFailure
from gdrkit.inventory.observation import DESCRIPTOR_0
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdrkit.cuda import Device
    from gdrkit.registration import Registration
    from gdrkit.verbs import Nic

__all__ = ["EXPERIMENTS", "main"]

_TRANSFER_BYTES = 64 * KIB
_COPY_BYTES = 64 * MIB
_FLUSH_ROUNDS = 50
# Number of copies before the link speeds are read. During these copies, an idle GPU raises the speed of its link.
_WARM_UP_COPIES = 20
# Seed of the patterns that are transferred. Any value would do.
_PATTERN_SEED = 0x6D6F76
# Time limit for the end of the thread that copies, after it was told to stop.
_JOIN_TIMEOUT_S = 10.0
_PCI_DEVICES = "/sys/bus/pci/devices"


def _try_p2p() -> dict[str, str]:
    """Write to and read from the memory of each CUDA device by RDMA over each active NIC, and return each result."""
    from gdrkit import cuda, registration

    observations: dict[str, str] = {}
    for nic_name, port in _list_active_nics():
        for device_index in range(cuda.device_count()):
            with ExitStack() as stack:
                nic, device = _open_nic_and_device(stack, nic_name, port, device_index)
                memory = stack.enter_context(device.allocate(_TRANSFER_BYTES))
                registered_memory = stack.enter_context(registration.register(memory, [nic]))
                loopback = stack.enter_context(registration.ConnectedPair(nic, length_bytes=_TRANSFER_BYTES))
                pair_text = f"GPU {device_index} and {nic_name}"
                loopback.fill(_PATTERN_SEED)
                status = loopback.write(registered_memory.remote(nic)).status.name
                observations[f"RDMA WRITE into {pair_text}"] = _describe_transfer(status, memory.read(), _PATTERN_SEED)
                if status != "SUCCESS":
                    # The queue pair is in the error state, so the read needs a new queue pair.
                    loopback = stack.enter_context(registration.ConnectedPair(nic, length_bytes=_TRANSFER_BYTES))
                memory.write(pattern.payload(_TRANSFER_BYTES, seed=_PATTERN_SEED + 1))
                status = loopback.read(registered_memory.remote(nic)).status.name
                observations[f"RDMA READ from {pair_text}"] = _describe_transfer(
                    status, bytes(loopback.data), _PATTERN_SEED + 1
                )
    return observations


def _describe_transfer(status: str, data: bytes, seed: int) -> str:
    """Return the status of a completion, or the mismatch if it is SUCCESS and `data` is not the pattern of `seed`."""
    if status != "SUCCESS":
        return status
    try:
        pattern.check(data, seed=seed)
    except DataMismatch as error:
        return str(error)
    return status


def _try_stale_key() -> dict[str, str]:
    """Write by RDMA with the rkey of freed memory, and report whether this changed memory that was allocated later.

    The result also says whether the new memory has the address and the buffer id of the freed memory.
    """
    from gdrkit import cuda, registration

    active_nics = _list_active_nics()
    with ExitStack() as stack:
        nic, device = _open_nic_and_device(stack, *active_nics[0], 0)
        freed_memory = stack.enter_context(device.allocate(2 * MIB))
        # Only a borrowed view of the memory is registered. The owner does not know of this registration, so closing the
        # owner does not deregister it.
        view = stack.enter_context(cuda.borrow(device, freed_memory.address, length_bytes=freed_memory.length_bytes))
        registered_memory: Registration = stack.enter_context(registration.register(view, [nic]))
        stale_range = registered_memory.remote(nic, length_bytes=_TRANSFER_BYTES)
        old_buffer_id, old_address = freed_memory.buffer_id(), freed_memory.address
        freed_memory.close()
        new_memory = stack.enter_context(device.allocate(2 * MIB))
        new_memory.fill(0x5A)
        is_same_address = new_memory.address == old_address
        new_buffer_id = new_memory.buffer_id()
        loopback = stack.enter_context(registration.ConnectedPair(nic, length_bytes=_TRANSFER_BYTES))
        loopback.fill(_PATTERN_SEED)
        status = loopback.write(stale_range).status.name
        was_overwritten = new_memory.read(length_bytes=_TRANSFER_BYTES) != b"\x5a" * _TRANSFER_BYTES
        registered_memory.close()
    return {
        "the address came back": "yes" if is_same_address else "no",
        "buffer id": "the same"
        if is_same_address and new_buffer_id == old_buffer_id
        else f"{old_buffer_id}, then {new_buffer_id}",
        "a write by the old key": status,
        "the new owner was reached by the old key": "yes" if was_overwritten else "no",
    }


def _try_flush() -> dict[str, str]:
    """Count how often a copy from device memory returns old bytes after a completed RDMA WRITE and a flush."""
    from gdrkit import cuda, registration

    observations: dict[str, str] = {}
    active_nics = _list_active_nics()
    for device_index in range(cuda.device_count()):
        with ExitStack() as stack:
            nic, device = _open_nic_and_device(stack, *active_nics[0], device_index)
            ordering = registration.Ordering.of(device)
            memory, copied_data = stack.enter_context(device.allocate(_TRANSFER_BYTES)), bytearray(_TRANSFER_BYTES)
            registered_memory = stack.enter_context(registration.register(memory, [nic]))
            loopback = stack.enter_context(registration.ConnectedPair(nic, length_bytes=_TRANSFER_BYTES))
            stream = stack.enter_context(device.stream())
            observations[f"writes of NICs are visible to GPU {device_index}"] = (
                "without a flush" if not ordering.needs_flush else "after a flush"
            )
            stale_count = 0
            for round_index in range(_FLUSH_ROUNDS):
                loopback.fill(_PATTERN_SEED + round_index)
                loopback.write(registered_memory.remote(nic)).expect()
                # A supported flush is called even if it is not needed, because it must succeed in that case, too.
                if ordering.flush_options & registration.FlushOption.HOST:
                    device.flush_remote_writes()
                stream.read_into(memory, copied_data)
                stream.synchronize()
                stale_count += copied_data != loopback.data
            observations[f"old data on GPU {device_index} in {_FLUSH_ROUNDS} rounds"] = str(stale_count)
    return observations


def _read_links_under_load() -> dict[str, str]:
    """Return the current speed of each PCIe link above each CUDA device while copies to the device run."""
    from gdrkit import cuda, host

    tree, observations = host.HostTree(), {}
    for device_index in range(cuda.device_count()):
        with cuda.Device(device_index) as device, device.allocate(_COPY_BYTES) as memory:
            stop_copying = threading.Event()
            data = bytes(_COPY_BYTES)

            # The default values bind the variables of this iteration. Without them, the function would use the values
            # of the iteration that runs when it is called.
            def copy_until_stopped(
                memory: object = memory, data: bytes = data, stop_copying: threading.Event = stop_copying
            ) -> None:
                while not stop_copying.is_set():
                    memory.write(data)  # type: ignore[attr-defined]

            for _ in range(_WARM_UP_COPIES):
                memory.write(data)
            copy_thread = threading.Thread(target=copy_until_stopped, name=f"copies to GPU {device_index}", daemon=True)
            copy_thread.start()
            try:
                # The first part of the path is the host bridge, which has no link above it.
                for function_address in host.pci_path(tree, device.pci_bus_id.lower())[1:]:
                    observations[function_address] = (
                        tree.text(f"{_PCI_DEVICES}/{function_address}/current_link_speed") or "unknown"
                    )
            finally:
                stop_copying.set()
                join_threads([copy_thread], timeout_s=_JOIN_TIMEOUT_S)
    return observations


def _open_driver() -> dict[str, str]:
    """Open and close the driver of cuFile."""
    from gdrkit import cufile

    # The parent process has the time limit, and kills this process if the call hangs.
    with cufile.Driver(timeout_s=None):
        major, minor = cufile.library_version()
    return {f"cuFileDriverOpen of cuFile {major}.{minor}": "opened"}


def _fill_bounce_buffer_pool() -> dict[str, str]:
    """Submit one batch with as many reads as cuFile accepts, and count the results.

    Each read may need a bounce buffer of cuFile's pool.
    """
    from gdrkit import cuda, cufile

    with ExitStack() as stack:
        device = stack.enter_context(cuda.Device(0))
        memory = stack.enter_context(device.allocate(_TRANSFER_BYTES))
        driver = stack.enter_context(cufile.Driver(timeout_s=None))
        # The parent process chooses the folder of temporary files (TMPDIR) and removes it.
        path = Path(tempfile.mkdtemp(), "data")
        path.write_bytes(pattern.payload(_TRANSFER_BYTES, seed=_PATTERN_SEED))
        data_file = stack.enter_context(path.open("rb"))
        file_handle = stack.enter_context(cufile.FileHandle(driver, data_file.fileno()))
        read_count = driver.properties().max_batch_io
        batch = stack.enter_context(cufile.IoBatch(driver, read_count))
        batch.submit([cufile.BatchRequest(cufile.Opcode.READ, file_handle, cufile.BufferRange(memory))] * read_count)
        status_counts = Counter(event.status.name for event in batch.fetch_events(count_min=read_count))
    return {
        f"{read_count} reads of {_TRANSFER_BYTES} bytes in one batch": ", ".join(
            f"{result_count} {status_name}" for status_name, result_count in status_counts.items()
        )
    }


def _list_active_nics() -> list[tuple[str, int]]:
    """Return the name of each NIC that has an active port, and the number of the first such port."""
    from gdrkit import verbs

    nics = [(nic_info.name, nic_info.active_port) for nic_info in verbs.list_nics() if nic_info.active_port is not None]
    if not nics:
        message = "no NIC has an active port"
        raise UsageError(message)
    return nics


def _open_nic_and_device(stack: ExitStack, nic_name: str, port: int, device_index: int) -> tuple[Nic, Device]:
    from gdrkit import cuda, verbs

    nic = stack.enter_context(verbs.Nic.open(nic_name, port=port))
    return nic, stack.enter_context(cuda.Device(device_index))


def _identify_descriptor_0() -> tuple[int, int] | None:
    """Return the device and inode number of the file of descriptor 0, or None if the descriptor is closed."""
    try:
        file_status = os.fstat(0)
    except OSError:
        return None
    return file_status.st_dev, file_status.st_ino


EXPERIMENTS: dict[str, Callable[[], dict[str, str]]] = {
    "p2p": _try_p2p,
    "stale_key": _try_stale_key,
    "flush": _try_flush,
    "load": _read_links_under_load,
    "driver_open": _open_driver,
    "pool": _fill_bounce_buffer_pool,
}


def main(arguments: list[str] | None = None) -> int:
    """Run an experiment, and write its observations and its failure, if any, as one JSON object.

    The arguments are ``NAME DESCRIPTOR``: the name of the experiment, and the descriptor to write to.

    Raises
    ------
    UsageError
        There is no experiment of that name.
    """
    experiment_name, descriptor = sys.argv[1:] if arguments is None else arguments
    if experiment_name not in EXPERIMENTS:
        message = f"the experiment must be one of {', '.join(EXPERIMENTS)}, not {experiment_name!r}"
        raise UsageError(message)
    # cuFileDriverOpen can close descriptor 0 (the rule cufile-descriptor-0).
    file_id_before = _identify_descriptor_0()
    observations: dict[str, str] = {}
    failure: ApiFailure | None = None
    try:
        observations = EXPERIMENTS[experiment_name]()
    except GdrkitError as error:
        failure = ApiFailure.of(error, api=experiment_name, operation=experiment_name)
    if _identify_descriptor_0() != file_id_before:
        observations[DESCRIPTOR_0] = "was closed"
    result = {"facts": serialization.to_json_data(observations), "failure": serialization.to_json_data(failure)}
    with os.fdopen(int(descriptor), "w", encoding="utf-8") as file:
        json.dump(result, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
