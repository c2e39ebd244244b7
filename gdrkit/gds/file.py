"""Files whose bytes are read into, and written from, device or host memory.

The result of each call reports the route that its bytes took. If a direct path is proven for a file, it is used.
Otherwise the copy engine moves the bytes, and one warning names the cause.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from gdrkit.errors import ApiError, ClosedResource, UsageError
from gdrkit.gds import direct as direct_paths
from gdrkit.gds._native import api_error, call, native
from gdrkit.gds.engine import engine_for
from gdrkit.gds.opening import open_regular, os_error
from gdrkit.gds.ranges import check_range, extents_of, length_in, released_on_error
from gdrkit.gds.target import HOST, Target, target_of
from gdrkit.gds.transfer import Route, Transfer, TransferFailed, Transferred, TransferSet, Work, ended
from gdrkit.handles import Handle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from gdrkit.gds.ranges import Range

__all__ = ["Access", "Direct", "File"]

Access = Literal["automatic", "buffered", "direct"]
Direct = Literal["preferred", "required", "never"]

_MODES = {
    "r": os.O_RDONLY,
    "r+": os.O_RDWR,
    "w": os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    "x": os.O_RDWR | os.O_CREAT | os.O_EXCL,
}


class File:
    """An open file, for transfers to and from device or host memory.

    Parameters
    ----------
    path : str or path-like
        Path of a regular file.
    mode : str
        ``r`` to read, ``r+`` to read and write, ``w`` to write and truncate or create, ``x`` to create a new file only.
    access : str
        I/O path of the copy engine: ``automatic`` reads cached ranges from the page cache and others
        by O_DIRECT, ``buffered`` always uses the page cache, ``direct`` never does.
    direct : str
        Whether a path between disk and device without host memory is ``preferred``, ``required`` (calls fail if none is
        proven), or ``never`` used.

    Raises
    ------
    ApiError
        The kernel does not open the file: ENOENT, EACCES, EISDIR ... .
    UsageError
        It is not a regular file, or an argument is not one of the allowed values.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: str = "r",
        *,
        access: Access = "automatic",
        direct: Direct = "preferred",
    ) -> None:
        if mode not in _MODES:
            message = f"mode must be one of {', '.join(map(repr, _MODES))}, not {mode!r}"
            raise UsageError(message)
        _check_choices(access, direct)
        self._own(open_regular(os.fspath(path), _MODES[mode]), os.fspath(path), mode != "r", access, direct)

    @classmethod
    def from_descriptor(
        cls, fd: int, *, path: str, writable: bool, access: Access = "automatic", direct: Direct = "preferred"
    ) -> Self:
        """Return a File for the descriptor of an open regular file. The File owns it; it is closed on failure, too.

        Parameters
        ----------
        fd : int
            The descriptor.
        path : str
            Path of the file, for errors.
        writable : bool
            Whether the descriptor is open for writing.
        access, direct : str
            See the class.
        """
        try:
            _check_choices(access, direct)
            made = cls.__new__(cls)
        except BaseException:
            os.close(fd)
            raise
        made._own(fd, path, writable, access, direct)  # noqa: SLF001 - same class.
        return made

    def _own(self, fd: int, path: str, writable: bool, access: Access, direct: Direct) -> None:  # noqa: FBT001
        self.path = path
        self.access: Access = access
        self.direct: Direct = direct
        self.writable = writable
        try:
            self._native: Any = native().OpenFile(fd)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        self._paths: dict[int, direct_paths.Verdict] = {}
        self._proving = threading.Lock()
        # Every transfer takes the lock twice. A Condition would add a call in Python to each.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._users_count = 0  # Calls that use the descriptor now. close() waits for them.
        self._is_closing = False
        self._transfers = TransferSet()
        self._handle = Handle("gds.file")

    @property
    def closed(self) -> bool:
        """Whether the file was closed."""
        return self._fd < 0

    @property
    def size_bytes(self) -> int:
        """Current size of the file, in bytes."""
        return os.fstat(self.fileno()).st_size

    def fileno(self) -> int:
        """Return the file descriptor. This object still owns it."""
        if self._fd < 0:
            raise ClosedResource(self.path)
        return self._fd

    def cached_share(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> float:
        """Return the share of a range that is in the page cache, from 0 to 1."""
        self.fileno()
        length_bytes = max(self.size_bytes - offset_bytes, 0) if length_bytes is None else length_bytes
        check_range("range", offset_bytes, length_bytes)
        if length_bytes == 0:
            return 0.0
        cached, pages = call(self._native.residency, offset_bytes, length_bytes)
        return cached / pages if pages else 0.0

    def read_into(
        self,
        buffer: object,
        *,
        file_offset_bytes: int = 0,
        length_bytes: int | None = None,
        buffer_offset_bytes: int = 0,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Transferred:
        """Read a range of the file into memory, and wait until it is complete.

        Parameters
        ----------
        buffer : object
            See :func:`gdrkit.gds.target_of`.
        file_offset_bytes : int
            Start of the range in the file, in bytes.
        length_bytes : int or None
            Size of the range in bytes. None: up to the end of the memory or of the file, whichever comes first.
        buffer_offset_bytes : int
            Offset in the memory of the first byte.
        on_progress : callable or None
            See :meth:`Transfer.result`.

        Raises
        ------
        TransferFailed
            See :meth:`Transfer.result`. END_OF_FILE: the file has fewer bytes than requested.
        UsageError
            A size or an offset is invalid, or the memory cannot be used.
        ClosedResource
            The file or the memory was closed.
        """
        if on_progress is None:
            target = target_of(buffer, writable=True)
            try:
                length = length_in(target, buffer_offset_bytes, length_bytes)
                if length <= native().SMALL_BYTES_MAX and self._takes_engine(target):
                    exact = length_bytes is not None
                    return self._small(target, file_offset_bytes, length, buffer_offset_bytes, write=False, exact=exact)
            finally:
                target.release()
        return self.start_read_into(
            buffer,
            file_offset_bytes=file_offset_bytes,
            length_bytes=length_bytes,
            buffer_offset_bytes=buffer_offset_bytes,
        ).result(on_progress=on_progress)

    def write_from(
        self,
        buffer: object,
        *,
        file_offset_bytes: int = 0,
        length_bytes: int | None = None,
        buffer_offset_bytes: int = 0,
        durable: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Transferred:
        """Write memory into a range of the file, and wait until the kernel has the data.

        Parameters and errors are those of :meth:`read_into`. If `length_bytes` is None, the memory is written up to its
        end.

        Parameters
        ----------
        durable : bool
            Wait until the disk has the data. The bytes then bypass the page cache, unless the file's `access` says
            otherwise: a copy in the page cache would have to be written back anyway.
        """
        return self.start_write_from(
            buffer,
            file_offset_bytes=file_offset_bytes,
            length_bytes=length_bytes,
            buffer_offset_bytes=buffer_offset_bytes,
            durable=durable,
        ).result(on_progress=on_progress)

    def readv(self, buffer: object, ranges: Iterable[Range]) -> Transferred:
        """Read many ranges into one memory as one transfer. Thousands of small ranges cost one copy to the device.

        Parameters
        ----------
        buffer : object
            See :func:`gdrkit.gds.target_of`.
        ranges : iterable
            (file offset, length) for ranges that follow each other in memory, or (file offset, length, buffer offset).
        """
        return self.start_readv(buffer, ranges).result()

    def writev(self, buffer: object, ranges: Iterable[Range]) -> Transferred:
        """Write parts of one memory into many ranges as one transfer; see :meth:`readv`."""
        return self.start_writev(buffer, ranges).result()

    def start_read_into(
        self,
        buffer: object,
        *,
        file_offset_bytes: int = 0,
        length_bytes: int | None = None,
        buffer_offset_bytes: int = 0,
    ) -> Transfer:
        """Start :meth:`read_into` and return its future."""
        target = target_of(buffer, writable=True)
        with released_on_error(target):
            length = length_in(target, buffer_offset_bytes, length_bytes)
            check_range("file range", file_offset_bytes, length)
            if length_bytes is None:
                length = min(length, max(self.size_bytes - file_offset_bytes, 0))
            return self._start(
                target, [0, file_offset_bytes, target.address + buffer_offset_bytes, length], write=False
            )

    def start_write_from(
        self,
        buffer: object,
        *,
        file_offset_bytes: int = 0,
        length_bytes: int | None = None,
        buffer_offset_bytes: int = 0,
        durable: bool = False,
    ) -> Transfer:
        """Start :meth:`write_from` and return its future."""
        target = target_of(buffer, writable=False)
        with released_on_error(target):
            length = length_in(target, buffer_offset_bytes, length_bytes)
            check_range("file range", file_offset_bytes, length)
            extents = [0, file_offset_bytes, target.address + buffer_offset_bytes, length]
            return self._start(target, extents, write=True, durable=durable)

    def start_readv(self, buffer: object, ranges: Iterable[Range]) -> Transfer:
        """Start :meth:`readv` and return its future."""
        target = target_of(buffer, writable=True)
        with released_on_error(target):
            return self._start(target, extents_of(target, ranges), write=False)

    def start_writev(self, buffer: object, ranges: Iterable[Range]) -> Transfer:
        """Start :meth:`writev` and return its future."""
        target = target_of(buffer, writable=False)
        with released_on_error(target):
            return self._start(target, extents_of(target, ranges), write=True)

    def sync(self) -> None:
        """Wait until the written data is on the disk (fdatasync)."""
        self._begin_use()
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise os_error("fdatasync", self.path, error) from error
        finally:
            self._end_use()

    def close(self) -> None:
        """Wait for the transfers of the file, including those that other threads are starting, and close it.

        A second close does nothing. A close during another close waits for the first.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._is_closing)
            if self._fd < 0:
                return
            self._is_closing = True
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._users_count == 0)
            for each in self._transfers.all():
                each.exception()
            for verdict in self._paths.values():
                verdict.close()
            self._paths.clear()
            self._native = None
            fd, self._fd = self._fd, -1
            os.close(fd)
            self._handle.release()
        finally:
            with self._changed:
                self._is_closing = False
                self._changed.notify_all()

    def _begin_use(self) -> None:
        with self._lock:
            if self._fd < 0 or self._is_closing:
                raise ClosedResource(self.path)
            self._users_count += 1

    def _end_use(self) -> None:
        with self._lock:
            self._users_count -= 1
            if self._is_closing:
                self._changed.notify_all()

    def _start(self, target: Target, extents: Sequence[int], *, write: bool, durable: bool = False) -> Transfer:
        self._begin_use()
        try:
            if write and not self.writable:
                message = f"{self.path} was opened to read only"
                raise UsageError(message, what_to_do="open it with mode 'r+' or 'w'")
            work, why = self._work(target, extents, write=write, durable=durable)
            lengths = extents[3::4]
            arguments = {"path": self.path, "device_index": target.device_index, "length_bytes": sum(lengths)}
            if len(lengths) == 1:
                arguments["file_offset_bytes"] = extents[1]
            return Transfer(
                work,
                lengths,
                (target,),
                arguments,
                must_fill=True,
                why_not_direct=why,
                direct_required=self.direct == "required",
                keep=(self._native, self),
                group=self._transfers,
            )
        finally:
            self._end_use()

    def _work(self, target: Target, extents: Sequence[int], *, write: bool, durable: bool) -> tuple[Work, str]:
        known = self._paths.get(target.device_index)
        why = "" if known is None else known.why
        if not self._takes_engine(target):
            verdict = self._offered(target.device_index, extents)
            if verdict.path is not None:
                return verdict.path.submit(write=write, extents=extents, durable=durable), ""
            why = direct_paths.fell_back(verdict, self.path, required=self.direct == "required")
        work = engine_for(target.device_index).submit(
            write=write,
            device_index=target.device_index,
            files=[self._native],
            extents=extents,
            access="direct" if durable and self.access == "automatic" else self.access,
            durable=durable,
        )
        return work, why

    def _takes_engine(self, target: Target) -> bool:
        """Return whether the copy engine is used without a probe for a direct path and without a warning."""
        if self.direct == "never" or (target.device_index == HOST and self.direct == "preferred"):
            return True
        verdict = self._paths.get(target.device_index)
        return verdict is not None and verdict.path is None and self.direct == "preferred"

    def _offered(self, device_index: int, extents: Sequence[int]) -> direct_paths.Verdict:
        """Return the verdict for one transfer. A path may be proven for the file and still not fit these ranges."""
        verdict = self._verdict(device_index)
        why = "" if verdict.path is None else verdict.path.why_not(extents)
        return direct_paths.Verdict(None, why) if why else verdict

    def _verdict(self, device_index: int) -> direct_paths.Verdict:
        if device_index == HOST:
            return direct_paths.Verdict(None, "the memory is the host's")
        with self._proving:
            if device_index not in self._paths:
                self._paths[device_index] = direct_paths.prove(self.fileno(), device_index)
            return self._paths[device_index]

    def _small(self, target: Target, offset: int, length: int, at: int, *, write: bool, exact: bool) -> Transferred:
        """Move a short range on the calling thread, which has the lowest latency."""
        began = time.monotonic()
        check_range("file range", offset, length)
        self._begin_use()
        try:
            moved, failure = engine_for(target.device_index).transfer_small(
                write, self._native, offset, target.address + at, length, target.device_index
            )
        finally:
            self._end_use()
        verdict = self._paths.get(target.device_index)
        why = "" if verdict is None else verdict.why
        result = Transferred(moved, Route.ENGINE, 0, (moved,), time.monotonic() - began, why)
        if failure is None and (moved == length or not exact):
            return result
        arguments = {"path": self.path, "file_offset_bytes": offset, "length_bytes": length}
        raise _failed(failure, arguments, result)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"File({self.path!r}{', closed' if self.closed else ''})"


def _check_choices(access: str, direct: str) -> None:
    for what, value, choices in (("access", access, get_args(Access)), ("direct", direct, get_args(Direct))):
        if value not in choices:
            message = f"{what} must be one of {', '.join(map(repr, choices))}, not {value!r}"
            raise UsageError(message)


def _failed(failure: Any, arguments: dict[str, object], result: Transferred) -> ApiError:  # noqa: ANN401 - native object.
    arguments = {**arguments, "transferred_bytes": result.bytes}
    if failure is None:
        error: ApiError = ended(arguments, "the file ended")
    else:
        error = api_error(failure, arguments=arguments, kind=TransferFailed)
    if isinstance(error, TransferFailed):
        error.transferred = result
    return error
