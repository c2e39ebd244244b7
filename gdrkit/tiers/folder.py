"""The folder of one tier: access to its files by name, and gdrkit's own folder in it.

Names are resolved part by part from a descriptor of the folder, and no part may be a symbolic link. So a name cannot
lead out of the folder, even if another process changes the folder at the same time.

gdrkit's own folder is ``.gdrkit-tiers``. It contains:

- ``tier.json``, the identity of the tier. An empty mount point has no such file, so gdrkit does not use it as the tier.
- ``incoming``: incomplete copies.
- ``moves``: a record of each migration into this tier.
- ``retired``: files whose copy in another tier is complete.
- ``kept``: files that a recovery does not delete, because each may be the only copy of its data.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import uuid
from typing import TYPE_CHECKING, Self

from gdrkit.errors import Reason, UsageError
from gdrkit.handles import Handle, ReleaseStack
from gdrkit.tiers.kernel_errors import convert_os_errors
from gdrkit.tiers.names import GDRKIT_FOLDER, LOST_AND_FOUND

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

__all__ = ["GDRKIT_SUBFOLDERS", "TierFolder"]

# The folders in ``.gdrkit-tiers``.
GDRKIT_SUBFOLDERS = ("incoming", "moves", "retired", "kept")
_OPEN_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Largest number of bytes that are read from ``tier.json``.
_IDENTITY_BYTES_MAX = 4096
# Mode of gdrkit's own folders.
_PRIVATE_MODE = 0o700


class TierFolder:
    """The folder of a tier; a context manager.

    Parameters
    ----------
    name : str
        Name of the tier.
    directory : Path
        Path of the folder.

    Attributes
    ----------
    identity : str or None
        The identity in ``tier.json``. None: the file does not exist, or this user cannot read it. The constructor does
        not create the file, because the folder may be the mount point of a file system that is not mounted; see
        :meth:`claim`.
    root_fd : int
        Descriptor of the folder.

    Raises
    ------
    ApiError
        The folder cannot be opened.
    UsageError
        The folder belongs to another tier.
    """

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory
        self._descriptors = ReleaseStack()
        self._gdrkit_folder_fds: dict[str, int] = {}
        self._is_closed = False
        with convert_os_errors("open tier", tier=name, directory=str(directory)):
            self.root_fd = self._close_later(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        try:
            with convert_os_errors("open tier", tier=name, directory=str(directory)):
                self.identity = self._read_identity()
        except BaseException as error:
            self._descriptors.run_after(error)
            raise
        self._handle = Handle("tiers.folder")

    def gdrkit_folder_fd(self, subfolder: str = "") -> int:
        """Return a descriptor of the ``.gdrkit-tiers`` folder or of a subfolder in it. Create a missing folder.

        This object closes the descriptor in :meth:`close`.

        Raises
        ------
        OSError
            The folder cannot be created: EROFS, ENOSPC ...
        """
        if subfolder not in self._gdrkit_folder_fds:
            parent_fd = self.gdrkit_folder_fd() if subfolder else self.root_fd
            with contextlib.suppress(FileExistsError):
                os.mkdir(subfolder or GDRKIT_FOLDER, _PRIVATE_MODE, dir_fd=parent_fd)
        return self._open_gdrkit_folder(subfolder)

    def find_gdrkit_folder_fd(self, subfolder: str = "") -> int | None:
        """Return the descriptor of :meth:`gdrkit_folder_fd`, or None if there is no folder or it cannot be opened."""
        try:
            return self._open_gdrkit_folder(subfolder)
        except OSError as error:
            if error.errno in {errno.EROFS, errno.EACCES, errno.ENOENT}:
                return None
            raise

    @property
    def is_claimed(self) -> bool:
        """Whether the ``.gdrkit-tiers`` folder exists, even if this user cannot open it."""
        try:
            os.stat(GDRKIT_FOLDER, dir_fd=self.root_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def claim(self) -> None:
        """Create gdrkit's own folders, and the identity if there is none. A read-only folder is left unchanged.

        Raises
        ------
        ApiError
            The ``.gdrkit-tiers`` folder, or a file in it, cannot be created.
        UsageError
            Another process has just given the folder to another tier.
        """
        with convert_os_errors("open tier", tier=self.name, directory=str(self.directory)):
            try:
                gdrkit_folder_fd = self.gdrkit_folder_fd()
                # All folders are created now, because a full file system has no space for a new folder later. An
                # existing folder can still get new entries.
                for subfolder in GDRKIT_SUBFOLDERS:
                    self.gdrkit_folder_fd(subfolder)
                if self.identity is None:
                    document = {"tier": self.name, "identity": uuid.uuid4().hex}
                    _write_once(gdrkit_folder_fd, "tier.json", json.dumps(document) + "\n")
                    os.fsync(self.root_fd)
            except OSError as error:
                if error.errno not in {errno.EROFS, errno.EACCES}:
                    raise
                return
            self.identity = self._read_identity()

    def list_gdrkit_folder(self, subfolder: str) -> list[str]:
        """Return the names in one of gdrkit's own folders. The list is empty if the folder does not exist."""
        descriptor = self.find_gdrkit_folder_fd(subfolder)
        return [] if descriptor is None else sorted(os.listdir(descriptor))  # noqa: PTH208 - pathlib has no descriptors.

    @contextlib.contextmanager
    def open_parent(self, name: str, *, create_like: TierFolder | None = None) -> Iterator[tuple[int, str]]:
        """Open the folder of a file. Yield the descriptor of the folder, and the last part of the file's name.

        Parameters
        ----------
        name : str
            Name of a file.
        create_like : TierFolder or None
            If given, missing folders are created, with the modes and owners that the same folders have in
            `create_like`.

        Raises
        ------
        OSError
            ENOENT: the folder does not exist. ELOOP or ENOTDIR: a part is a symbolic link.
        """
        *folder_names, base_name = name.split("/")
        with contextlib.ExitStack() as stack:
            parent_fd, model_fd = self.root_fd, create_like.root_fd if create_like else None
            for folder_name in folder_names:
                if create_like is not None:
                    model_fd = None if model_fd is None else _try_open_folder(model_fd, folder_name)
                    if model_fd is not None:
                        stack.callback(os.close, model_fd)
                    _create_folder(parent_fd, folder_name, model_fd)
                parent_fd = os.open(folder_name, _OPEN_FOLDER_FLAGS, dir_fd=parent_fd)
                stack.callback(os.close, parent_fd)
            yield parent_fd, base_name

    def open(self, name: str, flags: int, mode: int = 0o666) -> int:
        """Open a regular file, as open(2) does. The last part of the name must not be a symbolic link either.

        Raises
        ------
        OSError
            open(2) failed, or the file is not a regular file.
        """
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC
        with self.open_parent(name) as (parent_fd, base_name):
            if flags & os.O_EXCL:
                return os.open(base_name, flags, mode, dir_fd=parent_fd)
            # The type is checked before the file is opened, because open of a FIFO would block.
            path_fd = os.open(base_name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
        try:
            file_mode = os.fstat(path_fd).st_mode
            if not stat.S_ISREG(file_mode):
                raise OSError(errno.ELOOP if stat.S_ISLNK(file_mode) else errno.EISDIR, "not a regular file")
            # If a migration holds a lease on the file, an open for writing blocks here. The migration detects that the
            # lease is being broken, fails, and releases the lease.
            return os.open(f"/proc/self/fd/{path_fd}", flags & ~os.O_NOFOLLOW)
        finally:
            os.close(path_fd)

    def stat(self, name: str) -> os.stat_result | None:
        """Return the lstat(2) result of the name, or None if it does not exist."""
        try:
            with self.open_parent(name) as (parent_fd, base_name):
                return os.stat(base_name, dir_fd=parent_fd, follow_symlinks=False)
        except OSError as error:
            if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
                return None
            raise

    def free_bytes(self) -> int:
        """Return the space in bytes that users other than root can still fill on the file system."""
        file_system_status = os.fstatvfs(self.root_fd)
        return file_system_status.f_bavail * file_system_status.f_frsize

    @contextlib.contextmanager
    def hold_lock(self, *, exclusive: bool) -> Iterator[bool]:
        """Hold the lock of the tier during the block: shared to start a migration, exclusive for a recovery.

        A migration holds the shared lock only while it creates its copy and its record. So a process with the exclusive
        lock can tell a new copy from a copy that a dead process left.

        Yields
        ------
        bool
            Whether this process has the lock. A call for the exclusive lock does not wait, but yields False if another
            process has the lock.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock_fd = os.open("lock", flags, 0o600, dir_fd=self.gdrkit_folder_fd())
        try:
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB if exclusive else fcntl.LOCK_SH)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(lock_fd)

    def walk(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield every file of the tier, regular or not, except those in gdrkit's own folder and in ``lost+found``.

        Symbolic links are yielded, but not followed. Folders are not yielded.

        Yields
        ------
        tuple
            Name of the file, and its lstat(2) result.
        """
        reserved_names = {GDRKIT_FOLDER, LOST_AND_FOUND}
        pending_folders = [""]
        while pending_folders:
            folder_name = pending_folders.pop()
            try:
                folder_fd = self._open_folder(folder_name)
            except (FileNotFoundError, NotADirectoryError):
                continue  # Another process has just removed the folder.
            try:
                with os.scandir(folder_fd) as entries:
                    children = sorted(
                        (entry.name, entry.stat(follow_symlinks=False)) for entry in _skip_removed_entries(entries)
                    )
            finally:
                os.close(folder_fd)
            for base_name, file_status in children:
                name = f"{folder_name}/{base_name}" if folder_name else base_name
                if stat.S_ISDIR(file_status.st_mode):
                    if folder_name or base_name not in reserved_names:
                        pending_folders.append(name)
                else:
                    yield name, file_status

    def close(self) -> None:
        """Close all descriptors."""
        if not self._is_closed:
            self._is_closed = True
            self._descriptors.run()
            self._handle.release()

    def _open_folder(self, name: str) -> int:
        if not name:
            return os.open(".", _OPEN_FOLDER_FLAGS, dir_fd=self.root_fd)
        with self.open_parent(name) as (parent_fd, base_name):
            return os.open(base_name, _OPEN_FOLDER_FLAGS, dir_fd=parent_fd)

    def _open_gdrkit_folder(self, subfolder: str) -> int:
        if subfolder not in self._gdrkit_folder_fds:
            parent_fd = self._open_gdrkit_folder("") if subfolder else self.root_fd
            descriptor = os.open(subfolder or GDRKIT_FOLDER, _OPEN_FOLDER_FLAGS, dir_fd=parent_fd)
            self._gdrkit_folder_fds[subfolder] = self._close_later(descriptor)
        return self._gdrkit_folder_fds[subfolder]

    def _read_identity(self) -> str | None:
        """Return the identity of the tier, or None if the folder does not state it or this user cannot read it."""
        gdrkit_folder_fd = self.find_gdrkit_folder_fd()
        try:
            document = None if gdrkit_folder_fd is None else _read_tier_json(gdrkit_folder_fd)
        except PermissionError:
            return None
        if document is None:
            return None
        if document.get("tier") != self.name:
            message = f"{self.directory} is the folder of the tier {document.get('tier')!r}, not of {self.name!r}"
            raise UsageError(message, reason=Reason.CONFLICT, what_to_do="correct the directory in the configuration")
        return str(document.get("identity"))

    def _close_later(self, descriptor: int) -> int:
        """Register the descriptor, so that :meth:`close` closes it, and return it."""
        self._descriptors.push(lambda: os.close(descriptor))
        return descriptor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _skip_removed_entries(entries: Iterator[os.DirEntry[str]]) -> Iterator[os.DirEntry[str]]:
    """Yield the entries that still exist. The check also stores the lstat(2) result in the entry, for later calls."""
    for entry in entries:
        with contextlib.suppress(FileNotFoundError):
            entry.stat(follow_symlinks=False)
            yield entry


def _try_open_folder(parent_fd: int, name: str) -> int | None:
    try:
        return os.open(name, _OPEN_FOLDER_FLAGS, dir_fd=parent_fd)
    except OSError:
        return None  # The tier `create_like` has no such folder, so the new folder gets default permissions.


def _create_folder(parent_fd: int, name: str, model_fd: int | None) -> None:
    """Create a folder with the mode and owner of `model_fd`, and sync it. An existing folder is left unchanged."""
    model_status = os.fstat(model_fd) if model_fd is not None else None
    try:
        os.mkdir(name, 0o700 if model_status else 0o777, dir_fd=parent_fd)
    except FileExistsError:
        return
    if model_status is not None:
        folder_fd = os.open(name, _OPEN_FOLDER_FLAGS, dir_fd=parent_fd)
        try:
            if os.geteuid() == 0:
                os.fchown(folder_fd, model_status.st_uid, model_status.st_gid)
            os.fchmod(folder_fd, stat.S_IMODE(model_status.st_mode))
        finally:
            os.close(folder_fd)
    os.fsync(parent_fd)


def _read_tier_json(gdrkit_folder_fd: int) -> dict[str, object] | None:
    try:
        descriptor = os.open("tier.json", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=gdrkit_folder_fd)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, encoding="ascii") as file:
        text = file.read(_IDENTITY_BYTES_MAX)
    try:
        document = json.loads(text)
    except ValueError as error:
        message = f"{GDRKIT_FOLDER}/tier.json is not valid JSON"
        raise UsageError(
            message, reason=Reason.MALFORMED, what_to_do="remove this file; gdrkit writes a new one"
        ) from error
    return document if isinstance(document, dict) else {}


def _write_once(folder_fd: int, name: str, text: str) -> None:
    """Create a file with this content, completely or not at all. An existing file is kept."""
    temporary_name = f"{name}.{uuid.uuid4().hex}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(temporary_name, flags, 0o600, dir_fd=folder_fd), "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    try:
        with contextlib.suppress(FileExistsError):
            os.link(temporary_name, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd, follow_symlinks=False)
    except PermissionError:
        # The file system has no hard links, so this call may replace a file that another process has just created.
        # claim() reads the file afterwards, so that this process uses the identity that is in the file then.
        os.rename(temporary_name, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
    else:
        os.unlink(temporary_name, dir_fd=folder_fd)
    os.fsync(folder_fd)
