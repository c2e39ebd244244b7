"""Counts of the files that other programs open by their paths, from reports of the kernel (fanotify).

The kernel reports each open on the file systems of the tiers. A report has the handle of a folder and the name of the
file in it. The watcher opens the handle to find the path of the folder, and so the logical name of the file. It ignores
files outside the tiers. It also ignores opens by processes that count their own accesses
(:mod:`gdrkit.tiers.accesses`), so that no access counts twice.
"""

from __future__ import annotations

import errno
import os
import select
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from gdrkit.handles import Closeable, Handle
from gdrkit.host import OpenReports, open_by_handle
from gdrkit.tiers.names import GDRKIT_FOLDER, LOST_AND_FOUND

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gdrkit.host import OpenedFile
    from gdrkit.tiers.accesses import AccessCounter
    from gdrkit.tiers.folder import TierFolder

__all__ = ["OpenWatcher"]

# Largest number of folders whose paths are cached.
_CACHED_FOLDERS_MAX = 1 << 16
# Time in which the kernel must report an open by this process, in seconds. Otherwise the tier counts as unwatched.
_REPORT_TIMEOUT_S = 5.0
# Largest number of reads of the kernel's queue of reports after close() was called. On a busy file system, the queue
# may never become empty.
_LAST_READS_MAX = 64
_RESERVED_FOLDERS = frozenset({GDRKIT_FOLDER, LOST_AND_FOUND})
# Errors after which the watcher counts no opens in a tier instead of failing: the file system does not support the
# reports, or this user may not open ``tier.json``.
_UNSUPPORTED_ERRNOS = frozenset({errno.ENODEV, errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.EACCES})


