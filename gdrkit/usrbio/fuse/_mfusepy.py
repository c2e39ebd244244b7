"""libfuse3 through mfusepy: a mount whose requests call methods of a Python object. Only this file imports mfusepy.

Threads of libfuse call the methods. If a method raises an OSError, or an error of gdrkit with an errno, the request
fails with that errno.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import importlib.util
import logging
import os
import threading
from contextlib import contextmanager, suppress
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gdrkit.errors import Api, ApiError, GdrkitError, Reason, Unsupported, UsageError, errno_name
from gdrkit.loader import setup_missing
from gdrkit.remedies import pip_install, system_install

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "FuseSession",
    "RequestSender",
    "copy_in",
    "copy_out",
    "missing_dependency",
    "omit_result",
    "refuse_restricted_root",
    "request_sender",
]

# The library that replaces fuse_reply_ioctl of libfuse; see omit_result().
_REPLY_LIBRARY = Path(__file__).resolve().parents[1] / "lib" / "libgdrkit_fuse.so"
# The environment variable that tells mfusepy which libfuse to open.
_LIBRARY_NAME_VARIABLE = "FUSE_LIBRARY_NAME"
# Longest wait for the end of the thread after the mount has failed.
_MOUNT_TIMEOUT_S = 20
# How often the constructor of a mount checks whether libfuse has failed.
_READY_POLL_S = 0.05
# Largest number of threads of libfuse.
_THREADS_MAX = 10
# Largest number of bytes that the kernel sends in one write request.
_WRITE_BYTES_MAX = 1 << 20
_LIBFUSE_MAJOR = 3
# CAP_DAC_OVERRIDE of linux/capability.h.
_CAP_DAC_OVERRIDE = 1
_log = logging.getLogger(__name__)

# Names of callbacks in struct fuse_operations of libfuse.
_CALLBACK_NAMES = (
    *("getattr", "readdir", "readlink", "mkdir", "rmdir", "unlink", "symlink", "link", "rename"),
    *("chmod", "chown", "truncate", "utimens", "statfs"),
    *("opendir", "releasedir", "create", "open", "read", "write", "fsync", "release", "ioctl"),
)


def missing_dependency() -> str | None:
    """Return which of mfusepy and libfuse3 is missing and what to do, or None. No library is opened."""
    if importlib.util.find_spec("mfusepy") is None:
        return f"the Python module mfusepy is not installed: {pip_install('fuse')}"
    if ctypes.util.find_library("fuse3") is None:
        return f"libfuse3 is not installed: {system_install('fuse3')}"
    return None


def _make_install_advice() -> str:
    return f"{pip_install('fuse')}, and {system_install('fuse3')}"


class RequestSender(NamedTuple):
    """User, group and thread that sent a request, from ``fuse_get_context``."""

    uid: int
    gid: int
    thread_id: int


def request_sender() -> RequestSender:
    """Return the sender of the request that this thread executes."""
    return RequestSender(*_import_mfusepy().fuse_get_context())


def refuse_restricted_root() -> None:
    """Raise EPERM if root sent the request without CAP_DAC_OVERRIDE, for example in a container.

    The kernel does not check access to the names in an ioctl or in a link of ``rm-rf``. The storage server checks the
    rights of other users, but would use the names with all rights of root.
    """
    sender = request_sender()
    if sender.uid != 0:
        return
    effective_capabilities = 0
    with suppress(OSError):
        status = Path(f"/proc/{sender.thread_id}/status").read_text()
        effective_capabilities = next(
            int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")
        )
    if not effective_capabilities & 1 << _CAP_DAC_OVERRIDE:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def copy_in(address: int, length_bytes: int) -> bytes:
    """Return the argument of an ioctl: `length_bytes` from `address`."""
    return ctypes.string_at(address, length_bytes)


def copy_out(address: int, data: bytes) -> None:
    """Write the result of an ioctl to `address`. `data` must have the size that the number of the ioctl contains."""
    ctypes.memmove(address, data, len(data))


def omit_result() -> None:
    """Let the ioctl that this thread executes return no data, so that its caller need not pass memory for it.

    Call this function at the end of the ioctl's handler. If libfuse was linked so that its functions cannot be
    replaced, or was loaded before gdrkit, the data of :func:`copy_out` is returned nevertheless.
    """
    _load_reply_library().gdrkit_fuse_omit_result()


class FuseSession:
    """A mount, and the thread that serves it until the unmount.

    Parameters
    ----------
    mount : Path
        An empty folder, without symbolic links in its path.
    operations : object
        An object with a method for each supported request. The methods have the names of the callbacks of libfuse.
    source : str
        The source of the mount in the kernel's table of mounts.
    is_shared : bool
        Whether all users of the machine may use the mount.

    Raises
    ------
    SetupMissing
        mfusepy or libfuse3 is not installed, or this user may not mount.
    """

    def __init__(self, mount: Path, operations: object, *, source: str, is_shared: bool = False) -> None:
        self._mount, self._source, self._is_shared = mount, source, is_shared
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._callbacks = _Callbacks(operations, self._ready)
        self._fuse_class = _make_fuse_class(_import_mfusepy())
        # When libfuse starts, it changes the working folder of the process to the root folder. The constructor restores
        # the working folder.
        working_folder_fd = os.open(".", os.O_PATH | os.O_CLOEXEC)
        try:
            self._thread = threading.Thread(target=self._serve_mount, name="gdrkit-fuse", daemon=True)
            self._thread.start()
            while not self._ready.wait(_READY_POLL_S) and self._thread.is_alive() and self._failure is None:
                pass
        finally:
            os.fchdir(working_folder_fd)
            os.close(working_folder_fd)
        if not self._ready.is_set():
            self._thread.join(_MOUNT_TIMEOUT_S)
            raise setup_missing(
                operation=f"fuse_mount {mount}",
                text="libfuse printed the cause on standard error",
                what_to_do="allow this user to mount: run as root with /dev/fuse, or install fusermount3: "
                f"{system_install('fuse3')}",
                default_errno=errno.EPERM,
                api=Api.FUSE,
            ) from self._failure

    @property
    def is_running(self) -> bool:
        """Whether the thread still serves the mount. The thread ends when the mount is unmounted."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread, and return whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve_mount(self) -> None:
        options: dict[str, object] = {"fsname": self._source, "subtype": "hf3fs", "default_permissions": True}
        if self._is_shared:
            options["allow_other"] = True
        module = _import_mfusepy()
        if (module.fuse_version_major, module.fuse_version_minor) >= (3, 12):
            options["max_threads"] = _THREADS_MAX
        try:
            # The constructor of mfusepy.FUSE mounts, and serves the mount until it is unmounted.
            self._fuse_class(self._callbacks, str(self._mount), foreground=True, **options)
        except BaseException as error:
            self._failure = error
            if self._ready.is_set():
                _log.exception("the FUSE thread of %s failed", self._mount)
            if not isinstance(error, Exception):
                raise


