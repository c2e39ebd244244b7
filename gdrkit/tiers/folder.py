"""The folder of one tier: its files by name, and gdrkit's own folder in it.

Names are resolved part by part from a descriptor of the folder, and no part may be a symbolic link. So no name leads
out of the folder, even if another process changes it meanwhile.

The folder ``.gdrkit-tiers`` contains ``tier.json`` (the identity of the tier, so that an empty mount point is not
mistaken for it), ``incoming`` (incomplete copies), ``moves`` (a record of each migration into this tier), ``retired``
(files whose copy in another tier is complete) and ``kept`` (files that a recovery could not decide about).
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
from gdrkit.tiers.names import LOST_AND_FOUND, OWN_FOLDER
from gdrkit.tiers.refusal import told

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
        self._parts = ReleaseStack()
        self._own: dict[str, int] = {}
        self._closed = False
        with told("open tier", tier=name, directory=str(directory)):
            self.root = self._keep(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        try:
            with told("open tier", tier=name, directory=str(directory)):
                self.identity = self._identify()
        except BaseException as error:
            self._parts.run_after(error)
            raise
        self._handle = Handle("tiers.folder")

    def own(self, folder: str = "") -> int:
        """Return a descriptor of the ``.gdrkit-tiers`` folder, or of a folder in it. This object still owns it.

        Raises
        ------
        OSError
            The folder cannot be created: EROFS, ENOSPC ...
        """
        if folder not in self._own:
            above = self.own() if folder else self.root
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder or OWN_FOLDER, _PRIVATE, dir_fd=above)
        return self._find_own(folder)

    def find_own(self, folder: str = "") -> int | None:
        """Return the descriptor of :meth:`own`, or None if the folder does not exist or this user may not open it."""
        try:
            return self._find_own(folder)
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
        with told("open tier", tier=self.name, directory=str(self.directory)):
            try:
                own = self.own()
                # All folders are created now, because a full file system still accepts entries in existing folders.
                for each in FOLDERS:
                    self.own(each)
                if self.identity is None:
                    found = {"tier": self.name, "identity": uuid.uuid4().hex}
                    _write_once(own, "tier.json", json.dumps(found) + "\n")
                    os.fsync(self.root)
            except OSError as error:
                if error.errno not in {errno.EROFS, errno.EACCES}:
                    raise
                return
            self.identity = self._identify()

    def names_of(self, folder: str) -> list[str]:
        """Return the names in one of gdrkit's own folders; none if the folder does not exist."""
        found = self.find_own(folder)
        return [] if found is None else sorted(os.listdir(found))  # noqa: PTH208 - pathlib has no descriptors.

    @contextlib.contextmanager
    def parent(self, name: str, *, like: TierFolder | None = None) -> Iterator[tuple[int, str]]:
        """Open the folder of a file. Yield its descriptor and the last part of the name.

        Parameters
        ----------
        name : str
            Name of a file.
        like : TierFolder or None
            Create missing folders, with the modes and owners that they have in this tier.

        Raises
        ------
        OSError
            ENOENT: the folder does not exist. ELOOP or ENOTDIR: a part is a symbolic link.
        """
        *folders, last = name.split("/")
        with contextlib.ExitStack() as stack:
            here, there = self.root, like.root if like else None
            for part in folders:
                if like is not None:
                    there = None if there is None else _folder_at(there, part)
                    if there is not None:
                        stack.callback(os.close, there)
                    _make_like(here, part, there)
                here = os.open(part, _OPEN_FOLDER, dir_fd=here)
                stack.callback(os.close, here)
            yield here, last

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
            found = os.open(last, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            kind = os.fstat(found).st_mode
            if not stat.S_ISREG(kind):
                raise OSError(errno.ELOOP if stat.S_ISLNK(kind) else errno.EISDIR, "no regular file")
            # An open for writing blocks here while a migration holds its lease, until the migration has noticed it and
            # ended.
            return os.open(f"/proc/self/fd/{found}", flags & ~os.O_NOFOLLOW)
        finally:
            os.close(found)

    def stat(self, name: str) -> os.stat_result | None:
        """Return the lstat(2) result of the name, or None if nothing has it."""
        try:
            with self.parent(name) as (folder, last):
                return os.stat(last, dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
                return None
            raise

    def free_bytes(self) -> int:
        """Return the free space that a user may fill, in bytes."""
        found = os.fstatvfs(self.root)
        return found.f_bavail * found.f_frsize

    @contextlib.contextmanager
    def locked(self, *, alone: bool) -> Iterator[bool]:
        """Lock the tier: shared to start a migration into it, exclusive (`alone`) to clean up. Yield False if busy.

        The lock is held only for the few calls between the creation of a file and its own lock.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open("lock", flags, 0o600, dir_fd=self.own())
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(lock)

    def walk(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield every file of the user, regular or not. Symbolic links are not followed, and folders are not yielded.

        Yields
        ------
        tuple
            Name of the file, and its lstat(2) result.
        """
        hidden = {OWN_FOLDER, LOST_AND_FOUND}
        pending = [""]
        while pending:
            prefix = pending.pop()
            try:
                folder = self._folder(prefix)
            except (FileNotFoundError, NotADirectoryError):
                continue  # The folder was removed meanwhile.
            try:
                with os.scandir(folder) as entries:
                    found = sorted((each.name, each.stat(follow_symlinks=False)) for each in _stating(entries))
            finally:
                os.close(folder)
            for last, info in found:
                name = f"{prefix}/{last}" if prefix else last
                if stat.S_ISDIR(info.st_mode):
                    if prefix or last not in hidden:
                        pending.append(name)
                else:
                    yield name, info

    def close(self) -> None:
        """Close all descriptors."""
        if not self._closed:
            self._closed = True
            self._parts.run()
            self._handle.release()

    def _folder(self, name: str) -> int:
        if not name:
            return os.open(".", _OPEN_FOLDER, dir_fd=self.root)
        with self.parent(name) as (above, last):
            return os.open(last, _OPEN_FOLDER, dir_fd=above)

    def _find_own(self, folder: str) -> int:
        if folder not in self._own:
            above = self._find_own("") if folder else self.root
            self._own[folder] = self._keep(os.open(folder or OWN_FOLDER, _OPEN_FOLDER, dir_fd=above))
        return self._own[folder]

    def _identify(self) -> str | None:
        """Return the identity of the tier, or None if the folder does not state it or this user cannot read it."""
        own = self.find_own()
        try:
            found = None if own is None else _read_identity(own)
        except PermissionError:
            return None
        if found is None:
            return None
        if found.get("tier") != self.name:
            message = f"{self.directory} is the tier {found.get('tier')!r}, not {self.name!r}"
            raise UsageError(message, reason=Reason.CONFLICT, what_to_do="correct the directory in the configuration")
        return str(found.get("identity"))

    def _keep(self, descriptor: int) -> int:
        self._parts.push(lambda: os.close(descriptor))
        return descriptor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _stating(entries: Iterator[os.DirEntry[str]]) -> Iterator[os.DirEntry[str]]:
    for each in entries:
        with contextlib.suppress(FileNotFoundError):  # The file was removed meanwhile.
            each.stat(follow_symlinks=False)
            yield each


def _folder_at(above: int, name: str) -> int | None:
    try:
        return os.open(name, _OPEN_FOLDER, dir_fd=above)
    except OSError:
        return None  # There is no model folder. The new folder then gets default permissions.


def _make_like(above: int, name: str, model: int | None) -> None:
    """Create a folder with mode and owner of another one, and sync it to the disk."""
    info = os.fstat(model) if model is not None else None
    try:
        os.mkdir(name, 0o700 if info else 0o777, dir_fd=above)
    except FileExistsError:
        return
    if info is not None:
        made = os.open(name, _OPEN_FOLDER, dir_fd=above)
        try:
            if os.geteuid() == 0:
                os.fchown(made, info.st_uid, info.st_gid)
            os.fchmod(made, stat.S_IMODE(info.st_mode))
        finally:
            os.close(made)
    os.fsync(above)


def _read_identity(own: int) -> dict[str, object] | None:
    try:
        descriptor = os.open("tier.json", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=own)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, encoding="ascii") as file:
        text = file.read(_IDENTITY_BYTES_MAX)
    try:
        found = json.loads(text)
    except ValueError as error:
        message = f"{OWN_FOLDER}/tier.json is no JSON"
        raise UsageError(message, reason=Reason.MALFORMED, what_to_do="remove it; gdrkit writes it anew") from error
    return found if isinstance(found, dict) else {}


def _write_once(folder: int, name: str, text: str) -> None:
    """Create a file with this content, completely or not at all. An existing file is kept."""
    draft = f"{name}.{uuid.uuid4().hex}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(draft, flags, 0o600, dir_fd=folder), "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    try:
        with contextlib.suppress(FileExistsError):
            os.link(draft, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except PermissionError:
        # The file system has no hard links: the last writer wins, and every process reads that content afterwards.
        os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    else:
        os.unlink(draft, dir_fd=folder)
    os.fsync(folder)
