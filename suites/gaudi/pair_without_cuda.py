"""A program that transfers data between memory of a Gaudi and a peer process, without CUDA in either process.

test_without_cuda.py runs it as ``python -m gaudi.pair_without_cuda``. The program starts a peer process, which writes
and reads the memory by RDMA. The program checks the bytes by copies that the device makes. It prints a JSON object with
the generation of the Gaudi, the libraries and Python modules of both processes, and the text of /proc/self/maps.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit import evidence, gaudi, pattern, verbs
from gdrkit.harness.peer import Peer
from gdrkit.registration import register
from gdrkit.verbs import Status

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["main"]

_MEMORY_BYTES = 100_001
_SEED = 20_240_229


def main() -> None:
    """Transfer bytes in both directions, and print what both processes have loaded."""
    peer = Peer()
    nic_name = next(info.name for info in verbs.list_nics() if info.active)
    with (
        gaudi.Device(0) as device,
        device.allocate(_MEMORY_BYTES) as memory,
        verbs.Nic.open(nic_name) as nic,
        nic.completion_queue(depth=16) as completion_queue,
        nic.queue_pair(completion_queue) as queue_pair,
        register(memory, [nic]) as registration,
    ):
        peer_pair = peer.open_nic(nic_name).queue_pair()
        peer_pair.connect_with(queue_pair)
        peer_pair.write(registration.remote(nic), seed=_SEED).expect(Status.SUCCESS)
        pattern.check(memory.read(), seed=_SEED)
        memory.write(pattern.payload(_MEMORY_BYTES, seed=_SEED + 1))
        peer_pair.read(registration.remote(nic), seed=_SEED + 1).completion.expect(Status.SUCCESS)
        print(  # noqa: T201 - the result of the program.
            json.dumps(
                {
                    "generation": device.generation.value,
                    "libraries": [_list_file_names(evidence.libraries()), _list_file_names(peer.libraries())],
                    "modules": [sorted({module.partition(".")[0] for module in sys.modules}), sorted(peer.modules())],
                    "memory_map": Path("/proc/self/maps").read_text(),
                }
            )
        )
    peer.close()


def _list_file_names(libraries: Iterable[evidence.LoadedLibrary]) -> list[str]:
    return sorted({os.path.basename(library.path) for library in libraries})  # noqa: PTH119 - the kernel may add a suffix to the path.


if __name__ == "__main__":
    main()
