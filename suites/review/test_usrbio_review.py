"""Regression cases for defects of the usrbio client library (docs/findings.md).

The library publishes memory to the 3FS daemon as a symbolic link in a folder of the mount. No daemon is necessary in
these cases: they check the link, and open the memory in another process. `nox -s review` restores each defect, and
shows that its case then fails.
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
from review.usrbio_c_api import Ior, Iov, load_client_library

from gdrkit import cuda, pattern, usrbio
from gdrkit.harness.needs import cuda as cuda_needs
from gdrkit.harness.needs import needs
from gdrkit.units import KIB
from gdrkit.usrbio._library import native

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gdrkit.cuda import Device

NEEDS_DEVICE = needs(cuda_needs.device())
NEEDS_IPC = needs(cuda_needs.device(), cuda_needs.ipc)
MEMORY_BYTES = 64 * KIB
# Value of `for_read` of a ring and of `read` of an operation.
FOR_READ = True
# HF3FS_IOR_FORBID_READ_HOLES of hf3fs_usrbio.h.
FORBID_READ_HOLES = 2
# O_CREAT | O_EXCL.
O_CREAT_EXCL = 0o300
_CHILD_TIMEOUT_S = 60

# Program that opens memory of another process by the id of its publication, or by a handle if the handle is not null.
# It prints the digest of the bytes, or the error.
OPEN_PROGRAM = """
import hashlib, json, sys
from gdrkit import cuda, usrbio
from gdrkit.errors import GdrkitError

mount, identity, length_bytes, handle = json.load(sys.stdin)
try:
    with cuda.Device(0) as device:
        if handle is None:
            with usrbio.open_gpu_iovec(mount, identity, length_bytes=length_bytes) as iovec:
                with cuda.borrow(device, iovec.address, length_bytes=length_bytes) as memory:
                    contents = memory.read(length_bytes=length_bytes)
        else:
            with usrbio.GpuSharedBuffer.open(mount, bytes.fromhex(handle)) as shared_buffer:
                contents = shared_buffer.memory.read(length_bytes=length_bytes)
    print(json.dumps(hashlib.sha256(contents).hexdigest()))
except GdrkitError as error:
    print(json.dumps(f"{type(error).__name__}: {error}"))
"""


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    """Return a folder like the mount of a 3FS daemon, with the folder in which memory is published."""
    (tmp_path / "3fs-virt" / "iovs").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def mount_with_semaphore(mount: Path) -> Iterator[Path]:
    """Yield the mount with a submit semaphore, by which a client would wake the 3FS daemon. No daemon runs."""
    semaphore_name = f"hf3fs-submit-ios.{uuid.uuid4()}"
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sem_open.restype = ctypes.c_void_p
    semaphore = libc.sem_open(f"/{semaphore_name}".encode(), O_CREAT_EXCL, 0o600, 0)
    assert semaphore, ctypes.get_errno()
    (mount / "3fs-virt" / "iovs" / "submit-ios").symlink_to(f"/dev/shm/sem.{semaphore_name}")  # noqa: S108 - as in 3FS.
    yield mount
    libc.sem_close(ctypes.c_void_p(semaphore))
    libc.sem_unlink(f"/{semaphore_name}".encode())


def list_published_links(mount: Path) -> list[str]:
    """Return the names of the links that publish memory and rings."""
    return sorted(path.name for path in (mount / "3fs-virt" / "iovs").iterdir() if path.name != "submit-ios")


def compute_digest_in_another_process(mount: Path, *, identity: str = "", handle: bytes | None = None) -> str:
    """Open published memory, or the memory of a handle, in another process. Return the digest of its bytes or an error.

    If `handle` is None, `identity` is the id of the publication.
    """
    request = [str(mount), identity, MEMORY_BYTES, None if handle is None else handle.hex()]
    completed = subprocess.run(
        [sys.executable, "-c", OPEN_PROGRAM],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
        timeout=_CHILD_TIMEOUT_S,
    )
    assert completed.returncode == 0, completed.stderr
    return str(json.loads(completed.stdout))


@NEEDS_IPC
def test_published_memory_is_the_same_in_another_process(device: Device, mount: Path, seed: int) -> None:
    """Defect d: the library published the owner's virtual address, which is not valid in another process."""
    data = pattern.payload(MEMORY_BYTES, seed=seed)
    with usrbio.make_gpu_iovec(str(mount), length_bytes=MEMORY_BYTES) as iovec:
        with cuda.borrow(device, iovec.address, length_bytes=MEMORY_BYTES) as memory:
            memory.write(data)
        digest = compute_digest_in_another_process(mount, identity=iovec.id)
        assert digest == hashlib.sha256(data).hexdigest(), f"the opener of published memory has other bytes: {digest}"


