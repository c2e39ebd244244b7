"""libfuse3 by mfusepy: a mount whose requests are answered by an object of ours.

Level 5. The only file that names mfusepy. The kernel's requests come on threads of libfuse; an OSError becomes its
errno, and so does the errno of an error of a real API.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import importlib.util
import logging
import os
import threading
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

from gdrkit.errors import Api, ApiError, GdrkitError, Reason, Unsupported, UsageError, errno_name
from gdrkit.loader import setup_missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["Caller", "Loop", "caller", "copy_in", "copy_out", "missing"]

_INSTALL = "pip install 'gdrkit[fuse]', and the package that Debian calls libfuse3-3"
_NAME = "FUSE_LIBRARY_NAME"
_MOUNTED_S = 20
_THREADS = 10
_WRITE_BYTES_MAX = 1 << 20
_log = logging.getLogger(__name__)

# By what libfuse calls them.
_CALLBACKS = (
    *("getattr", "readdir", "readlink", "mkdir", "rmdir", "unlink", "symlink", "link", "rename"),
    *("chmod", "chown", "truncate", "utimens", "statfs"),
    *("opendir", "releasedir", "create", "open", "read", "write", "fsync", "release", "ioctl"),
)


def missing() -> str | None:
    """What is not installed, with what to do; None when both are there. Nothing is opened."""
    if importlib.util.find_spec("mfusepy") is None:
        return "the Python module mfusepy is not installed: pip install 'gdrkit[fuse]'"
    if ctypes.util.find_library("fuse3") is None:
        return "libfuse3 is not installed: install the package fuse3"
    return None


class Caller(NamedTuple):
    """Who sent the request that this thread answers."""

    uid: int
    gid: int
    process_id: int


def caller() -> Caller:
    """Who sent the request that this thread answers."""
    return Caller(*_module().fuse_get_context())


def copy_in(address: int, length_bytes: int) -> bytes:
    """What an ioctl came with."""
    return ctypes.string_at(address, length_bytes)


def copy_out(address: int, data: bytes) -> None:
    """What an ioctl goes back with; the request says how much that is."""
    ctypes.memmove(address, data, len(data))


class Loop:
    """A mount and the thread that serves it.

    Parameters
    ----------
    mount : Path
        An empty folder, resolved.
    operations : object
        With a method for each request that it answers, named as libfuse names it.
    source : str
        What the table of mounts says of where it comes from.

    Raises
    ------
    SetupMissing
        mfusepy or libfuse3 is not there, or the kernel did not let this user mount.
    """

    def __init__(self, mount: Path, operations: object, *, source: str) -> None:
        self._mount, self._source = mount, source
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._answers = _Answers(operations, self._ready)
        self._make = _fuse_class(_module())
        # libfuse goes to the root folder when it begins.
        here = os.open(".", os.O_PATH | os.O_CLOEXEC)
        try:
            self._thread = threading.Thread(target=self._run, name="gdrkit-fuse", daemon=True)
            self._thread.start()
            while not self._ready.wait(0.05) and self._thread.is_alive() and self._failure is None:
                pass
        finally:
            os.fchdir(here)
            os.close(here)
        if not self._ready.is_set():
            self._thread.join(_MOUNTED_S)
            raise setup_missing(
                operation=f"fuse_mount {mount}",
                text="libfuse said why on standard error",
                what_to_do="let this user mount: be root with /dev/fuse, or install fuse3 (fusermount3)",
                default_errno=errno.EPERM,
                api=Api.FUSE,
            ) from self._failure

    @property
    def is_running(self) -> bool:
        """Whether the mount is still served; it ends when somebody unmounts it."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> bool:
        """Wait for its end, and say whether it came."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        options: dict[str, object] = {"fsname": self._source, "subtype": "hf3fs", "default_permissions": True}
        version = _module()
        if (version.fuse_version_major, version.fuse_version_minor) >= (3, 12):
            options["max_threads"] = _THREADS
        try:
            self._make(self._answers, str(self._mount), foreground=True, **options)
        except BaseException as error:
            self._failure = error
            if self._ready.is_set():
                _log.exception("the FUSE loop of %s ended", self._mount)
            if not isinstance(error, Exception):
                raise


class _Answers:
    """The callbacks that mfusepy looks for, each with its errors as errnos."""

    use_ns = True
    # After a file was unlinked there is no path, only a handle.
    flag_nopath = True
    flag_nullpath_ok = True

    def __init__(self, operations: object, ready: threading.Event) -> None:
        self._ready = ready
        for name in _CALLBACKS:
            method = getattr(operations, name, None)
            if method is not None:
                setattr(self, name, _with_errno(method))

    def init_with_config(self, connection: Any, config: Any) -> None:
        """Set the mount up: inodes are the server's, and nothing is remembered, since rings write behind its back."""
        if connection is not None:
            connection.max_write = _WRITE_BYTES_MAX
        if config is not None:
            config.use_ino = config.direct_io = 1
            config.entry_timeout = config.attr_timeout = config.negative_timeout = 0.0
        self._ready.set()


