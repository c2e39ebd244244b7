"""The folder of one tier: access to its files by name, and gdrkit's own folder in it.

Names are resolved part by part from a descriptor of the folder, and no part may be a symbolic link. So no name leads
out of the folder, even if another process changes the folder at the same time.

The folder ``.gdrkit-tiers`` contains ``tier.json`` (the identity of the tier, so that an empty mount point is not
mistaken for it), ``incoming`` (incomplete copies), ``moves`` (a record of each migration into this tier), ``retired``
(files whose copy in another tier is complete) and ``kept`` (files that a recovery
does not delete, because each may be the only copy of its data).
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
from gdrkit.tiers.names import LOST_AND_FOUND, OWN_FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

__all__ = ["FOLDERS", "TierFolder"]

FOLDERS = ("incoming", "moves", "retired", "kept")
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_IDENTITY_BYTES_MAX = 4096
_PRIVATE = 0o700


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
        Identity of the tier that the folder states, or None if it states none or this user cannot read it. Opening
        writes nothing into the folder, because it may be the mount point of a file system that is not mounted; see
        :meth:`claim`.

    Raises
    ------
    ApiError
        The kernel does not open the folder.
    UsageError
        The folder belongs to another tier.
    """

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory
        self._descriptors = ReleaseStack()
        self._own_folders: dict[str, int] = {}
        self._closed = False
        with convert_os_errors("open tier", tier=name, directory=str(directory)):
            self.root = self._close_later(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        try:
            with convert_os_errors("open tier", tier=name, directory=str(directory)):
                self.identity = self._read_identity()
        except BaseException as error:
            self._descriptors.run_after(error)
            raise
        self._handle = Handle("tiers.folder")

    def own_folder(self, folder: str = "") -> int:
        """Return a descriptor of the ``.gdrkit-tiers`` folder, or of a folder in it. Create the folder if needed.

        This object still owns the descriptor.

        Raises
        ------
        OSError
            The folder cannot be created: EROFS, ENOSPC ...
        """
        if folder not in self._own_folders:
            parent = self.own_folder() if folder else self.root
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder or OWN_FOLDER, _PRIVATE, dir_fd=parent)
        return self._find_own_folder(folder)

    def find_own_folder(self, folder: str = "") -> int | None:
        """Return the descriptor of :meth:`own_folder`, or None if it does not exist or this user may not open it."""
        try:
            return self._find_own_folder(folder)
        except OSError as error:
            if error.errno in {errno.EROFS, errno.EACCES, errno.ENOENT}:
                return None
            raise

    @property
    def is_claimed(self) -> bool:
        """Whether the ``.gdrkit-tiers`` folder exists, even if this user cannot open it."""
        try:
            os.stat(OWN_FOLDER, dir_fd=self.root, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def claim(self) -> None:
        """Give a folder without an identity the identity of this tier. A folder that is not writable is left unchanged.

        Raises
        ------
        ApiError
            The kernel does not create the ``.gdrkit-tiers`` folder or its file.
        UsageError
            Another process has just given the folder to another tier.
        """
        with convert_os_errors("open tier", tier=self.name, directory=str(self.directory)):
            try:
                own = self.own_folder()
                # All folders are created now, because a full file system still accepts entries in existing folders.
                for each in FOLDERS:
                    self.own_folder(each)
                if self.identity is None:
                    document = {"tier": self.name, "identity": uuid.uuid4().hex}
                    _write_once(own, "tier.json", json.dumps(document) + "\n")
                    os.fsync(self.root)
            except OSError as error:
                if error.errno not in {errno.EROFS, errno.EACCES}:
                    raise
                return
            self.identity = self._read_identity()

    def list_own_folder(self, folder: str) -> list[str]:
        """Return the names in one of gdrkit's own folders. The list is empty if the folder does not exist."""
        descriptor = self.find_own_folder(folder)
        return [] if descriptor is None else sorted(os.listdir(descriptor))  # noqa: PTH208 - pathlib has no descriptors.

    @contextlib.contextmanager
    def parent(self, name: str, *, like: TierFolder | None = None) -> Iterator[tuple[int, str]]:
        """Open the folder of a file. Yield its descriptor and the last part of the name.

        Parameters
        ----------
        name : str
            Name of a file.
        like : TierFolder or None
            If given, create missing folders, with the modes and owners that they have in the tier `like`.

        Raises
        ------
        OSError
            ENOENT: the folder does not exist. ELOOP or ENOTDIR: a part is a symbolic link.
        """
        *folders, last = name.split("/")
        with contextlib.ExitStack() as stack:
            folder, model = self.root, like.root if like else None
            for part in folders:
                if like is not None:
                    model = None if model is None else _open_folder(model, part)
                    if model is not None:
                        stack.callback(os.close, model)
                    _make_folder(folder, part, model)
                folder = os.open(part, _OPEN_FOLDER, dir_fd=folder)
                stack.callback(os.close, folder)
            yield folder, last

    def open(self, name: str, flags: int, mode: int = 0o666) -> int:
        """Open a regular file, as open(2) does. The last part of the name must not be a symbolic link either.

        Raises
        ------
        OSError
            open(2) failed, or the file is not a regular file.
        """
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC
        with self.parent(name) as (folder, last):
            if flags & os.O_EXCL:
                return os.open(last, flags, mode, dir_fd=folder)
            # The type is checked before the file is opened, because open of a FIFO would block.
            unopened = os.open(last, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            mode = os.fstat(unopened).st_mode
            if not stat.S_ISREG(mode):
                raise OSError(errno.ELOOP if stat.S_ISLNK(mode) else errno.EISDIR, "not a regular file")
            # While a migration holds a lease on the file, an open for writing blocks in this call, until the migration
            # has noticed it and ended.
            return os.open(f"/proc/self/fd/{unopened}", flags & ~os.O_NOFOLLOW)
        finally:
            os.close(unopened)

    def stat(self, name: str) -> os.stat_result | None:
        """Return the lstat(2) result of the name, or None if it does not exist."""
        try:
            with self.parent(name) as (folder, last):
                return os.stat(last, dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
                return None
            raise

    def free_bytes(self) -> int:
        """Return the free space that a user may fill, in bytes."""
        info = os.fstatvfs(self.root)
        return info.f_bavail * info.f_frsize

    @contextlib.contextmanager
    def locked(self, *, exclusive: bool) -> Iterator[bool]:
        """Hold the lock of the tier during the block: shared to start a migration into it, exclusive to clean it up.

        A migration creates its copy and locks the copy under the shared lock, and then releases the shared lock.

        Yields
        ------
        bool
            Whether this process has the lock. A call for the exclusive lock does not wait; it yields False if the lock
            is held.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock_fd = os.open("lock", flags, 0o600, dir_fd=self.own_folder())
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
        """Yield every file of the user, regular or not. Symbolic links are not followed, and folders are not yielded.

        Yields
        ------
        tuple
            Name of the file, and its lstat(2) result.
        """
        reserved = {OWN_FOLDER, LOST_AND_FOUND}
        pending = [""]
        while pending:
            prefix = pending.pop()
            try:
                folder = self._open_folder(prefix)
            except (FileNotFoundError, NotADirectoryError):
                continue  # Another process has just removed the folder.
            try:
                with os.scandir(folder) as entries:
                    children = sorted((each.name, each.stat(follow_symlinks=False)) for each in _existing(entries))
            finally:
                os.close(folder)
            for last, info in children:
                name = f"{prefix}/{last}" if prefix else last
                if stat.S_ISDIR(info.st_mode):
                    if prefix or last not in reserved:
                        pending.append(name)
                else:
                    yield name, info

    def close(self) -> None:
        """Close all descriptors."""
        if not self._closed:
            self._closed = True
            self._descriptors.run()
            self._handle.release()

    def _open_folder(self, name: str) -> int:
        if not name:
            return os.open(".", _OPEN_FOLDER, dir_fd=self.root)
        with self.parent(name) as (parent, last):
            return os.open(last, _OPEN_FOLDER, dir_fd=parent)

    def _find_own_folder(self, folder: str) -> int:
        if folder not in self._own_folders:
            parent = self._find_own_folder("") if folder else self.root
            descriptor = os.open(folder or OWN_FOLDER, _OPEN_FOLDER, dir_fd=parent)
            self._own_folders[folder] = self._close_later(descriptor)
        return self._own_folders[folder]

    def _read_identity(self) -> str | None:
        """Return the identity of the tier, or None if the folder does not state it or this user cannot read it."""
        own = self.find_own_folder()
        try:
            document = None if own is None else _read_tier_json(own)
        except PermissionError:
            return None
        if document is None:
            return None
        if document.get("tier") != self.name:
            message = f"{self.directory} is the folder of the tier {document.get('tier')!r}, not of {self.name!r}"
            raise UsageError(message, reason=Reason.CONFLICT, what_to_do="correct the directory in the configuration")
        return str(document.get("identity"))

    def _close_later(self, descriptor: int) -> int:
        """Return the descriptor, after registering it for :meth:`close`."""
        self._descriptors.push(lambda: os.close(descriptor))
        return descriptor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _existing(entries: Iterator[os.DirEntry[str]]) -> Iterator[os.DirEntry[str]]:
    """Yield the entries that still exist, after the result of lstat(2) was cached in them."""
    for each in entries:
        with contextlib.suppress(FileNotFoundError):
            each.stat(follow_symlinks=False)
            yield each


def _open_folder(parent: int, name: str) -> int | None:
    try:
        return os.open(name, _OPEN_FOLDER, dir_fd=parent)
    except OSError:
        return None  # There is no model folder. The new folder then gets default permissions.


def _make_folder(parent: int, name: str, model: int | None) -> None:
    """Create a folder with mode and owner of the folder `model`, and sync it to the disk. It may exist already."""
    info = os.fstat(model) if model is not None else None
    try:
        os.mkdir(name, 0o700 if info else 0o777, dir_fd=parent)
    except FileExistsError:
        return
    if info is not None:
        folder = os.open(name, _OPEN_FOLDER, dir_fd=parent)
        try:
            if os.geteuid() == 0:
                os.fchown(folder, info.st_uid, info.st_gid)
            os.fchmod(folder, stat.S_IMODE(info.st_mode))
        finally:
            os.close(folder)
    os.fsync(parent)


def _read_tier_json(own: int) -> dict[str, object] | None:
    try:
        descriptor = os.open("tier.json", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=own)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, encoding="ascii") as file:
        text = file.read(_IDENTITY_BYTES_MAX)
    try:
        document = json.loads(text)
    except ValueError as error:
        message = f"{OWN_FOLDER}/tier.json is not valid JSON"
        raise UsageError(message, reason=Reason.MALFORMED, what_to_do="remove it; gdrkit writes a new one") from error
    return document if isinstance(document, dict) else {}


def _write_once(folder: int, name: str, text: str) -> None:
    """Create a file with this content, completely or not at all. An existing file is kept."""
    temporary = f"{name}.{uuid.uuid4().hex}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(temporary, flags, 0o600, dir_fd=folder), "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    try:
        with contextlib.suppress(FileExistsError):
            os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except PermissionError:
        # The file system has no hard links: the last writer wins, and every process reads that content afterwards.
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    else:
        os.unlink(temporary, dir_fd=folder)
    os.fsync(folder)
