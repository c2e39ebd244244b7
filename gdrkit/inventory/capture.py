"""Captures of machines: everything that was read from a machine, and a file interface that replays it.

A capture holds the results of reads and not files. It is never unpacked, so the paths in a hostile capture cannot
overwrite files of this machine. A path that did not exist on the captured machine fails with ENOENT. A path that was
not read when the capture was made fails with ENODATA, so that a rule does not confuse "not captured" with "does not
exist".
"""

from __future__ import annotations

import base64
import binascii
import errno
import functools
import os
import posixpath
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from gdrkit.errors import Reason, UsageError
from gdrkit.evidence import KernelLog  # noqa: TC001 - types of fields are read at run time.
from gdrkit.inventory.facts import Facts  # noqa: TC001 - types of fields are read at run time.
from gdrkit.inventory.observation import Observation  # noqa: TC001 - types of fields are read at run time.

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.host import Files

__all__ = ["FUNCTIONS_MAX", "SCHEMA_VERSION", "Capture", "CapturedFiles", "RecordedReads", "Recorder"]

SCHEMA_VERSION = 1
# A capture has at most this many PCI functions. A large host has 517 functions, and SR-IOV can add some thousands.
FUNCTIONS_MAX = 4096
_FOLLOWED_LINKS_MAX, _PATH_CHARACTERS_MAX = 40, 4096  # The kernel's limits MAXSYMLINKS and PATH_MAX.
_PCI_DEVICES_FOLDER = "/sys/bus/pci/devices"


@dataclass(frozen=True, slots=True)
class RecordedReads:
    """Results of reads of a file tree, by absolute path.

    Attributes
    ----------
    texts, binaries : mapping
        Contents of files. `texts` has the contents in UTF-8; `binaries` has all others, in base64.
    lines : mapping
        The lines that contain one of the searched words. The key is the path and the words, joined by ``|``.
    folders : mapping
        Names in a folder.
    links : mapping
        Target of a symbolic link.
    present : tuple of str
        Paths that were only tested for existence, and exist.
    refused : mapping
        The errno of a failed read, by the type of read and the path. The types are ``read``, ``lines``, ``list``,
        ``link`` and ``look``, which is a test for existence.
    """

    texts: dict[str, str] = field(default_factory=dict)
    binaries: dict[str, str] = field(default_factory=dict)
    lines: dict[str, tuple[str, ...]] = field(default_factory=dict)
    folders: dict[str, tuple[str, ...]] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    present: tuple[str, ...] = ()
    refused: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Capture:
    """A saved description of one machine.

    Attributes
    ----------
    schema_version : int
        Version of the format of captures.
    origin : str
        Source of the capture, for people: ``gdrkit 0.1.0 facts --save``, ``output of lspci``.
    answers : RecordedReads
        Results of the reads of the machine's files.
    facts : Facts or None
        Facts about the machine and its APIs; None if only files were saved.
    kernel_log : KernelLog or None
        Messages of the machine's kernel about devices.
    environment : mapping
        Environment variables that matter to direct transfers.
    observations : tuple of Observation
        Results of experiments on the machine.
    """

    schema_version: int
    origin: str
    answers: RecordedReads
    facts: Facts | None = None
    kernel_log: KernelLog | None = None
    environment: dict[str, str] = field(default_factory=dict)
    observations: tuple[Observation, ...] = ()

    def check(self) -> None:
        """Raise an error for a capture that no machine can have produced.

        Raises
        ------
        UsageError
            ``MALFORMED``: the capture has an unsupported version, a path that is not absolute and normalized or is too
            long, an invalid file name, an unknown type of read, too many PCI functions, or contents that are not
            base64.
        """
        if self.schema_version != SCHEMA_VERSION:
            _raise_malformed(f"expected schema_version {SCHEMA_VERSION}, found {self.schema_version}")
        unknown_types = self.answers.refused.keys() - {"read", "lines", "list", "link", "look"}
        if unknown_types:
            _raise_malformed(f"{', '.join(sorted(unknown_types))} is not a type of read")
        if len(self.answers.folders.get(_PCI_DEVICES_FOLDER, ())) > FUNCTIONS_MAX:
            _raise_malformed(f"{_PCI_DEVICES_FOLDER} has more than {FUNCTIONS_MAX} PCI functions")
        # Every result is stored under its path, except that a key of `lines` is a path and words, joined by "|".
        results_by_path = [
            getattr(self.answers, read_field.name)
            for read_field in fields(self.answers)
            if read_field.name != "refused"
        ]
        for key in {key for results in (*results_by_path, *self.answers.refused.values()) for key in results}:
            path = key.partition("|")[0] if key in self.answers.lines else key
            if not path.startswith("/") or path != posixpath.normpath(path) or "\0" in path:
                _raise_malformed(f"{key[:80]!r} is not an absolute and normalized path")
            _check_path_length(path)
        for link_target in self.answers.links.values():
            _check_path_length(link_target)
        for names in self.answers.folders.values():
            if any(not name or "/" in name or name in (".", "..") for name in names):
                _raise_malformed("a folder contains an invalid file name")
        for path, text in self.answers.binaries.items():
            _check_base64(path, text)


