"""Methods to transfer a whole file between disk and device memory, for measurements that compare them.

Each method transfers the file in chunks of the same length, one after the other:

- ``direct``: gdrkit with the direct path. It is omitted if a first read of the file is not direct.
- ``engine``: gdrkit with its copy engine, through pinned host memory.
- ``posix``: pread or pwrite, and a copy by the CUDA driver, as in a program without gdrkit.

A durable write calls fdatasync after each chunk.
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

__all__ = ["FileTransferMethods"]

_DIRECT_ROUTES = frozenset({gds.Route.P2P, gds.Route.NVFS, gds.Route.RDMA})


@dataclass(frozen=True)
class FileTransferMethods:
    """The methods for one file and one memory.

    Attributes
    ----------
    path : Path
        The file.
    memory : CudaMemory
        Device memory that is as long as the file.
    device : Device
        The device of the memory.
    chunk_bytes : int
        Length of each transfer.
    stack : ExitStack
        Stack of the caller. When the caller closes it, the files are closed and the buffers are freed.
    durable : bool
        Whether each write waits until the disk has the data.
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

    def get_methods(self, *, is_write: bool) -> tuple[dict[str, Callable[[], object]], str]:
        """Return the methods by name, and why ``direct`` is omitted (an empty text if it is included).

        Each method writes the whole file if `is_write` is true, else it reads the whole file.
        """
        methods = {
            "engine": self._make_gdrkit_method("never", is_write=is_write),
            "posix": self._make_posix_method(is_write=is_write),
        }
        fallback_reason = self._find_fallback_reason()
        if not fallback_reason:
            methods = {"direct": self._make_gdrkit_method("required", is_write=is_write), **methods}
        return methods, fallback_reason

    def _find_fallback_reason(self) -> str:
        """Read the file once, and return why the transfer was not direct, or an empty text if it was."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gds.FallbackWarning)
            with gds.File(self.path) as file:
                transfer_result = file.read_into(self.memory)
        if transfer_result.route in _DIRECT_ROUTES:
            return ""
        return transfer_result.why_not_direct or f"the route was {transfer_result.route.value}"

    def _make_gdrkit_method(self, direct: gds.DirectPathMode, *, is_write: bool) -> Callable[[], object]:
        file = self.stack.enter_context(gds.File(self.path, "r+" if is_write else "r", direct=direct))

        def transfer_file() -> None:
            for offset in self._offsets:
                if is_write:
                    file.write_from(
                        self.memory,
                        file_offset_bytes=offset,
                        buffer_offset_bytes=offset,
                        length_bytes=self.chunk_bytes,
                        durable=self.durable,
                    )
                else:
                    file.read_into(
                        self.memory, file_offset_bytes=offset, buffer_offset_bytes=offset, length_bytes=self.chunk_bytes
                    )

        return transfer_file

    def _make_posix_method(self, *, is_write: bool) -> Callable[[], object]:
        file_fd = os.open(self.path, os.O_RDWR)
        self.stack.callback(os.close, file_fd)
        stream = self.stack.enter_context(self.device.stream())
        pinned_memory = self.stack.enter_context(PinnedMemory(self.device, self.chunk_bytes))

        def transfer_file() -> None:
            for offset in self._offsets:
                if is_write:
                    stream.read_into(self.memory, pinned_memory.view(), offset_bytes=offset)
                    stream.synchronize()
                    assert os.pwrite(file_fd, pinned_memory.view(), offset) == self.chunk_bytes
                    if self.durable:
                        os.fdatasync(file_fd)
                else:
                    assert os.preadv(file_fd, [pinned_memory.view()], offset) == self.chunk_bytes
                    stream.write(self.memory, pinned_memory.view(), offset_bytes=offset)
                    stream.synchronize()

        return transfer_file
