"""Open files of a tier."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING, Self

from gdrkit.errors import Api, ApiError, ClosedResource
from gdrkit.gds.file import File
from gdrkit.handles import Handle
from gdrkit.tiers.routes import seen

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from gdrkit.gds.file import Direct
    from gdrkit.gds.transfer import Transferred
    from gdrkit.tiers.catalogue import Catalogue
    from gdrkit.tiers.folder import TierFolder
    from gdrkit.tiers.routes import TierRoute

__all__ = ["TieredFile"]

_log = logging.getLogger(__name__)


class TieredFile:
    """A file that was opened by its logical name; a context manager.

    A file that is open for reading may be migrated meanwhile. It stays readable here.

    Parameters
    ----------
    name : str
        Logical name of the file.
    tier : TierFolder
        Tier of the file when it was opened.
    descriptor : int
        File descriptor. This object owns it from now on.
    writes : bool
        Whether the file is open for writing.
    catalogue : Catalogue
        The catalogue, which gets the size of the file at close.
    """

    def __init__(self, name: str, tier: TierFolder, descriptor: int, *, writes: bool, catalogue: Catalogue) -> None:
        self.name = name
        self.tier = tier.name
        self.writes = writes
        self._catalogue = catalogue
        self._descriptor = descriptor
        self._files: dict[str, File] = {}
        self._opening = threading.Lock()
        self._route: TierRoute | None = None  # The route that was last written to the catalogue.
        self._handle = Handle("tiers.file")

    def fileno(self) -> int:
        """Return the file descriptor, for ``os.pread`` and the like. This object still owns it."""
        if self._descriptor < 0:
            raise ClosedResource(self.name)
        return self._descriptor

    @property
    def path(self) -> str:
        """A path that leads to exactly this file while it is open, wherever it is migrated."""
        return f"/proc/self/fd/{self.fileno()}"

    def read_into(
        self,
        buffer: object,
        *,
        file_offset_bytes: int = 0,
        length_bytes: int | None = None,
        buffer_offset_bytes: int = 0,
        direct: Direct = "preferred",
    ) -> Transferred:
        """Read a range into device or host memory, as :meth:`gdrkit.gds.File.read_into`.

        Parameters
        ----------
        buffer : object
            See :func:`gdrkit.gds.target_of`.
        file_offset_bytes, length_bytes, buffer_offset_bytes : int
            Offsets and length of the range. `length_bytes` None: up to the end of the memory or of the file.
        direct : str
            Whether a path between disk and device without host memory is ``preferred``, ``required`` or ``never`` used.

        Returns
        -------
        Transferred
            The result, with the route that the bytes took.
        """
        moved = self._transfers(direct).read_into(
            buffer,
            file_offset_bytes=file_offset_bytes,
            length_bytes=length_bytes,
            buffer_offset_bytes=buffer_offset_bytes,
        )
        self._keep(moved)
        return moved

    def write_from(
        self,
        buffer: object,
        *,
        file_offset_bytes: int = 0,
        length_bytes: int | None = None,
        buffer_offset_bytes: int = 0,
        direct: Direct = "preferred",
    ) -> Transferred:
        """Write device or host memory into a range; see :meth:`read_into` and :meth:`sync`."""
        moved = self._transfers(direct).write_from(
            buffer,
            file_offset_bytes=file_offset_bytes,
            length_bytes=length_bytes,
            buffer_offset_bytes=buffer_offset_bytes,
        )
        self._keep(moved)
        return moved

    def sync(self) -> None:
        """Sync the written data to the disk (fsync)."""
        os.fsync(self.fileno())

    def close(self) -> None:
        """Close the file and update its size in the catalogue. A second close does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        with contextlib.ExitStack() as parts:
            parts.callback(self._handle.release)
            parts.callback(os.close, descriptor)
            if self.writes:
                parts.callback(self._tell, descriptor)
            # These files have their own descriptors of the same file.
            for file in self._files.values():
                parts.callback(file.close)

    def _transfers(self, direct: Direct) -> File:
        """Return the :class:`gdrkit.gds.File` for this file, opened by its descriptor's path."""
        with self._opening:
            if direct not in self._files:
                self._files[direct] = File(self.path, "r+" if self.writes else "r", direct=direct)
            return self._files[direct]

    def _keep(self, moved: Transferred) -> None:
        """Write the route of the tier's bytes to the catalogue if it has changed."""
        route = seen(moved)
        if route is None or route == self._route:
            return
        with self._telling("the route of a tier"):
            if self._catalogue.routes().get(self.tier) != route:
                self._catalogue.keep_route(self.tier, route)
            self._route = route

    def _tell(self, descriptor: int) -> None:
        info = os.fstat(descriptor)
        if not info.st_nlink:
            return  # The file was removed while it was open.
        with self._telling("the size of a file"):
            self._catalogue.see(self.name, self.tier, info)

    @contextlib.contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        """Log a warning if the catalogue is locked or closed. The data is safe; `check` corrects the catalogue."""
        try:
            yield
        except (ApiError, ClosedResource) as error:
            if isinstance(error, ApiError) and error.api is not Api.SQLITE:
                raise
            _log.warning("the catalogue does not know %s: %s", what, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