def _check_path_length(path: str) -> None:
    if len(path) > _PATH_CHARACTERS_MAX:
        _raise_malformed(f"the path that begins with {path[:80]!r} has more than {_PATH_CHARACTERS_MAX} characters")


def _check_base64(path: str, text: str) -> None:
    try:
        base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        message = f"capture: {path[:80]} is not base64: {error}"
        raise UsageError(message, reason=Reason.MALFORMED) from error


def _raise_malformed(problem: str) -> None:
    message = f"capture: {problem}"
    raise UsageError(message, reason=Reason.MALFORMED)


class CapturedFiles:
    """A file interface that returns the recorded reads of a captured machine; see :class:`gdrkit.host.Files`."""

    def __init__(self, reads: RecordedReads) -> None:
        self.reads = self._reads = reads
        self._existing_paths = frozenset(reads.present)
        # These are sets, because each lookup of a file tests whether its name is in the folder.
        self._names_by_folder = {path: frozenset(names) for path, names in reads.folders.items()}
        # The links in the path of a folder are resolved once, because most reads are of files in the same few folders.
        # _follow_links() does not follow the last part of a path, so the last part is a dot here.
        self._resolve_folder = functools.lru_cache(maxsize=1024)(lambda folder: self._follow_links(f"{folder}/."))

    def read(self, host_path: str) -> bytes:
        """Return the bytes of a file."""
        path = self._find_recorded_path("read", host_path, self._reads.texts, self._reads.binaries)
        text = self._reads.texts.get(path)
        return base64.b64decode(self._reads.binaries[path]) if text is None else text.encode()

    def lines(self, host_path: str, words: Sequence[str]) -> list[str]:
        """Return the lines that contain one of `words`: the recorded result, else a search in the recorded file."""
        recorded_lines = self._reads.lines.get("|".join((host_path, *words)))
        if recorded_lines is not None:
            return list(recorded_lines)
        self._raise_recorded_error("lines", host_path)
        text = self.read(host_path).decode("utf-8", "backslashreplace")
        return [line for line in text.splitlines() if any(word in line for word in words)]

    def list(self, host_path: str) -> list[str]:
        """Return the names in a folder."""
        return list(self._reads.folders[self._find_recorded_path("list", host_path, self._reads.folders)])

    def link(self, host_path: str) -> str:
        """Return the target of a symbolic link. A file that is not a link fails with EINVAL."""
        try:
            return self._reads.links[self._find_recorded_path("link", host_path, self._reads.links)]
        except FileNotFoundError:
            if self._exists(host_path):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), host_path) from None
            raise

    def check_exists(self, host_path: str) -> None:
        """Fail with ENOENT if the path did not exist on the machine."""
        self._raise_recorded_error("look", host_path)
        if not self._exists(host_path):
            raise self._make_absence_error(host_path)

    def _exists(self, host_path: str) -> bool:
        recorded_results = (
            self._reads.texts,
            self._reads.binaries,
            self._reads.folders,
            self._reads.links,
            self._existing_paths,
        )
        if any(
            path in results
            for path in dict.fromkeys((host_path, self._resolve_links(host_path)))
            for results in recorded_results
        ):
            return True
        folder, _, last_part = self._resolve_links(host_path).rpartition("/")
        return last_part in self._names_by_folder.get(folder or "/", ())

    def _find_recorded_path(
        self, read_type: str, host_path: str, *recorded_results: dict[str, str] | dict[str, tuple[str, ...]]
    ) -> str:
        """Return the path under which one of `recorded_results` has the result.

        If there is none, raise the recorded error, or an error that says that the path is absent.
        """
        # A result that was recorded under `host_path` itself is preferred, because the captured machine itself followed
        # the links in that path.
        self._raise_recorded_error(read_type, host_path)
        for path in dict.fromkeys((host_path, self._resolve_links(host_path))):
            self._raise_recorded_error(read_type, path)
            if any(path in results for results in recorded_results):
                return path
        raise self._make_absence_error(host_path)

    def _raise_recorded_error(self, read_type: str, host_path: str) -> None:
        """Raise the error with which this read failed on the captured machine, if it failed."""
        error_number = self._reads.refused.get(read_type, {}).get(host_path)
        if error_number is not None:
            raise OSError(error_number, os.strerror(error_number), host_path)

    def _make_absence_error(self, host_path: str) -> OSError:
        """Return an ENOENT error if a captured folder does not list the path, and otherwise an ENODATA error."""
        path_parts = self._resolve_links(host_path).strip("/").split("/")
        for depth, part in enumerate(path_parts):
            folder = "/" + "/".join(path_parts[:depth])
            if folder in self._names_by_folder and part not in self._names_by_folder[folder]:
                return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), host_path)
        return OSError(errno.ENODATA, os.strerror(errno.ENODATA), host_path)

    def _resolve_links(self, host_path: str) -> str:
        """Return `host_path` with the symbolic links of this capture resolved in all parts but the last."""
        folder, _, last_part = host_path.rpartition("/")
        if not folder or last_part in ("", ".", ".."):
            return self._follow_links(host_path)
        return posixpath.join(self._resolve_folder(folder), last_part)

    def _follow_links(self, host_path: str) -> str:
        """Resolve the links as :meth:`_resolve_links`, without its cache of resolved folders."""
        path, remaining_parts = "/", [part for part in host_path.split("/") if part]
        remaining_link_count = _FOLLOWED_LINKS_MAX
        while remaining_parts:
            part = remaining_parts.pop(0)
            if part in (".", ".."):
                path = posixpath.dirname(path) if part == ".." else path
                continue
            candidate = posixpath.join(path, part)
            target = self._reads.links.get(candidate) if remaining_parts else None
            if target is None:
                path = candidate
                continue
            remaining_link_count -= 1
            if remaining_link_count < 0:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), host_path)
            path = "/" if target.startswith("/") else path
            remaining_parts = [part for part in target.split("/") if part] + remaining_parts
        return path


