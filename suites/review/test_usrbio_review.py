"""What the client library of usrbio once did, as what a user would see; `nox -s review` shows that each case can fail.

The mounts here are folders that nobody serves: what a library publishes there is a link, which is all that a 3FS daemon
would see of it.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import subprocess
import sys
import uuid
from typing import TYPE_CHECKING

import pytest
from support.raw_iov import Ior, Iov, client_library

from gdrkit import cuda, pattern, usrbio
from gdrkit.harness.needs import cuda as cuda_needs
from gdrkit.harness.needs import needs
from gdrkit.units import KIB
from gdrkit.usrbio._library import native

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gdrkit.cuda import Device

DEVICE = needs(cuda_needs.device())
IPC = needs(cuda_needs.device(), cuda_needs.ipc)
LENGTH_BYTES = 64 * KIB
READS = True
FORBID_READ_HOLES = 2
O_CREAT_EXCL = 0o300
_TIMEOUT_S = 60

# What another process has of what was published: the sum of its bytes, or why not.
OPEN = """
import hashlib, json, sys
from gdrkit import cuda, usrbio
from gdrkit.errors import GdrkitError

mount, identity, length_bytes, handle = json.load(sys.stdin)
try:
    with cuda.Device(0) as device:
        if handle is None:
            with usrbio.open_gpu_iovec(mount, identity, length_bytes=length_bytes) as iovec:
                with cuda.borrow(device, iovec.address, length_bytes=length_bytes) as memory:
                    found = memory.read(length_bytes=length_bytes)
        else:
            with usrbio.GpuSharedBuffer.open(mount, bytes.fromhex(handle)) as shared:
                found = shared.memory.read(length_bytes=length_bytes)
    print(json.dumps(hashlib.sha256(found).hexdigest()))
except GdrkitError as error:
    print(json.dumps(f"{type(error).__name__}: {error}"))