def _with_errno(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def answer(*arguments: Any) -> Any:
        try:
            return method(*arguments)
        except OSError:
            raise
        except GdrkitError as error:
            number = error.errno if isinstance(error, ApiError) else None
            if number is None:
                number = errno.EINVAL if isinstance(error, UsageError) else errno.EIO
                _log.warning("%s is answered with %s: %s", method.__name__, errno_name(number), error)
            raise OSError(number, os.strerror(number)) from error

    return answer


def _fuse_class(module: Any) -> Any:
    """mfusepy's class, with what it leaves out: the flags of a rename, and handles of files that have no name."""

    class Fuse(module.FUSE):  # type: ignore[misc] # mfusepy is known when it is there.
        def rename_fuse_3(self, old: bytes, new: bytes, flags: int) -> int:
            return self.operations.rename(os.fsdecode(old), os.fsdecode(new), flags) or 0

        def truncate_fuse_3(self, path: bytes | None, length: int, info: Any) -> int:
            return self.operations.truncate(_decoded(path), length, _handle(info)) or 0

        def chmod_fuse_3(self, path: bytes | None, mode: int, info: Any) -> int:
            return self.operations.chmod(_decoded(path), mode, _handle(info)) or 0

        def chown_fuse_3(self, path: bytes | None, uid: int, gid: int, info: Any) -> int:
            return self.operations.chown(_decoded(path), uid, gid, _handle(info)) or 0

        def utimens_fuse_3(self, path: bytes | None, times: Any, info: Any) -> int:
            both = (times[0].actime, times[0].modtime) if times else (None, None)
            return self.operations.utimens(_decoded(path), *map(_nanoseconds, both), _handle(info)) or 0

    return Fuse


# Linux, sys/stat.h.
_UTIME_NOW, _UTIME_OMIT = (1 << 30) - 1, (1 << 30) - 2


def _nanoseconds(given: Any) -> int | None:
    """ns since 1970; -1 for now; None for what stays."""
    if given is None or given.tv_nsec == _UTIME_NOW:
        return -1
    return None if given.tv_nsec == _UTIME_OMIT else int(given.tv_sec * 10**9 + given.tv_nsec)


def _decoded(path: bytes | None) -> str | None:
    return None if path is None else os.fsdecode(path)


def _handle(info: Any) -> int | None:
    return int(info.contents.fh) if info else None


@contextmanager
def _library_named(name: str) -> Iterator[None]:
    before = os.environ.get(_NAME)
    os.environ.setdefault(_NAME, name)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_NAME, None)


_lock = threading.Lock()


def _module() -> Any:
    with _lock, _library_named("fuse3"):
        try:
            import mfusepy
        except ModuleNotFoundError as error:
            raise setup_missing(
                operation="import mfusepy",
                text="libfuse said why on standard error",
                what_to_do=_INSTALL,
                default_errno=errno.ENOENT,
            ) from error
        except (OSError, AttributeError) as error:
            raise setup_missing(
                operation="dlopen libfuse3.so.3",
                text="libfuse said why on standard error",
                what_to_do=_INSTALL,
                default_errno=errno.ENOENT,
            ) from error
    if mfusepy.fuse_version_major != 3:  # noqa: PLR2004 - its number is its name.
        raise Unsupported(
            api=Api.FUSE,
            operation="fuse_version",
            status=None,
            status_name=f"libfuse {mfusepy.fuse_version_major}",
            reason=Reason.LIBRARY_WRONG_ABI,
            what_to_do=_INSTALL,
        )
    return mfusepy
