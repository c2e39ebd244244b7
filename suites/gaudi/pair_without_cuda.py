"""Transfers between memory of a Gaudi and a peer process, without CUDA in either process.

``python -m gaudi.pair_without_cuda`` writes and reads the memory from a peer, checks the bytes by copies of the device,
and prints a JSON object with the libraries and Python modules of both processes.
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

_LENGTH_BYTES = 100_001
_SEED = 20_240_229


def main() -> None:
    """Exchange bytes, and say what both processes had loaded."""
    peer = Peer()
    name = next(info.name for info in verbs.list_nics() if info.active)
    with (
        gaudi.Device(0) as device,
        device.allocate(_LENGTH_BYTES) as memory,
        verbs.Nic.open(name) as nic,
        nic.completion_queue(depth=16) as queue,
        nic.queue_pair(queue) as ours,
        register(memory, [nic]) as registration,
    ):
        theirs = peer.open_nic(name).queue_pair()
        theirs.join(ours)
        theirs.write(registration.remote(nic), seed=_SEED).expect(Status.SUCCESS)
        pattern.check(memory.read(), seed=_SEED)
        memory.write(pattern.payload(_LENGTH_BYTES, seed=_SEED + 1))
        theirs.read(registration.remote(nic), seed=_SEED + 1).completion.expect(Status.SUCCESS)
        print(  # noqa: T201 - its answer.
            json.dumps(
                {
                    "generation": device.generation.value,
                    "libraries": [_files(evidence.libraries()), _files(peer.libraries())],
                    "modules": [sorted({module.partition(".")[0] for module in sys.modules}), sorted(peer.modules())],
                    "mapped": Path("/proc/self/maps").read_text(),
                }
            )
        )
    peer.close()


def _files(libraries: Iterable[evidence.LoadedLibrary]) -> list[str]:
    return sorted({os.path.basename(library.path) for library in libraries})  # noqa: PTH119 - as the kernel wrote it.


if __name__ == "__main__":
    main()
