"""Record of what the processes of one ``gdrkit run`` did with the twins.

Every twin of the run maps the file (``native/twins/model/usage.cpp``). It adds to its counts while it works, so a
process that is killed loses nothing. The file has a header and one slot per process and API.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.errors import Api

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ProcessUse", "create_usage_file", "read_usage"]

# The layout of native/twins/model/usage.hpp.
_HEADER = struct.Struct("<8sII48x")
_SLOT = struct.Struct("<IIIIQQ64s")
_MAGIC = b"GDRKRUN1"
_SLOT_COUNT = 4096
_STATE_READY = 2
_API_OF_NUMBER = {1: Api.VERBS, 2: Api.CUDA, 3: Api.CUFILE, 4: Api.HLTHUNK}


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
    """

    api: Api
    process_id: int
    program: str
    objects_count: int
    moved_bytes: int


def create_usage_file(path: Path) -> None:
    """Create the file with empty slots. It is sparse, so it takes memory only for the slots in use."""
    with path.open("xb") as file:
        file.write(_HEADER.pack(_MAGIC, _SLOT.size, _SLOT_COUNT))
        file.truncate(_HEADER.size + _SLOT.size * _SLOT_COUNT)


def read_usage(path: Path) -> list[ProcessUse]:
    """Return the slots in use, in the order in which the processes opened the twins.

    Every process of the run can write into the file, so slots with impossible values are left out.
    """
    data = path.read_bytes()
    if len(data) != _HEADER.size + _SLOT.size * _SLOT_COUNT or not data.startswith(_MAGIC):
        return []
    uses = []
    for state, api, process_id, _, objects_count, moved_bytes, program in _SLOT.iter_unpack(data[_HEADER.size :]):
        if state == _STATE_READY and api in _API_OF_NUMBER:
            name = program.partition(b"\0")[0].decode("utf-8", "backslashreplace")
            uses.append(ProcessUse(_API_OF_NUMBER[api], process_id, name, objects_count, moved_bytes))
    return uses
