"""A process that creates GPU iovs: ``python -m usrbio.pooled_client MOUNT COUNT SEED [--hold]``.

It creates COUNT iovs of mixed sizes, up to two at a time, checks that each begins with zeros, and destroys them. Then
it prints the statistics of gdrkit's pool of GPU memory as JSON. With ``--hold`` it keeps the idle memory of the pool
until its standard input is closed. Then it frees the memory, and prints the statistics again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
from typing import TYPE_CHECKING

from gdrkit import cuda, usrbio
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.usrbio.native_types import Iovec

_OPEN_IOVS_MAX = 2
_IOV_BYTES_MIN, _IOV_BYTES_MAX = 4 * KIB, 4 * MIB
_DIRTY_BYTES = b"\xa5" * 64


def _make_and_check(mount: str, device: cuda.Device, length_bytes: int) -> Iovec:
    """Create a GPU iov, check that its first and its last bytes are zeros, and overwrite them."""
    iov = usrbio.make_gpu_iovec(mount, length_bytes=length_bytes)
    with cuda.borrow(device, iov.address, length_bytes=length_bytes) as memory:
        for offset in (0, length_bytes - len(_DIRTY_BYTES)):
            assert memory.read(offset_bytes=offset, length_bytes=len(_DIRTY_BYTES)) == bytes(len(_DIRTY_BYTES))
            memory.write(_DIRTY_BYTES, offset_bytes=offset)
    return iov


def _print_statistics() -> None:
    sys.stdout.write(json.dumps(dataclasses.asdict(usrbio.gpu_pool_statistics())) + "\n")
    sys.stdout.flush()


def _main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("mount")
    parser.add_argument("count", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("--hold", action="store_true")
    options = parser.parse_args(arguments)
    rng = random.Random(options.seed)
    open_iovs: list[Iovec] = []
    iov_ids: set[str] = set()
    with cuda.Device(0) as device:
        for _ in range(options.count):
            if len(open_iovs) == _OPEN_IOVS_MAX or (open_iovs and rng.random() < 0.5):
                open_iovs.pop(rng.randrange(len(open_iovs))).close()
            # The logarithm of the size is uniformly distributed, so that small and large sizes are equally frequent.
            length_bytes = int(
                _IOV_BYTES_MIN * 2 ** rng.uniform(0, (_IOV_BYTES_MAX // _IOV_BYTES_MIN).bit_length() - 1)
            )
            open_iovs.append(_make_and_check(options.mount, device, length_bytes))
            iov_ids.add(open_iovs[-1].id)
        for iov in open_iovs:
            iov.close()
        assert len(iov_ids) == options.count
        _print_statistics()
        if options.hold:
            sys.stdin.read()
            usrbio.trim_gpu_pool()
            _print_statistics()
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