"""


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    """A folder with what a mount has for publications."""
    (tmp_path / "3fs-virt" / "iovs").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def served(mount: Path) -> Iterator[Path]:
    """The same with the semaphore that wakes whoever drains rings: nobody."""
    name = f"hf3fs-submit-ios.{uuid.uuid4()}"
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sem_open.restype = ctypes.c_void_p
    opened = libc.sem_open(f"/{name}".encode(), O_CREAT_EXCL, 0o600, 0)
    assert opened, ctypes.get_errno()
    (mount / "3fs-virt" / "iovs" / "submit-ios").symlink_to(f"/dev/shm/sem.{name}")  # noqa: S108 - as 3FS has it.
    yield mount
    libc.sem_close(ctypes.c_void_p(opened))
    libc.sem_unlink(f"/{name}".encode())


def links(mount: Path) -> list[str]:
    """What is published."""
    return sorted(path.name for path in (mount / "3fs-virt" / "iovs").iterdir() if path.name != "submit-ios")


def opener_has(mount: Path, *, identity: str = "", handle: bytes | None = None) -> str:
    """What a process has that opens what was published, or was handed over."""
    asked = [str(mount), identity, LENGTH_BYTES, None if handle is None else handle.hex()]
    ended = subprocess.run(
        [sys.executable, "-c", OPEN],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    assert ended.returncode == 0, ended.stderr
    return str(json.loads(ended.stdout))


@IPC
def test_what_was_published_is_its_owners_memory_in_another_process(device: Device, mount: Path, seed: int) -> None:
    """Defect d: the address in the owner's process was published, which means nothing in the opener's."""
    data = pattern.payload(LENGTH_BYTES, seed=seed)
    with usrbio.make_gpu_iovec(str(mount), length_bytes=LENGTH_BYTES) as iovec:
        with cuda.borrow(device, iovec.address, length_bytes=LENGTH_BYTES) as memory:
            memory.write(data)
        found = opener_has(mount, identity=iovec.id)
        assert found == hashlib.sha256(data).hexdigest(), f"the opener of a publication has other memory: {found}"


@IPC
def test_a_shared_buffer_is_its_owners_memory_in_another_process(device: Device, mount: Path, seed: int) -> None:
    """Defect d: the address in the owner's process was handed over, which means nothing in the importer's."""
    data = pattern.payload(LENGTH_BYTES, seed=seed)
    with usrbio.GpuSharedBuffer.create(str(mount), length_bytes=LENGTH_BYTES, device=device.index) as shared:
        shared.memory.write(data)
        found = opener_has(mount, handle=shared.export())
        assert found == hashlib.sha256(data).hexdigest(), f"the importer of a handle has other memory: {found}"


@DEVICE
def test_device_memory_is_published_as_device_memory(device: Device, mount: Path) -> None:
    """Finding 6: a pointer into a GPU was wrapped into a buffer of the host, and published as such."""
    with device.allocate(LENGTH_BYTES) as memory, usrbio.make_gpu_iovec(str(mount), memory) as iovec:
        assert iovec.is_gpu, "device memory was published as memory of the host"
        assert links(mount) == [f"{iovec.id}.gdr.d{device.index}"]
        with pytest.raises((TypeError, BufferError)):
            memoryview(iovec)


@DEVICE
def test_memory_that_cannot_be_published_is_not_made(device: Device, mount: Path, tmp_path: Path) -> None:
    """Defect f: nobody looked at the answer to a publication, and the create said success."""
    nowhere = tmp_path / "no-mount"
    nowhere.mkdir()
    with pytest.raises(usrbio.UsrbioError) as raised:
        usrbio.create_iovec(str(nowhere), length_bytes=LENGTH_BYTES).close()
    assert raised.value.errno == errno.ENOENT
    with device.allocate(LENGTH_BYTES) as memory:
        identity = str(uuid.uuid4())
        taken = mount / "3fs-virt" / "iovs" / f"{identity}.gdr.d{device.index}"
        taken.symlink_to("somebody-else's")
        with pytest.raises(usrbio.UsrbioError) as raised:
            native().wrap_gpu_iovec(memory.address, LENGTH_BYTES, identity, str(mount), 0, device.index, memory).close()
        assert raised.value.errno == errno.EEXIST
    assert str(taken.readlink()) == "somebody-else's"


def test_a_range_that_overflows_is_outside_of_its_memory(served: Path) -> None:
    """Defect m: an address and a length overflowed, and their sum lay inside."""
    library, mount = client_library(), str(served).encode()
    iov, ring = Iov(), Ior()
    assert library.hf3fs_iovcreate(iov, mount, LENGTH_BYTES, 0, -1) == 0
    assert library.hf3fs_iorcreate4(ring, mount, 8, READS, 0, 0, -1, 0) == 0
    # The descriptor is none of 3FS, which is found out after the range: so says a range that lies inside.
    assert library.hf3fs_prep_io(ring, iov, READS, iov.base + 1, 0, 0, LENGTH_BYTES - 1, None) == -errno.EBADF
    for begin in (iov.base + LENGTH_BYTES, (1 << 64) - KIB, iov.base - 1):
        length_bytes = (iov.base + LENGTH_BYTES - begin) % (1 << 64)
        answer = library.hf3fs_prep_io(ring, iov, READS, begin, 0, 0, length_bytes, None)
        assert answer == -errno.EINVAL, f"{length_bytes} bytes from {begin:#x} were taken for a part of the memory"
    library.hf3fs_iordestroy(ring)
    library.hf3fs_iovdestroy(iov)
    assert not links(served)


def test_the_flags_of_a_ring_are_in_its_name_in_base_2(served: Path) -> None:
    """Defect o: a name was made with flags in base 2 and taken back in base 10, so that its link stayed."""
    with usrbio.make_ioring(str(served), 8, flags=FORBID_READ_HOLES):
        (name,) = links(served)
        assert name.endswith(".f10"), f"whoever reads these flags in base 2 gets other ones: {name}"
    assert not links(served), "the link of a ring stayed when it was destroyed"