@NEEDS_IPC
def test_shared_buffer_is_the_same_in_another_process(device: Device, mount: Path, seed: int) -> None:
    """Defect d: the handle contained the owner's virtual address, which is not valid in another process."""
    data = pattern.payload(MEMORY_BYTES, seed=seed)
    with usrbio.GpuSharedBuffer.create(str(mount), length_bytes=MEMORY_BYTES, device=device.index) as shared_buffer:
        shared_buffer.memory.write(data)
        digest = compute_digest_in_another_process(mount, handle=shared_buffer.export())
        assert digest == hashlib.sha256(data).hexdigest(), f"the importer of a handle has other bytes: {digest}"


@NEEDS_DEVICE
def test_device_memory_is_published_as_device_memory(device: Device, mount: Path) -> None:
    """Finding 6: a device pointer was wrapped into a host buffer and published as host memory."""
    with device.allocate(MEMORY_BYTES) as memory, usrbio.make_gpu_iovec(str(mount), memory) as iovec:
        assert iovec.is_gpu, "device memory was published as host memory"
        assert list_published_links(mount) == [f"{iovec.id}.gdr.d{device.index}"]
        with pytest.raises((TypeError, BufferError)):
            memoryview(iovec)


@NEEDS_DEVICE
def test_creation_fails_if_the_memory_cannot_be_published(device: Device, mount: Path, tmp_path: Path) -> None:
    """Defect f: the library ignored the result of symlink(2) and reported success."""
    folder_without_links = tmp_path / "no-mount"
    folder_without_links.mkdir()
    with pytest.raises(usrbio.UsrbioError) as error_info:
        usrbio.create_iovec(str(folder_without_links), length_bytes=MEMORY_BYTES).close()
    assert error_info.value.errno == errno.ENOENT
    with device.allocate(MEMORY_BYTES) as memory:
        identity = str(uuid.uuid4())
        link = mount / "3fs-virt" / "iovs" / f"{identity}.gdr.d{device.index}"
        link.symlink_to("other-owner")
        # The link exists, so symlink(2) fails. Memory of a GPU must have the block size 0.
        with pytest.raises(usrbio.UsrbioError) as error_info:
            native().wrap_gpu_iovec(memory.address, MEMORY_BYTES, identity, str(mount), 0, device.index, memory).close()
        assert error_info.value.errno == errno.EEXIST
    assert str(link.readlink()) == "other-owner"


def test_range_that_overflows_is_refused(mount_with_semaphore: Path) -> None:
    """Defect m: the sum of address and length overflowed to an address inside the memory."""
    library, mount = load_client_library(), str(mount_with_semaphore).encode()
    iov, ring = Iov(), Ior()
    assert library.hf3fs_iovcreate(iov, mount, MEMORY_BYTES, 0, -1) == 0
    assert library.hf3fs_iorcreate4(ring, mount, 8, FOR_READ, 0, 0, -1, 0) == 0
    # hf3fs_prep_io checks the range and then the descriptor. Descriptor 0 is not registered, so EBADF shows that the
    # range was accepted.
    assert library.hf3fs_prep_io(ring, iov, FOR_READ, iov.base + 1, 0, 0, MEMORY_BYTES - 1, None) == -errno.EBADF
    # Each range ends at the end of the memory, modulo 2**64.
    for begin_address in (iov.base + MEMORY_BYTES, (1 << 64) - KIB, iov.base - 1):
        length_bytes = (iov.base + MEMORY_BYTES - begin_address) % (1 << 64)
        result = library.hf3fs_prep_io(ring, iov, FOR_READ, begin_address, 0, 0, length_bytes, None)
        assert result == -errno.EINVAL, f"hf3fs_prep_io accepted {length_bytes} bytes from {begin_address:#x}"
    library.hf3fs_iordestroy(ring)
    library.hf3fs_iovdestroy(iov)
    assert not list_published_links(mount_with_semaphore)


def test_flags_of_a_ring_are_in_its_name_in_base_2(mount_with_semaphore: Path) -> None:
    """Defect o: the link was created with flags in base 2 and removed with flags in base 10, so it was not removed."""
    # The flag is 2, which is 10 in base 2.
    with usrbio.make_ioring(str(mount_with_semaphore), 8, flags=FORBID_READ_HOLES):
        (link_name,) = list_published_links(mount_with_semaphore)
        assert link_name.endswith(".f10"), f"the flags of this name are not in base 2: {link_name}"
    assert not list_published_links(mount_with_semaphore), "the link of a destroyed ring stayed"
