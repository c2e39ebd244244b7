"""A file of a tier that a program has opened by its logical name, for reads and writes of device or host memory."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING, Self

from gdrkit.errors import Api, ApiError, ClosedResource
from gdrkit.gds.file import File
from gdrkit.handles import Handle
from gdrkit.tiers.routes import observed_route

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from gdrkit.gds.opening import DirectPathMode
    from gdrkit.gds.result import TransferResult
    from gdrkit.tiers.catalogue import Catalogue
    from gdrkit.tiers.folder import TierFolder
    from gdrkit.tiers.routes import TierRoute

__all__ = ["TieredFile"]

_log = logging.getLogger(__name__)


class TieredFile:
    """A file that was opened by its logical name; a context manager.

    A file that is open for reading may be migrated. This object then continues to read the same bytes.

    Parameters
    ----------
    name : str
        Logical name of the file.
    tier_folder : TierFolder
        Folder of the tier that had the file when it was opened.
    descriptor : int
        File descriptor. This object owns it from now on.
    writable : bool
        Whether the file is open for writing.
    catalogue : Catalogue
        The catalogue, which gets the size of the file at close.
    """

    def __init__(
        self, name: str, tier_folder: TierFolder, descriptor: int, *, writable: bool, catalogue: Catalogue
    ) -> None:
        self.name = name
        self.tier = tier_folder.name
        self.writable = writable
        self._catalogue = catalogue
        self._descriptor = descriptor
        self._gds_file_by_direct: dict[str, File] = {}
        self._gds_files_lock = threading.Lock()
        self._recorded_route: TierRoute | None = None  # The route that was last written to the catalogue.
        self._handle = Handle("tiers.file")

    def fileno(self) -> int:
        """Return the file descriptor, for example for ``os.pread``. The caller must not close it."""
        if self._descriptor < 0:
            raise ClosedResource(self.name)
        return self._descriptor

    @property
    def path(self) -> str:
        """A path of this file that is valid while the file is open, also after a migration."""
        return f"/proc/self/fd/{self.fileno()}"

    def read_into(
        self,
        buffer: object,
        *,
        file_offset_bytes: int = 0,
        length_bytes: int | None = None,
        buffer_offset_bytes: int = 0,
        direct: DirectPathMode = "preferred",
    ) -> TransferResult:
        """Read a range of the file into device or host memory, like :meth:`gdrkit.gds.File.read_into`.

        Parameters
        ----------
        buffer : object
            See :func:`gdrkit.gds.describe_buffer`.
        file_offset_bytes, length_bytes, buffer_offset_bytes : int
            Offsets and length of the range. If `length_bytes` is None, the range ends at the end of the
            memory or of the file.
        direct : str
            Whether a direct path between disk and device (without host memory) is ``preferred``, ``required`` or
            ``never`` used.

        Returns
        -------
        TransferResult
            The result, with the route that the bytes took.
        """
        result = self._open_gds_file(direct).read_into(
            buffer,
            file_offset_bytes=file_offset_bytes,
            length_bytes=length_bytes,
            buffer_offset_bytes=buffer_offset_bytes,
        )
        self._record_route(result)
        return result

    def write_from(
        self,
        buffer: object,
        *,
        file_offset_bytes: int = 0,
        length_bytes: int | None = None,
        buffer_offset_bytes: int = 0,
        direct: DirectPathMode = "preferred",
    ) -> TransferResult:
        """Write device or host memory into a range of the file; see :meth:`read_into` and :meth:`sync`."""
        result = self._open_gds_file(direct).write_from(
            buffer,
            file_offset_bytes=file_offset_bytes,
            length_bytes=length_bytes,
            buffer_offset_bytes=buffer_offset_bytes,
        )
        self._record_route(result)
        return result

    def sync(self) -> None:
        """Sync the written data to the disk (fsync)."""
        os.fsync(self.fileno())

    def close(self) -> None:
        """Close the file and update its size in the catalogue. A second close does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        # The stack runs the callbacks in reverse order, each even if another one fails.
        with contextlib.ExitStack() as stack:
            stack.callback(self._handle.release)
            stack.callback(os.close, descriptor)
            if self.writable:
                stack.callback(self._record_size, descriptor)
            # Each of these objects has opened the file again, so it closes its own descriptor.
            for gds_file in self._gds_file_by_direct.values():
                stack.callback(gds_file.close)

    def _open_gds_file(self, direct: DirectPathMode) -> File:
        """Return the :class:`gdrkit.gds.File` for this file, opened by its descriptor's path."""
        with self._gds_files_lock:
            if direct not in self._gds_file_by_direct:
                self._gds_file_by_direct[direct] = File(self.path, "r+" if self.writable else "r", direct=direct)
            return self._gds_file_by_direct[direct]

    def _record_route(self, result: TransferResult) -> None:
        """Write the route between the tier and device memory to the catalogue if it has changed."""
        route = observed_route(result)
        if route is None or route == self._recorded_route:
            return
        with self._log_catalogue_errors("the route of a tier"):
            if self._catalogue.routes().get(self.tier) != route:
                self._catalogue.record_route(self.tier, route)
            self._recorded_route = route

    def _record_size(self, descriptor: int) -> None:
        file_status = os.fstat(descriptor)
        if not file_status.st_nlink:
            return  # The file was removed while it was open.
        with self._log_catalogue_errors("the size of a file"):
            self._catalogue.record_file(self.name, self.tier, file_status)

    @contextlib.contextmanager
    def _log_catalogue_errors(self, subject: str) -> Iterator[None]:
        """Log a warning if the block fails because the catalogue is locked or closed.

        The data of the file is safe, and ``gdrkit tiers check --repair`` corrects the catalogue.
        """
        try:
            yield
        except (ApiError, ClosedResource) as error:
            if isinstance(error, ApiError) and error.api is not Api.SQLITE:
                raise
            _log.warning("%s could not be written to the catalogue: %s", subject, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
