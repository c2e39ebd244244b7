"""The tier manager: files by logical names, each in the tier that its use asks for.

One manager serves a set of tiers. Several managers, in one or more processes, may use the same tiers and the same
catalogue. When a manager is created, it recovers migrations of processes that died.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from typing import TYPE_CHECKING, Any, Self

from gdrkit.errors import Api, ApiError, ClosedResource, DataMismatch, UsageError
from gdrkit.handles import Handle, ReleaseStack
from gdrkit.tiers.accesses import Accesses
from gdrkit.tiers.catalogue import Catalogue, Totals
from gdrkit.tiers.check import compare, fill, kept
from gdrkit.tiers.finding import Finding, Kind
from gdrkit.tiers.guard import lock_alone
from gdrkit.tiers.locate import open_reading, open_writing
from gdrkit.tiers.migration import migrate_file
from gdrkit.tiers.names import check_name, shown
from gdrkit.tiers.pins import read_pins, write_pins
from gdrkit.tiers.plan import Plan
from gdrkit.tiers.recovery import interrupted, recover
from gdrkit.tiers.refusal import busy, told
from gdrkit.tiers.results import Migrated, Refused, TierStatus
from gdrkit.tiers.routes import UNSEEN
from gdrkit.tiers.tier_set import TierSet
from gdrkit.tiers.tiered_file import TieredFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from gdrkit.gds.transfer import Transferred
    from gdrkit.tiers.catalogue import Entry
    from gdrkit.tiers.configuration import Configuration
    from gdrkit.tiers.folder import TierFolder
    from gdrkit.tiers.migration import Observer, Phase
    from gdrkit.tiers.plan import PlannedMove

__all__ = ["TierManager"]

# Number of times that a file may move away during a migration before the migration gives up.
_TRIES = 8
_log = logging.getLogger(__name__)


class TierManager:
    """Files in tiers; a context manager. It is thread-safe.

    Parameters
    ----------
    configuration : Configuration
        The result of :func:`gdrkit.tiers.configure`.
    clock : callable
        Function that returns the seconds since 1970.

    Attributes
    ----------
    found_at_start : tuple of Finding
        Results of the recovery at the start.

    Raises
    ------
    ApiError
        A tier or the catalogue cannot be opened.
    SetupMissing
        None of the tiers is available.
    """

    def __init__(self, configuration: Configuration, *, clock: Callable[[], float] = time.time) -> None:
        self.configuration = configuration
        self._parts = ReleaseStack()
        self._closed = False
        self._tiers = TierSet(configuration)
        self._parts.push(self._tiers.close)
        try:
            self.catalogue = Catalogue(
                configuration.catalogue,
                half_life_s=configuration.half_life_s,
                timeout_ms=configuration.timeout_ms,
                clock=clock,
                fill=self._fill,
            )
            self._parts.push(self.catalogue.close)
            self._tiers.leave_out_strangers(self.catalogue)
            self.accesses = Accesses(self.catalogue)
            self.found_at_start = tuple(self._recover())
        except BaseException as error:
            self._parts.run_after(error)
            raise
        self._handle = Handle("tiers.manager")

    def open(self, name: str, mode: str = "r") -> TieredFile:
        """Open a file in whichever tier it is. The call counts as an access.

        Parameters
        ----------
        name : str
            Relative name, without ``.`` and ``..``.
        mode : str
            ``r`` to read, ``r+`` to read and write an existing file, ``a+`` to also create it. A file that is open for
            writing is not migrated.

        Raises
        ------
        UsageError
            The name or the mode is invalid.
        ApiError
            The file does not exist (ENOENT), or the kernel reported another error.
        """
        self._check_open()
        check_name(name)
        if mode not in {"r", "r+", "a+"}:
            message = f"{mode!r} is no mode"
            raise UsageError(message, what_to_do="use r, r+ or a+")
        with told("open", name=shown(name)):
            if mode == "r":
                tier, descriptor = open_reading(name, self._tiers.folders, self.catalogue)
            else:
                landing = self._tiers.landing(self.catalogue.totals()) if mode == "a+" else None
                tier, descriptor = open_writing(name, self._tiers.folders, self.catalogue, landing=landing)
        self.accesses.count(name)
        return TieredFile(name, tier, descriptor, writes=mode != "r", catalogue=self.catalogue)

    def read_into(self, name: str, buffer: object, **how: Any) -> Transferred:  # noqa: ANN401 - see TieredFile.
        """Read a file into device or host memory, as :meth:`TieredFile.read_into`. This counts as an access."""
        with self.open(name) as file:
            return file.read_into(buffer, **how)

    def write_from(self, name: str, buffer: object, **how: Any) -> Transferred:  # noqa: ANN401 - see TieredFile.
        """Write memory into a file, as :meth:`TieredFile.write_from`. It is created if needed; counts as an access."""
        with self.open(name, "a+") as file:
            return file.write_from(buffer, **how)

    def find(self, name: str) -> Entry:
        """Return the catalogue's entry of a file.

        Raises
        ------
        ApiError
            ENOENT: no tier has the file.
        """
        self._check_open()
        check_name(name)
        self.accesses.tell()
        entry = self.catalogue.find(name)
        if entry is None:
            # The file may have been created outside gdrkit. Opening it adds it to the catalogue.
            with told("find", name=shown(name)):
                _, descriptor = open_reading(name, self._tiers.folders, self.catalogue)
            os.close(descriptor)
            entry = self.catalogue.find(name)
        if entry is None:
            with told("find", name=shown(name)):
                raise FileNotFoundError(errno.ENOENT, "no tier has it")
        return entry

    def remove(self, name: str) -> None:
        """Remove a file.

        Raises
        ------
        ApiError
            ENOENT: no tier has the file. ``BUSY``: the file is being migrated or written.
        """
        self._check_open()
        check_name(name)
        with told("remove", name=shown(name)):
            tier, descriptor = open_reading(name, self._tiers.folders, self.catalogue)
            try:
                lock_alone(descriptor, name=name)
                with tier.parent(name) as (folder, last):
                    os.unlink(last, dir_fd=folder)
                    os.fsync(folder)
            finally:
                os.close(descriptor)
        self.catalogue.forget(name)

    def move(self, name: str, tier: str, *, observe: Observer | None = None) -> int:
        """Move a file to a tier, regardless of the policy. Return the bytes that it takes there; 0 if it was there.

        Raises
        ------
        ApiError
            The file stays where it was, for the reason in the error; see :func:`migrate_file`.
        """
        destination = self.folder(tier)
        for _ in range(_TRIES):
            entry = self.find(name)
            if entry.tier == destination.name:
                return 0
            try:
                return migrate_file(
                    name,
                    source=self._tiers.folder(entry.tier),
                    destination=destination,
                    catalogue=self.catalogue,
                    limit_bytes=self._tiers.limit_bytes(destination.name, self.catalogue.totals()),
                    observe=observe or _nobody,
                )
            except ApiError as error:
                if (error.operation, error.errno) != ("open", errno.ENOENT):
                    raise
                # Another process has just moved the file, through gdrkit or outside it.
                self._look_again(name)
        raise busy("migrate", "other processes move it all the time", name=shown(name))

    def plan(self) -> Plan:
        """Return the migrations that the policy asks for now. The caller closes the plan."""
        self._check_open()
        self.accesses.tell()
        places = self._tiers.places(self.catalogue.totals())
        return Plan(self.catalogue, places, hysteresis=self.configuration.hysteresis)

    def migrate(
        self,
        *,
        begin: Callable[[int, int], None] | None = None,
        observe: Observer | None = None,
        moved: Callable[[PlannedMove, str], None] | None = None,
    ) -> Migrated:
        """Move files as the policy asks. A file that cannot be moved now stays, and the others are moved.

        Parameters
        ----------
        begin : callable or None
            Called with the number of files and bytes that will be moved.
        observe : callable or None
            Called at each phase of each file.
        moved : callable or None
            Called after each file, with the reason why it stays, if it does.
        """
        refused: list[Refused] = []
        count = size = 0
        with self.plan() as plan:
            if begin is not None:
                begin(plan.count, plan.allocated_bytes)
            for each in plan.moves():
                why = ""
                try:
                    size += self.move(each.name, each.destination, observe=observe)
                    count += 1
                except (ApiError, DataMismatch) as error:
                    # Without the catalogue no other file can be moved either.
                    if isinstance(error, ApiError) and error.api is Api.SQLITE:
                        raise
                    why = str(error)
                    refused.append(Refused(each.name, each.destination, error.reason, why))
                if moved is not None:
                    moved(each, why)
            return Migrated(count, size, tuple(refused), plan.considered)

    def pin(self, name: str, tier: str | None = None) -> str:
        """Pin a file to a tier, by default to its current one. The next run of the policy moves it there.

        Returns
        -------
        str
            Name of the tier.
        """
        where = self.configuration.tier(tier).name if tier is not None else self.find(name).tier
        self._set_pin(name, where)
        return where

    def unpin(self, name: str) -> None:
        """Unpin a file, so that the policy may move it again."""
        self._set_pin(name, None)

    def status(self) -> list[TierStatus]:
        """Return the current state of the tiers, fastest first."""
        self._check_open()
        self.accesses.tell()
        totals, folders, routes = self.catalogue.totals(), self._tiers.folders, self.catalogue.routes()
        return [
            TierStatus(
                name=tier.name,
                directory=str(tier.directory),
                accesses_min=tier.accesses_min,
                files=found.files,
                size_bytes=found.size_bytes,
                allocated_bytes=found.allocated_bytes,
                coming_bytes=found.coming_bytes,
                limit_bytes=self._tiers.limit_bytes(tier.name, totals),
                free_bytes=folders[tier.name].free_bytes() if tier.name in folders else 0,
                absent=self._tiers.absent.get(tier.name, ""),
                route=routes.get(tier.name, UNSEEN),
            )
            for tier in self.configuration.tiers
            for found in (totals.get(tier.name, Totals()),)
        ]

    def check(self, *, repair: bool = False) -> list[Finding]:
        """Compare the catalogue with the disks and return the differences.

        Parameters
        ----------
        repair : bool
            Also correct the catalogue, complete interrupted migrations, and rebuild a damaged catalogue. The only files
            that are removed are incomplete copies.
        """
        self._check_open()
        self.accesses.tell()
        found = [Finding(Kind.ABSENT, name, name, why) for name, why in self._tiers.absent.items()]
        if self.catalogue.is_damaged():
            if repair:
                self.catalogue.rebuild()
            found.append(Finding(Kind.DAMAGED, str(self.catalogue.path), "", "no whole database", mended=repair))
            if not repair:
                return found
        if repair:
            found += self._recover()
        else:
            found += interrupted(self._tiers.folders)
        found += compare(self.catalogue, self._tiers.folders, repair=repair)
        return [*found, *kept(self._tiers.folders)]

    def folder(self, tier: str) -> TierFolder:
        """Return the folder of a tier, for a benchmark.

        Raises
        ------
        SetupMissing
            The tier is not available.
        """
        self._check_open()
        return self._tiers.folder(self.configuration.tier(tier).name)

    def close(self) -> None:
        """Write the last access counts to the catalogue and close everything. A second close does nothing."""
        if not self._closed:
            self._closed = True
            self.accesses.tell()
            self._parts.run()
            self._handle.release()

    def _fill(self, catalogue: Catalogue) -> None:
        fill(catalogue, self.configuration, self._tiers.folders)
        for name, tier in read_pins(self._tiers.first).items():
            catalogue.pin(name, tier)

    def _recover(self) -> list[Finding]:
        found = recover(self._tiers.folders, self.catalogue)
        for each in found:
            _log.warning("%s in %s: %s", shown(each.name), each.tier, each.text)
        return found

    def _look_again(self, name: str) -> None:
        with told("find", name=shown(name)):
            tier, descriptor = open_reading(name, self._tiers.folders, self.catalogue)
            try:
                self.catalogue.see(name, tier.name, os.fstat(descriptor))
            finally:
                os.close(descriptor)

    def _set_pin(self, name: str, tier: str | None) -> None:
        self.find(name)
        with self.catalogue.writing("pin"):
            self.catalogue.pin(name, tier)
            write_pins(self._tiers.first, self.catalogue.pins())

    def _check_open(self) -> None:
        if self._closed:
            what = "the tier manager"
            raise ClosedResource(what)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _nobody(phase: Phase, name: str, offset_bytes: int) -> None:
    """Ignore the progress of a migration."""
    del phase, name, offset_bytes
