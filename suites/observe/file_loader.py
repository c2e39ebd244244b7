"""Program that loads a file into the first GPU by gdrkit, kvikio or torch, for the cases of `gdrkit observe`.

`python -m observe.file_loader LOADER PATH` loads the file by `gdrkit`, `kvikio` or `torch`. Then it reads the last
block back from the GPU and checks it. It reads no more than that, so that nearly all PCIe traffic is the load.
`python -m observe.file_loader create-for-LOADER PATH BLOCKS` writes the file.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdrkit import pattern
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BLOCK_BYTES", "LOADERS", "main"]

# A file consists of copies of one block.
BLOCK_BYTES = MIB
_SEED = 0x6F6273


class _CudaArray:
    """Device memory with the interface that kvikio needs."""

    def __init__(self, address: int, length_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (length_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
        }


def load_by_gdrkit(path: Path) -> bytes:
    """Load the file by the copy engine of gdrkit, and return its last block, read back from the GPU."""
    from gdrkit import cuda, gds

    size_bytes = path.stat().st_size
    with gds.File(path, direct="never") as file, cuda.Device(0) as device, device.allocate(size_bytes) as memory:
        file.read_into(memory)
        return memory.read(length_bytes=BLOCK_BYTES, offset_bytes=size_bytes - BLOCK_BYTES)


def load_by_kvikio(path: Path) -> bytes:
    """Load the file by kvikio, and return its last block, read back from the GPU."""
    from gdrkit import cuda

    kvikio: Any = importlib.import_module("kvikio")
    importlib.import_module("kvikio.defaults").set({"compat_mode": kvikio.CompatMode.ON, "num_threads": 16})
    with cuda.Device(0) as device, device.allocate(path.stat().st_size) as memory, device.current():
        with kvikio.CuFile(str(path)) as file:
            file.read(_CudaArray(memory.address, memory.length_bytes))
        return memory.read(length_bytes=BLOCK_BYTES, offset_bytes=memory.length_bytes - BLOCK_BYTES)


def load_by_torch(path: Path) -> bytes:
    """Load the file by torch, and return its last block, read back from the GPU."""
    torch: Any = importlib.import_module("torch")
    tensor = torch.load(path, map_location="cuda:0")
    return bytes(tensor[-BLOCK_BYTES:].cpu().numpy())


LOADERS: dict[str, Callable[[Path], bytes]] = {
    "gdrkit": load_by_gdrkit,
    "kvikio": load_by_kvikio,
    "torch": load_by_torch,
}


def create_file(loader_name: str, path: Path, blocks_count: int) -> None:
    """Write a file of `blocks_count` equal blocks, in the format that the loader reads."""
    block = pattern.payload(BLOCK_BYTES, seed=_SEED)
    if loader_name == "torch":
        torch: Any = importlib.import_module("torch")
        torch.save(torch.frombuffer(bytearray(block), dtype=torch.uint8).repeat(blocks_count), path)
        return
    with path.open("wb") as file:
        for _ in range(blocks_count):
            file.write(block)


def main() -> None:
    """Create a file, or load it and check its last block."""
    action, path = sys.argv[1], Path(sys.argv[2])
    if action.startswith("create-for-"):
        create_file(action.removeprefix("create-for-"), path, int(sys.argv[3]))
    elif LOADERS[action](path) != pattern.payload(BLOCK_BYTES, seed=_SEED):
        sys.exit("the last block on the GPU differs from the last block of the file")


if __name__ == "__main__":
    main()
