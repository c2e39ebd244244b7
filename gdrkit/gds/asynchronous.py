"""Files for asyncio: :class:`AsyncFile` has the reads and writes of :class:`~gdrkit.gds.File` as coroutines.

A coroutine that is cancelled cancels its transfer, and ends when the last chunk in progress has ended. The memory of
the transfer may be freed or used again afterwards. A :class:`~gdrkit.gds.Transfer` can be awaited too.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

from gdrkit.gds.file import File

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable
    from types import TracebackType

    from gdrkit.gds.opening import Access, DirectPathMode
    from gdrkit.gds.ranges import Range
    from gdrkit.gds.result import TransferResult

__all__ = ["AsyncFile"]


class AsyncFile:
    """An open file whose transfers are awaited. Parameters and errors are the same as in :class:`~gdrkit.gds.File`.

    Attributes
    ----------
    file : File
        The open file, for calls that do not wait for a transfer.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: str = "r",
        *,
        access: Access = "automatic",
        direct: DirectPathMode = "preferred",
    ) -> None:
        self.file = File(path, mode, access=access, direct=direct)

    async def read_into(self, buffer: object, **options: Any) -> TransferResult:  # noqa: ANN401 - see File.
        """Read a range of the file into memory; see :meth:`File.start_read_into <gdrkit.gds.File.start_read_into>`."""
        return await self.file.start_read_into(buffer, **options)

    async def write_from(self, buffer: object, **options: Any) -> TransferResult:  # noqa: ANN401 - see File.
        """Write memory into a range; see :meth:`File.start_write_from <gdrkit.gds.File.start_write_from>`."""
        return await self.file.start_write_from(buffer, **options)

    async def readv(self, buffer: object, ranges: Iterable[Range]) -> TransferResult:
        """Read many ranges into one buffer; see :meth:`File.readv <gdrkit.gds.File.readv>`."""
        return await self.file.start_readv(buffer, ranges)

    async def writev(self, buffer: object, ranges: Iterable[Range]) -> TransferResult:
        """Write parts of one buffer into many ranges; see :meth:`File.writev <gdrkit.gds.File.writev>`."""
        return await self.file.start_writev(buffer, ranges)

    async def close(self) -> None:
        """Wait for the transfers of the file, and close it."""
        await asyncio.get_running_loop().run_in_executor(None, self.file.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