class _Callbacks:
    """The callbacks for mfusepy. They raise only OSError, whose errno is the result of the request."""

    # mfusepy reads these attributes. Times are in nanoseconds.
    use_ns = True
    # Requests for an open file can have a handle and no path, because the file may be unlinked.
    flag_nopath = True
    flag_nullpath_ok = True

    def __init__(self, operations: object, ready: threading.Event) -> None:
        self._ready = ready
        for name in _CALLBACK_NAMES:
            method = getattr(operations, name, None)
            if method is not None:
                setattr(self, name, _make_callback(method))

    def init_with_config(self, connection: Any, config: Any) -> None:
        """Configure the mount, and report that it is ready.

        The mount uses the inodes of the server. The kernel caches nothing, because rings bypass the kernel.
        """
        if connection is not None:
            connection.max_write = _WRITE_BYTES_MAX
        if config is not None:
            config.use_ino = config.direct_io = 1
            config.entry_timeout = config.attr_timeout = config.negative_timeout = 0.0
        self._ready.set()


def _make_callback(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a callback that calls `method` and turns its errors into OSError."""

    @wraps(method)
    def call_and_convert_errors(*arguments: Any) -> Any:
        try:
            return method(*arguments)
        except OSError:
            raise
        except GdrkitError as error:
            error_number = error.errno if isinstance(error, ApiError) else None
            if error_number is None:
                error_number = errno.EINVAL if isinstance(error, UsageError) else errno.EIO
                _log.warning("the FUSE request %s failed with %s: %s", method.__name__, errno_name(error_number), error)
            raise OSError(error_number, os.strerror(error_number)) from error

    return call_and_convert_errors


def _make_fuse_class(module: Any) -> Any:
    """Return a subclass of mfusepy.FUSE that also passes the flags of a rename, and the handles of open files."""

    class Fuse(module.FUSE):  # type: ignore[misc] # mfusepy is optional.
        def rename_fuse_3(self, old_path: bytes, new_path: bytes, flags: int) -> int:
            return self.operations.rename(os.fsdecode(old_path), os.fsdecode(new_path), flags) or 0

        def truncate_fuse_3(self, path: bytes | None, length_bytes: int, info: Any) -> int:
            return self.operations.truncate(_decode_path(path), length_bytes, _read_file_handle(info)) or 0

        def chmod_fuse_3(self, path: bytes | None, mode: int, info: Any) -> int:
            return self.operations.chmod(_decode_path(path), mode, _read_file_handle(info)) or 0

        def chown_fuse_3(self, path: bytes | None, uid: int, gid: int, info: Any) -> int:
            return self.operations.chown(_decode_path(path), uid, gid, _read_file_handle(info)) or 0

        def utimens_fuse_3(self, path: bytes | None, times: Any, info: Any) -> int:
            access_and_modification = (times[0].actime, times[0].modtime) if times else (None, None)
            times_ns = map(_read_time_ns, access_and_modification)
            return self.operations.utimens(_decode_path(path), *times_ns, _read_file_handle(info)) or 0

    return Fuse


# UTIME_NOW and UTIME_OMIT of sys/stat.h.
_UTIME_NOW, _UTIME_OMIT = (1 << 30) - 1, (1 << 30) - 2


def _read_time_ns(timespec: Any) -> int | None:
    """Return a time in nanoseconds since 1970, -1 for now, or None if the time does not change."""
    if timespec is None or timespec.tv_nsec == _UTIME_NOW:
        return -1
    return None if timespec.tv_nsec == _UTIME_OMIT else int(timespec.tv_sec * 10**9 + timespec.tv_nsec)


def _decode_path(path: bytes | None) -> str | None:
    return None if path is None else os.fsdecode(path)


def _read_file_handle(info: Any) -> int | None:
    return int(info.contents.fh) if info else None


@contextmanager
def _use_default_library(name: str) -> Iterator[None]:
    """Let mfusepy open the library `name` during the block, unless the user has set FUSE_LIBRARY_NAME."""
    previous_name = os.environ.get(_LIBRARY_NAME_VARIABLE)
    os.environ.setdefault(_LIBRARY_NAME_VARIABLE, name)
    try:
        yield
    finally:
        if previous_name is None:
            os.environ.pop(_LIBRARY_NAME_VARIABLE, None)


@cache
def _load_reply_library() -> ctypes.CDLL:
    """Return the library that replaces fuse_reply_ioctl of libfuse. Call this function before libfuse is loaded."""
    return ctypes.CDLL(str(_REPLY_LIBRARY), mode=ctypes.RTLD_GLOBAL)


_import_lock = threading.Lock()


def _import_mfusepy() -> Any:
    """Return the module mfusepy. The first call loads libfuse3, after the library that replaces fuse_reply_ioctl."""
    with _import_lock, _use_default_library("fuse3"):
        try:
            reply_library = _load_reply_library()
            import mfusepy

            # The replacement passes each reply to this function of libfuse.
            libfuse_reply = mfusepy._libfuse.fuse_reply_ioctl  # noqa: SLF001 - mfusepy has no public name for the library.
            reply_library.gdrkit_fuse_set_reply(ctypes.cast(libfuse_reply, ctypes.c_void_p))
        except ModuleNotFoundError as error:
            raise setup_missing(
                operation="import mfusepy",
                text=str(error),
                what_to_do=_make_install_advice(),
                default_errno=errno.ENOENT,
            ) from error
        except (OSError, AttributeError) as error:
            raise setup_missing(
                operation="dlopen libfuse3.so.3",
                text=str(error),
                what_to_do=_make_install_advice(),
                default_errno=errno.ENOENT,
            ) from error
    if mfusepy.fuse_version_major != _LIBFUSE_MAJOR:
        raise Unsupported(
            api=Api.FUSE,
            operation="fuse_version",
            status=None,
            status_name=f"libfuse {mfusepy.fuse_version_major}",
            reason=Reason.LIBRARY_WRONG_ABI,
            what_to_do=_make_install_advice(),
        )
    return mfusepy
