"""What the storage client once did with device memory, as what a user would see; `nox -s review` shows that each case
can fail.

Device memory faults under the CPU, on a GPU as on its twin, so a client in a process of its own tells by its death.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.reach import DMABUF
from support.storage import serving

from gdrkit import cuda, pattern
from gdrkit.errors import UsageError
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.storage import Service

    from gdrkit.cuda import Device
    from gdrkit.verbs import Nic

CHILD = Path(__file__).resolve().parents[1] / "support" / "storage_child.py"
NAME = "weights.bin"
_TIMEOUT_S = 60


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A server of an empty store, for all cases here."""
    folder = tmp_path_factory.mktemp("storage")
    with serving(folder / "store", folder / "server.log") as served:
        yield served


def put(service: Service, data: bytes, nic: Nic, *, offset_bytes: int = 0) -> None:
    """Write a file from host memory."""
    with (
        service.connect(nic) as client,
        client.register(bytearray(data)) as buffer,
        client.open(NAME, write=True, create=True, truncate=True) as file,
    ):
        file.write(buffer, offset_bytes=offset_bytes)


def client_does(service: Service, operation: str, **details: int | list[tuple[int, int]]) -> dict[str, Any]:
    """What a client with device memory tells, in a process of its own; that it died is what a case finds."""
    asked = details | {"operation": operation, "place": service.address, "token": service.token(), "path": NAME}
    ended = subprocess.run(
        [sys.executable, str(CHILD)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    died = "" if ended.returncode >= 0 else signal.Signals(-ended.returncode).name
    assert not died, f"the CPU was let loose on device memory: the client died of {died} in a {operation}"
    assert ended.returncode == 0, ended.stderr
    told: dict[str, Any] = json.loads(ended.stdout)
    assert told["right"], f"other bytes in device memory: {told}"
    return told


@DMABUF
def test_a_read_into_device_memory_is_not_touched_by_the_cpu(
    service: Service, device: Device, nic: Nic, seed: int
) -> None:
    """Finding 3: inline data was copied by the CPU, and the checksum of what arrived was computed by it."""
    put(service, pattern.payload(MIB, seed=seed), nic)
    # A short one, which other services send within the reply; and one that ends behind the end of the file.
    for length_bytes, offset_bytes in ((100, 4097), (MIB, 64 * KIB + 1)):
        told = client_does(
            service, "read", device=device.index, seed=seed, length_bytes=length_bytes, offset_bytes=offset_bytes
        )
        assert told["length_bytes"] == min(length_bytes, MIB - offset_bytes)


@DMABUF
def test_a_write_from_device_memory_is_summed_by_the_server(
    service: Service, device: Device, nic: Nic, seed: int
) -> None:
    """Finding 3: the checksum of a write was computed by the CPU, and short data was copied into the request."""
    for length_bytes in (100, MIB):
        told = client_does(service, "write", device=device.index, seed=seed, length_bytes=length_bytes, offset_bytes=0)
        assert told["length_bytes"] == length_bytes
        assert told["checksums"], "the server gave no checksum of what it received"
        assert (service.root / NAME).read_bytes()[:length_bytes] == pattern.payload(length_bytes, seed=seed)


@DMABUF
def test_a_hole_in_a_file_is_zeroed_by_the_device(service: Service, device: Device, nic: Nic, seed: int) -> None:
    """Defect g: a hole was filled by a memset of the CPU."""
    begin = MIB
    put(service, pattern.payload(MIB, seed=seed, offset_bytes=begin), nic, offset_bytes=begin)
    told = client_does(
        service,
        "read",
        device=device.index,
        seed=seed,
        length_bytes=begin + 64 * KIB - 3,
        offset_bytes=3,
        holes=[(3, begin)],
    )
    assert told["hole_bytes"] == begin - 3


@DMABUF
def test_memory_that_came_by_its_address_is_no_host_buffer(service: Service, device: Device, nic: Nic) -> None:
    """Finding 6: device memory of somebody else's making was wrapped into a buffer of the host."""
    with (
        device.allocate(64 * KIB) as memory,
        cuda.borrow(device, memory.address, length_bytes=64 * KIB) as borrowed,
        service.connect(nic) as client,
        client.register(borrowed) as buffer,
    ):
        for part in (buffer, buffer.subrange(offset_bytes=1, length_bytes=KIB)):
            assert part.is_device_memory, "device memory is in a buffer of the host, for any CPU to touch"
            with pytest.raises(UsageError):
                part.data()
