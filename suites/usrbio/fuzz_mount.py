"""Fuzz target of the agent that serves a FUSE mount: it gets random ioctls, links and ring contents.

Start it with ``GDRKIT_FUZZ_MOUNT=DIR python -m usrbio.fuzz_mount --seconds 10``. The program fuzzes in the folder
``fuzzed`` of the mount, and makes the folder again when an input has removed it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from functools import cache
from pathlib import Path

from support import fuzz
from support.raw_usrbio import LinkClient, RawIov, RawRing

from gdrkit.units import KIB
from gdrkit.usrbio import virtual
from gdrkit.usrbio.agent import link_names

__all__ = ["TARGET"]

_IOCTL_REQUESTS = (
    virtual.GET_MOUNT_NAME,
    virtual.GET_MAGIC,
    virtual.RECURSIVE_RM,
    virtual.FSYNC,
    virtual.HARDLINK,
    virtual.PUNCH_HOLE,
    virtual.MOVE,
    virtual.REMOVE,
)
# Folders of 3fs-virt. A link that a client makes there is a request to the agent.
_VIRTUAL_FOLDERS = ("iovs", "rm-rf", "set-conf", "get-conf", "")
# Number of inputs that the fuzzer writes to one ring. Then it publishes a new ring, because the agent removes a ring
# with invalid indices.
_RING_INPUTS_MAX = 16
# Placeholders in inputs for the inode number of the folder (8 bytes), the path of the folder, and the path of shared
# memory.
_INODE_PLACEHOLDER, _FOLDER_PLACEHOLDER, _MEMORY_PATH_PLACEHOLDER = b"INODE<8>", b"FOLDER", b"MEMORY"


class _Fuzzer:
    """The objects that inputs use: a folder, an iov, and a ring. Links publish the iov and the ring."""

    def __init__(self, mount: Path) -> None:
        self._mount = mount
        self._client = LinkClient(mount)
        self._folder = mount / "fuzzed"
        self._iov = RawIov(64 * KIB)
        self._client.publish_iov(self._iov)
        self._ring: RawRing | None = None
        self._ring_input_count = 0

    def send_ioctl(self, data: bytes) -> None:
        """Send an ioctl: the first byte selects its number, the second byte an open file or folder."""
        with contextlib.suppress(FileExistsError):
            self._folder.mkdir()
        (self._folder / "file").write_bytes(b"content")
        request = _IOCTL_REQUESTS[data[0] % len(_IOCTL_REQUESTS)]
        path = (self._folder, self._folder / "file", self._client.iovs_folder)[data[1] % 3]
        fd = os.open(path, os.O_RDWR if path.name == "file" else os.O_RDONLY)
        try:
            inode = self._folder.stat().st_ino.to_bytes(8, "little")
            # The bits 16 to 29 of an ioctl request are the size of its argument.
            argument_bytes = request >> 16 & 0x3FFF
            unpadded_argument = data[2:].replace(_INODE_PLACEHOLDER, inode)[:argument_bytes]
            argument = bytearray(unpadded_argument.ljust(argument_bytes, b"\0"))
            fcntl.ioctl(fd, request, argument)
        finally:
            os.close(fd)

    def make_link(self, data: bytes) -> None:
        """Make and remove a link. The first byte selects its folder. Then come its name, a zero byte and its target."""
        name, _, target = data[1:].partition(b"\0")
        target = target.replace(_MEMORY_PATH_PLACEHOLDER, bytes(self._iov.path))
        target = target.replace(_FOLDER_PLACEHOLDER, bytes(self._folder))
        folder = self._mount / "3fs-virt" / _VIRTUAL_FOLDERS[data[0] % len(_VIRTUAL_FOLDERS)]
        link = folder / os.fsdecode(name.replace(b"/", b"_") or b"x")
        # A Path as the target would turn gdr:// into gdr:/.
        os.symlink(os.fsdecode(target.partition(b"\0")[0] or b"x"), link)  # noqa: PTH211
        link.readlink()
        link.unlink()

    def write_ring(self, data: bytes) -> None:
        """Prepare four valid reads, overwrite a part of the ring, and submit. The first two bytes select the offset."""
        if self._ring is None or self._ring_input_count == _RING_INPUTS_MAX:
            self._replace_ring()
        assert self._ring is not None
        self._ring_input_count += 1
        offset = int.from_bytes(data[:2], "little") % len(self._ring.memory)
        (self._mount / "input").touch()
        with (self._mount / "input").open("rb") as file:
            for read_index in range(4):
                # An earlier input may have made the head of the submissions (index 0) invalid.
                if 0 <= self._ring.index(0) < self._ring.slot_count:
                    inode = os.fstat(file.fileno()).st_ino
                    self._ring.prepare(self._iov.id.bytes, inode=inode, length=4 * KIB, file_offset=read_index * KIB)
            new_bytes = data[2:][: len(self._ring.memory) - offset]
            self._ring.memory[offset : offset + len(new_bytes)] = new_bytes
            self._ring.submit()

    def _replace_ring(self) -> None:
        if self._ring is not None:
            with contextlib.suppress(FileNotFoundError):  # The agent has already removed a ring with invalid indices.
                self._client.unpublish(self._ring.link_name)
            self._ring.close()
        self._ring = RawRing(8, for_read=True)
        self._client.publish_ring(self._ring)
        self._ring_input_count = 0


@cache
def _get_fuzzer() -> _Fuzzer:
    return _Fuzzer(Path(os.environ["GDRKIT_FUZZ_MOUNT"]))


def check(data: bytes) -> None:
    """Send an input to the mount by the method that its first byte selects.

    The system calls for the input may fail. Afterwards, stat(2) of the mount must succeed.
    """
    if len(data) < 3:
        return
    fuzzer = _get_fuzzer()
    send_input = (fuzzer.send_ioctl, fuzzer.make_link, fuzzer.write_ring)[data[0] % 3]
    with contextlib.suppress(OSError, ValueError):  # ValueError: Python refuses a path with a zero byte.
        send_input(data[1:])
    os.stat(os.environ["GDRKIT_FUZZ_MOUNT"])  # noqa: PTH116 - a path of the environment.


def _make_valid_inputs() -> list[bytes]:
    file_name_field = b"file".ljust(256, b"\0")
    # The index of a request in _IOCTL_REQUESTS, and a valid argument of the request.
    arguments = (
        (1, b""),
        # HARDLINK: the folder and the name of the new link.
        (4, _INODE_PLACEHOLDER + b"linked"),
        # PUNCH_HOLE: one range, no flags, 1000 starts, and the first end, 4096.
        (5, b"\1" + bytes(7) + bytes(8) + bytes(8000) + b"\0\x10" + bytes(6)),
        # MOVE: old folder and name, new folder and name.
        (6, _INODE_PLACEHOLDER + file_name_field + _INODE_PLACEHOLDER + b"moved".ljust(256, b"\0")),
        # REMOVE: folder and name, and a flag: recursive.
        (7, _INODE_PLACEHOLDER + file_name_field),
        (7, _INODE_PLACEHOLDER + file_name_field + b"\1"),
        (2, b""),
        (3, b""),
    )
    # The first byte of an input is the index of a method in check(): 0 an ioctl, 1 a link, 2 a ring.
    inputs = [
        bytes([0, request_index, path_index]) + argument
        for request_index, argument in arguments
        for path_index in range(3)
    ]
    link_id = str(uuid.UUID(int=0)).encode()
    inputs += [
        bytes([1, 0]) + link_id + suffix + b"\0" + target
        for suffix in (b"", b".b4096", b".r8", b".w-4.ph.t50.f11", b".gdr.d0")
        for target in (
            _MEMORY_PATH_PLACEHOLDER,
            b"/dev/shm/none",
            b"gdr://v2/device/0/allocation/2097152/offset/0/size/65536/dmabuf",
        )
    ]
    inputs += [bytes([1, 1]) + b"x\0" + _FOLDER_PLACEHOLDER + b"/file", bytes([1, 2]) + b"key\0value"]
    # Offsets in a ring of nine slots: the indices (0), two arguments (16 and 200), the completions (520), the
    # submissions (736), the semaphore (880), and the padding (912).
    inputs += [bytes([2]) + offset.to_bytes(2, "little") + bytes(16) for offset in (0, 16, 200, 520, 736, 880, 912)]
    return inputs


TARGET = fuzz.FuzzTarget(
    check,
    _make_valid_inputs(),
    (link_names,),
    alphabet=b"0123456789abcdef.-/rwpthlbg",
    change_count_range=(0, 6),
    length_max_bytes=8192,
)

if __name__ == "__main__":
    fuzz.main({"mount": TARGET})
