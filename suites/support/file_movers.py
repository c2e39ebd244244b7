"""Ways of a whole file into device memory and back, in pieces of one size, one piece after the other.

``direct`` is there where it was proven for the file; ``engine`` is gdrkit's copy engine; ``posix`` is what a program
does by itself, pread or pwrite and a copy by the driver. Where writes are durable, each waits for the disk (fdatasync)
after every piece: a call of gdrkit that is told to be durable does.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit import gds
from gdrkit.cuda import PinnedMemory

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack
    from pathlib import Path

    from gdrkit.cuda import CudaMemory, Device

__all__ = ["Movers"]

_DIRECT = frozenset({gds.Route.P2P, gds.Route.NVFS, gds.Route.RDMA})


@dataclass(frozen=True)
class Movers:
    """A file, memory of its size, and the size of a piece; what is opened is closed with `stack`.

    Attributes
    ----------
    durable : bool
        Whether the write of a piece is over when the disk has it.
    """

    path: Path
    memory: CudaMemory
    device: Device
    chunk_bytes: int
    stack: ExitStack
    durable: bool = False

    @property
    def _offsets(self) -> range:
        return range(0, self.memory.length_bytes, self.chunk_bytes)

    def all(self, *, write: bool) -> tuple[dict[str, Callable[[], object]], str]:
        """Each by its name, and why there is none that is direct; empty where there is."""
        found = {"engine": self._gds("never", write=write), "posix": self._posix(write=write)}
        why = self._why_not_direct()
        return found if why else {"direct": self._gds("required", write=write), **found}, why

    def _why_not_direct(self) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gds.FallbackWarning)
            with gds.File(self.path) as file:
                done = file.read_into(self.memory)
        return "" if done.route in _DIRECT else done.why_not_direct or f"the route was {done.route.value}"

    def _gds(self, direct: gds.Direct, *, write: bool) -> Callable[[], object]:
        file = self.stack.enter_context(gds.File(self.path, "r+" if write else "r", direct=direct))

        def move() -> None:
            for at in self._offsets:
                if write:
                    file.write_from(
                        self.memory,
                        file_offset_bytes=at,
                        buffer_offset_bytes=at,
                        length_bytes=self.chunk_bytes,
                        durable=self.durable,
                    )
                else:
                    file.read_into(
                        self.memory, file_offset_bytes=at, buffer_offset_bytes=at, length_bytes=self.chunk_bytes
                    )

        return move

    def _posix(self, *, write: bool) -> Callable[[], object]:
        descriptor = os.open(self.path, os.O_RDWR)
        self.stack.callback(os.close, descriptor)
        stream = self.stack.enter_context(self.device.stream())
        pinned = self.stack.enter_context(PinnedMemory(self.device, self.chunk_bytes))

        def move() -> None:
            for at in self._offsets:
                if write:
                    stream.read_into(self.memory, pinned.view(), offset_bytes=at)
                    stream.synchronize()
                    assert os.pwrite(descriptor, pinned.view(), at) == self.chunk_bytes
                    if self.durable:
                        os.fdatasync(descriptor)
                else:
                    assert os.preadv(descriptor, [pinned.view()], at) == self.chunk_bytes
                    stream.write(self.memory, pinned.view(), offset_bytes=at)
                    stream.synchronize()

        return move
