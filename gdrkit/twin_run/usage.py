"""The file in which the processes of one ``gdrkit run`` count their use of the software twins.

A software twin is a library that emulates the hardware. Every twin of the run maps the file
(``native/twins/model/usage.cpp``) and updates the counts in it while it works, so the counts of a killed process are
not lost. The file has a header and one slot per process and API. :func:`twin_dmabufs` does not use the file.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.errors import Api
from gdrkit.evidence import HeldDmabuf

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gdrkit.host import HostTree

__all__ = ["ProcessUse", "RuntimeUse", "create_usage_file", "read_runtimes", "read_usage", "twin_dmabufs"]

# The layout of native/twins/model/usage.cpp. The header has: magic number, bytes per slot, number of slots. A slot has:
# state, API number, process ID, an unused number; objects, moved bytes; program name; queue pairs, regions, bytes of
# regions.
_HEADER = struct.Struct("<8sII48x")
_SLOT = struct.Struct("<IIIIQQ64sqqq")
_MAGIC = b"GDRKRUN1"
_SLOT_COUNT = 4096
# The state of a slot that a process has filled completely.
_STATE_READY = 2
# The twins emulate a dma-buf by a write-only descriptor of a memfd (model/dmabuf.cpp). The target of its link in
# /proc/PID/fd begins with one of these prefixes.
_DMABUF_MEMFD_PREFIXES = ("/memfd:gdrkit-gpu:", "/memfd:gdrkit-dmabuf:")
_FLAGS_LINE = re.compile(r"^flags:\s*([0-7]+)$", re.MULTILINE)
_TWIN_EXPORTER = "gdrkit-twin"
_API_BY_NUMBER = {1: Api.VERBS, 2: Api.CUDA, 3: Api.CUFILE, 4: Api.HLTHUNK}
# A twin of the CUDA runtime has its own slot, without counts. It calls the twin of the CUDA driver, whose slot has the
# counts.
_RUNTIME_BY_NUMBER = {5: "libcudart.so.12", 6: "libcudart.so.13"}


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """The use of one twin by one process.

    Attributes
    ----------
    api : Api
        The API of the twin.
    process_id : int
        Process ID in the PID namespace of the process.
    program : str
        Name of the program, without folders.
    objects_count : int
        Number of objects that the process created: queue pairs that reached the state RTR (verbs), memory
        allocations (CUDA), registered files (cuFile), opened devices (hl-thunk).
    moved_bytes : int
        Payload bytes that the twin moved for the process. Bytes of verbs are counted at the side of the requester.
    queue_pairs_count, regions_count, region_bytes : int
        Number of queue pairs and of memory regions of verbs that exist now, and the total length of the regions.
    """

    api: Api
    process_id: int
    program: str
    objects_count: int
    moved_bytes: int
    queue_pairs_count: int = 0
    regions_count: int = 0
    region_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RuntimeUse:
    """The use of a twin of the CUDA runtime by one process."""

    library: str
    process_id: int
    program: str


def create_usage_file(path: Path) -> None:
    """Create the file with empty slots. It is sparse, so it takes memory only for the slots in use."""
    with path.open("xb") as file:
        file.write(_HEADER.pack(_MAGIC, _SLOT.size, _SLOT_COUNT))
        file.truncate(_HEADER.size + _SLOT.size * _SLOT_COUNT)


def read_usage(path: Path) -> list[ProcessUse]:
    """Return the slots in use, in the order in which the processes opened the twins.

    The slots of the CUDA runtime are left out; see :func:`read_runtimes`. Slots with an unknown API number are left out
    too, because every process of the run can write into the file. A file of another size or format has no slots.
    """
    uses = []
    for api_number, process_id, program, objects_count, moved_bytes, *current_counts in _find_ready_slots(path):
        if api_number in _API_BY_NUMBER:
            # A forked child that destroyed objects of its parent has negative counts, which become 0.
            nonnegative_counts = (max(count, 0) for count in current_counts)
            api = _API_BY_NUMBER[api_number]
            uses.append(ProcessUse(api, process_id, program, objects_count, moved_bytes, *nonnegative_counts))
    return uses


def read_runtimes(path: Path) -> list[RuntimeUse]:
    """Return the processes that opened a twin of the CUDA runtime, in the order in which they opened it."""
    return [
        RuntimeUse(_RUNTIME_BY_NUMBER[api_number], process_id, program)
        for api_number, process_id, program, *_ in _find_ready_slots(path)
        if api_number in _RUNTIME_BY_NUMBER
    ]


def _find_ready_slots(path: Path) -> Iterator[tuple[int, int, str, int, int, int, int, int]]:
    """Yield for each slot in use: API number, process ID, program, objects, moved bytes, and three counts.

    The last three are the queue pairs, the regions and the bytes of regions that exist now. Yield nothing if the file
    has a wrong size or magic number.
    """
    data = path.read_bytes()
    if len(data) != _HEADER.size + _SLOT.size * _SLOT_COUNT or not data.startswith(_MAGIC):
        return
    slots = _SLOT.iter_unpack(data[_HEADER.size :])
    for state, api_number, process_id, _, objects_count, moved_bytes, program_bytes, *current_counts in slots:
        if state == _STATE_READY:
            program_name = program_bytes.partition(b"\0")[0].decode("utf-8", "backslashreplace")
            yield api_number, process_id, program_name, objects_count, moved_bytes, *current_counts


def twin_dmabufs(tree: HostTree, process: str, target_by_descriptor: dict[int, str]) -> tuple[HeldDmabuf, ...]:
    """Return the dma-bufs of the twins among the open descriptors of a process.

    Each descriptor counts as one dma-buf. Inodes do not tell dma-bufs apart, because all dma-bufs of one allocation of
    a twin are the same file. For the arguments see :func:`gdrkit.evidence.held_dmabufs`, which returns the dma-bufs of
    the kernel.
    """
    dmabufs = []
    for descriptor, target in target_by_descriptor.items():
        if target.startswith(_DMABUF_MEMFD_PREFIXES):
            flags_match = _FLAGS_LINE.search(tree.text(f"/proc/{process}/fdinfo/{descriptor}") or "")
            with contextlib.suppress(OSError):  # The descriptor may have been closed meanwhile.
                file_status = tree.path(f"/proc/{process}/fd/{descriptor}").stat()
                if flags_match is not None and int(flags_match[1], 8) & os.O_ACCMODE == os.O_WRONLY:
                    dmabufs.append(HeldDmabuf(file_status.st_ino, _TWIN_EXPORTER, file_status.st_size))
    return tuple(dmabufs)