class Recorder:
    """A file interface that forwards each read to `files` and records the result; see :class:`gdrkit.host.Files`."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._reads = RecordedReads()
        self._existing_paths: dict[str, None] = {}

    @property
    def reads(self) -> RecordedReads:
        """The results that were recorded so far."""
        recorded_reads = self._reads
        return RecordedReads(
            texts=dict(recorded_reads.texts),
            binaries=dict(recorded_reads.binaries),
            lines=dict(recorded_reads.lines),
            folders=dict(recorded_reads.folders),
            links=dict(recorded_reads.links),
            present=tuple(sorted(self._existing_paths)),
            refused={read_type: dict(paths) for read_type, paths in recorded_reads.refused.items()},
        )

    def read(self, host_path: str) -> bytes:
        """See :class:`gdrkit.host.Files`."""
        try:
            data = self._files.read(host_path)
        except OSError as error:
            raise self._record_error("read", host_path, error) from error
        try:
            self._reads.texts[host_path] = data.decode("utf-8")
        except UnicodeDecodeError:
            self._reads.binaries[host_path] = base64.b64encode(data).decode()
        return data

    def lines(self, host_path: str, words: Sequence[str]) -> list[str]:
        """See :class:`gdrkit.host.Files`."""
        try:
            lines = self._files.lines(host_path, words)
        except OSError as error:
            raise self._record_error("lines", host_path, error) from error
        self._reads.lines["|".join((host_path, *words))] = tuple(lines)
        return lines

    def list(self, host_path: str) -> list[str]:
        """See :class:`gdrkit.host.Files`."""
        try:
            names = self._files.list(host_path)
        except OSError as error:
            raise self._record_error("list", host_path, error) from error
        self._reads.folders[host_path] = tuple(names)
        return names

    def link(self, host_path: str) -> str:
        """See :class:`gdrkit.host.Files`."""
        try:
            target = self._files.link(host_path)
        except OSError as error:
            raise self._record_error("link", host_path, error) from error
        self._reads.links[host_path] = target
        return target

    def check_exists(self, host_path: str) -> None:
        """See :class:`gdrkit.host.Files`."""
        try:
            self._files.check_exists(host_path)
        except OSError as error:
            raise self._record_error("look", host_path, error) from error
        self._existing_paths[host_path] = None

    def _record_error(self, read_type: str, host_path: str, error: OSError) -> OSError:
        error_number = error.errno or errno.EIO
        self._reads.refused.setdefault(read_type, {})[host_path] = error_number
        return OSError(error_number, os.strerror(error_number), host_path)