class OpenWatcher(Closeable):
    """A thread that counts the opens of files in tiers by other programs, until it is closed.

    Parameters
    ----------
    folders : sequence of TierFolder
        The tiers.
    access_counter : AccessCounter
        The counter to which the watcher adds the opens by other programs.

    Attributes
    ----------
    watched : tuple of str
        Tiers whose opens are counted. In each of them, the watcher has opened a file, and the kernel has reported this
        open.
    unwatched : dict
        The reason why the opens of each other tier are not counted, by name of the tier.

    Raises
    ------
    OSError
        EPERM: this process has no CAP_SYS_ADMIN. ENOSYS, EINVAL: the kernel is older than Linux 5.9.
    """

    def __init__(self, folders: Sequence[TierFolder], access_counter: AccessCounter) -> None:
        self._access_counter = access_counter
        self._reports = OpenReports()
        # The path of each known folder relative to its tier, by file system and file handle. The path is empty for the
        # folder of the tier itself, and None for a folder outside all tiers.
        self._path_by_folder_key: dict[tuple[int, bytes], str | None] = {}
        self._tiers_by_file_system_id: dict[int, list[TierFolder]] = {}
        self.unwatched: dict[str, str] = {}
        self._wake_fd = -1
        try:
            for folder in folders:
                self._watch_tier(folder)
            self.watched = tuple(folder.name for folder in folders if folder.name not in self.unwatched)
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        except BaseException:
            self._reports.close()
            raise
        self._handle = Handle("tiers.opens")
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="gdrkit-opens")
        self._counting_future = self._executor.submit(self._count_until_woken)

    @property
    def lost_count(self) -> int:
        """Number of times that the kernel has dropped reports, because they came faster than they were counted."""
        return self._reports.overflow_count

    def refresh(self) -> None:
        """Forget the paths of all folders, because some may have been renamed.

        If the counting thread has ended with an error, raise that error.
        """
        self._path_by_folder_key.clear()
        if self._counting_future.done():
            self._counting_future.result()

    def close(self) -> None:
        """Count the opens that the kernel has already reported, and end the thread. A second close does nothing."""
        if self._wake_fd < 0:
            return
        os.eventfd_write(self._wake_fd, 1)
        self._executor.shutdown()
        os.close(self._wake_fd)
        self._wake_fd = -1
        self._reports.close()
        self._handle.release()

    def _watch_tier(self, folder: TierFolder) -> None:
        """Watch the file system of a tier, and check that the kernel reports an open there."""
        try:
            self._reports.add_file_system(folder.root_fd)
            file_system_id = os.fstatvfs(folder.root_fd).f_fsid
            self._tiers_by_file_system_id.setdefault(file_system_id, []).append(folder)
            if not self._is_open_reported(folder):
                self.unwatched[folder.name] = "the kernel did not report an open"
        except OSError as error:
            if error.errno not in _UNSUPPORTED_ERRNOS:
                raise
            self.unwatched[folder.name] = (
                f"{error.filename or 'open'}: {error.strerror} ({errno.errorcode[error.errno]})"
            )

    def _is_open_reported(self, folder: TierFolder) -> bool:
        """Open a file in ``.gdrkit-tiers``, and return whether the kernel reports this open with the file's name."""
        gdrkit_folder_fd = folder.find_gdrkit_folder_fd()
        if gdrkit_folder_fd is None:
            return False
        os.close(os.open("tier.json", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=gdrkit_folder_fd))
        poller = select.poll()
        poller.register(self._reports.fileno(), select.POLLIN)
        deadline_s = time.monotonic() + _REPORT_TIMEOUT_S
        while (remaining_s := deadline_s - time.monotonic()) > 0:
            poller.poll(remaining_s * 1000)
            opened_files = self._reports.read()
            self._count_opens(opened_files)
            for file in opened_files:
                is_own_open = (file.process_id, file.name) == (os.getpid(), b"tier.json")
                if is_own_open and self._find_path_in_tier(folder, file.folder_handle) == GDRKIT_FOLDER:
                    return True
        return False

    def _count_until_woken(self) -> None:
        poller = select.poll()
        for descriptor in (self._reports.fileno(), self._wake_fd):
            poller.register(descriptor, select.POLLIN)
        while self._wake_fd not in dict(poller.poll()):
            self._count_opens(self._reports.read())
        for _ in range(_LAST_READS_MAX):
            if not (opened_files := self._reports.read()):
                return
            self._count_opens(opened_files)

    def _count_opens(self, opened_files: Iterable[OpenedFile]) -> None:
        count_by_name_and_process: Counter[tuple[str, int]] = Counter()
        for file in opened_files:
            if (name := self._find_logical_name(file)) is not None:
                count_by_name_and_process[name, file.process_id] += 1
        if not count_by_name_and_process:
            return
        counting_process_ids = self._access_counter.find_counting_process_ids()
        for (name, process_id), count in count_by_name_and_process.items():
            if process_id not in counting_process_ids:
                self._access_counter.count(name, count)

    def _find_logical_name(self, file: OpenedFile) -> str | None:
        """Return the logical name of a file, or None if it is not a file of a tier."""
        folder_key = (file.file_system_id, file.folder_handle)
        try:
            folder_path = self._path_by_folder_key[folder_key]
        except KeyError:
            if len(self._path_by_folder_key) >= _CACHED_FOLDERS_MAX:
                self._path_by_folder_key.clear()
            folder_path = self._path_by_folder_key[folder_key] = self._find_folder_path(*folder_key)
        if folder_path is None:
            return None
        base_name = os.fsdecode(file.name)
        name = f"{folder_path}/{base_name}" if folder_path else base_name
        return None if name.partition("/")[0] in _RESERVED_FOLDERS else name

    def _find_folder_path(self, file_system_id: int, folder_handle: bytes) -> str | None:
        """Return the path of a folder relative to its tier, or None if it is not in a tier."""
        tiers = self._tiers_by_file_system_id.get(file_system_id, ())
        paths = (self._find_path_in_tier(tier, folder_handle) for tier in tiers)
        return next((path for path in paths if path is not None), None)

    def _find_path_in_tier(self, tier: TierFolder, folder_handle: bytes) -> str | None:
        """Return the path of a folder relative to this tier, or None if it is not in this tier."""
        try:
            folder_fd = open_by_handle(folder_handle, mount_descriptor=tier.root_fd)
        except OSError as error:
            if error.errno == errno.ESTALE:
                return None  # The folder was removed.
            raise
        try:
            folder_path = PurePosixPath(os.readlink(f"/proc/self/fd/{folder_fd}"))  # noqa: PTH115 - a link of procfs.
        finally:
            os.close(folder_fd)
        tier_path = os.readlink(f"/proc/self/fd/{tier.root_fd}")  # noqa: PTH115 - a link of procfs.
        if not folder_path.is_relative_to(tier_path):
            return None
        relative_path = str(folder_path.relative_to(tier_path))
        return "" if relative_path == "." else relative_path
