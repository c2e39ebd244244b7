"""The tier manager, which opens files by logical names and moves each file to the tier that fits its use.

One manager serves a set of tiers. Several managers, in one or more processes, may use the same tiers and the same
catalogue. When a manager is created, it completes or undoes the migrations of processes that died.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from gdrkit.errors import Api, ApiError, ClosedResource, DataMismatch, UsageError
from gdrkit.handles import Handle, ReleaseStack
from gdrkit.tiers.accesses import AccessCounter
from gdrkit.tiers.catalogue import Catalogue, TierTotals
from gdrkit.tiers.check import compare_with_disks, fill_catalogue, find_kept_files
from gdrkit.tiers.finding import FindingKind, TierFinding
from gdrkit.tiers.guard import lock_exclusive
from gdrkit.tiers.kernel_errors import busy_error, convert_os_errors
from gdrkit.tiers.locate import open_for_reading, open_for_writing
from gdrkit.tiers.migration import migrate_file
from gdrkit.tiers.names import check_name, printable
from gdrkit.tiers.pins import read_pins, write_pins
from gdrkit.tiers.plan import MigrationPlan
from gdrkit.tiers.policy import FileRow, decide
from gdrkit.tiers.recovery import find_interrupted_migrations, recover
from gdrkit.tiers.results import Migrated, RefusedMove, TierStatus
from gdrkit.tiers.routes import UNOBSERVED
from gdrkit.tiers.tier_set import TierSet
from gdrkit.tiers.tiered_file import TieredFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from gdrkit.gds.result import TransferResult
    from gdrkit.tiers.catalogue import Entry
    from gdrkit.tiers.configuration import Configuration
    from gdrkit.tiers.folder import TierFolder
    from gdrkit.tiers.migration import Phase, PhaseObserver
    from gdrkit.tiers.plan import PlannedMove
    from gdrkit.tiers.schedule import RateLimiter

__all__ = ["TierManager"]

# Number of attempts of a migration. An attempt fails if another process moves the file first.
_ATTEMPTS_MAX = 8
_log = logging.getLogger(__name__)


class TierManager:
    """The files of a set of tiers; a context manager. It is thread-safe.

    Parameters
    ----------
    configuration : Configuration
        The result of :func:`gdrkit.tiers.configure`.
    clock : callable
        Function that returns the seconds since 1970.

    Attributes
    ----------
    recovery_findings : tuple of TierFinding
        Results of the recovery when this manager was created.

    Raises
    ------
    ApiError
        A tier or the catalogue cannot be opened.
    SetupMissing
        None of the tiers is available.
    UsageError
        The folder of a tier belongs to another tier.
    """

    def __init__(self, configuration: Configuration, *, clock: Callable[[], float] = time.time) -> None:
        self.configuration = configuration
        self._resources = ReleaseStack()
        self._is_closed = False
        self._tier_set = TierSet(configuration)
        self._resources.push(self._tier_set.close)
        try:
            self.catalogue = Catalogue(
                configuration.catalogue,
                half_life_s=configuration.half_life_s,
                timeout_ms=configuration.timeout_ms,
                clock=clock,
                fill=self._fill_new_catalogue,
            )
            self._resources.push(self.catalogue.close)
            self._tier_set.exclude_unknown_folders(self.catalogue)
            self.access_counter = AccessCounter(self.catalogue, record_file=self._record_location)
            self._resources.push(self.access_counter.close)
            self.recovery_findings = tuple(self._recover())
        except BaseException as error:
            self._resources.run_after(error)
            raise
        self._handle = Handle("tiers.manager")

    def open(self, name: str, mode: str = "r") -> TieredFile:
        """Open a file in the tier that has it. The call counts as an access.

        Parameters
        ----------
        name : str
            Relative name, without ``.`` and ``..``.
        mode : str
            ``r`` to read, ``r+`` to read and write an existing file, ``a+`` to read and write a file that is created if
            it does not exist. A file that is open for writing is not migrated.

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
            message = f"mode must be one of 'r', 'r+', 'a+', not {mode!r}"
            raise UsageError(message)
        with convert_os_errors("open", name=printable(name)):
            if mode == "r":
                tier_folder, descriptor = open_for_reading(name, self._tier_set.folders, self.catalogue)
            else:
                landing_tiers = self._tier_set.landing_folders(self.catalogue.totals()) if mode == "a+" else None
                tier_folder, descriptor = open_for_writing(
                    name, self._tier_set.folders, self.catalogue, landing_tiers=landing_tiers
                )
        self.access_counter.count(name)
        return TieredFile(name, tier_folder, descriptor, writable=mode != "r", catalogue=self.catalogue)

    def read_into(self, name: str, buffer: object, **options: Any) -> TransferResult:  # noqa: ANN401 - see TieredFile.
        """Read a file into device or host memory, by :meth:`TieredFile.read_into`. The call counts as an access."""
        with self.open(name) as file:
            return file.read_into(buffer, **options)

    def write_from(self, name: str, buffer: object, **options: Any) -> TransferResult:  # noqa: ANN401 - see TieredFile.
        """Write memory into a file by :meth:`TieredFile.write_from`. The file is created if it does not exist.

        The call counts as an access.
        """
        with self.open(name, "a+") as file:
            return file.write_from(buffer, **options)

    def find(self, name: str) -> Entry:
        """Return the catalogue's entry of a file. If a tier has the file but the catalogue has no entry, add the entry.

        Raises
        ------
        ApiError
            ENOENT: no tier has the file.
        """
        self._check_open()
        check_name(name)
        self.access_counter.flush()
        entry = self.catalogue.find(name)
        if entry is None:
            # The file may have been created outside gdrkit. The call adds such a file to the catalogue.
            with convert_os_errors("find", name=printable(name)):
                _, descriptor = open_for_reading(name, self._tier_set.folders, self.catalogue)
            os.close(descriptor)
            entry = self.catalogue.find(name)
        if entry is None:
            with convert_os_errors("find", name=printable(name)):
                raise FileNotFoundError(errno.ENOENT, "no tier has the file")
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
        with convert_os_errors("remove", name=printable(name)):
            tier_folder, descriptor = open_for_reading(name, self._tier_set.folders, self.catalogue)
            try:
                lock_exclusive(descriptor, name=name)
                with tier_folder.open_parent(name) as (parent_fd, base_name):
                    os.unlink(base_name, dir_fd=parent_fd)
                    os.fsync(parent_fd)
            finally:
                os.close(descriptor)
        with self.catalogue.write_transaction("remove"):
            entry = self.catalogue.find(name)
            self.catalogue.remove(name)
            if entry is not None and entry.pinned is not None:
                self._store_pins()

    def move(
        self, name: str, tier: str, *, observe: PhaseObserver | None = None, rate_limiter: RateLimiter | None = None
    ) -> int:
        """Move a file to a tier, regardless of the policy.

        Parameters
        ----------
        name, tier : str
            Name of the file, and name of the destination tier.
        observe : callable or None
            Called with the phase, the name and the progress in bytes; see :class:`~gdrkit.tiers.migration.Phase`.
        rate_limiter : RateLimiter or None
            The rate limit of the copy. None: the file is copied as fast as possible.

        Returns
        -------
        int
            Space that the file takes in the destination, in bytes; 0 if it was already in that tier.

        Raises
        ------
        ApiError
            The file was not moved. The error has the reason; see :func:`migrate_file`.
        """
        destination = self.folder(tier)
        for _ in range(_ATTEMPTS_MAX):
            entry = self.find(name)
            if entry.tier == destination.name:
                return 0
            try:
                return migrate_file(
                    name,
                    source=self._tier_set.folder(entry.tier),
                    destination=destination,
                    catalogue=self.catalogue,
                    limit_bytes=self._tier_set.limit_bytes(destination.name, self.catalogue.totals()),
                    observe=observe or _ignore_progress,
                    rate_limiter=rate_limiter,
                )
            except ApiError as error:
                if (error.operation, error.errno) != ("open", errno.ENOENT):
                    raise
                # Another process has just moved the file, through gdrkit or outside it.
                self._record_location(name)
        raise busy_error("migrate", "other processes moved the file at each attempt", name=printable(name))

    def auto_tier(self, name: str, *, observe: PhaseObserver | None = None) -> str:
        """Move a file to the tier that its heat or its pin requires, and return the name of the tier that has it then.

        If the required tier is full, a pinned file stays where it is, and any other file gets the next slower tier with
        space. Unlike :meth:`migrate`, this method moves no colder files away to make space.

        Raises
        ------
        ApiError
            The file does not exist (ENOENT), or it was not moved; see :meth:`move`.
        """
        entry, now_half_lives = self.find(name), self.catalogue.now_half_lives()
        totals = self.catalogue.totals()
        remaining_limits = [
            replace(tier, limit_bytes=tier.limit_bytes - total.allocated_bytes - total.coming_bytes + own_bytes)
            for tier in self._tier_set.limits(totals)
            for total in (totals.get(tier.name, TierTotals()),)
            # The space of the file in its current tier counts as free, so that the file can stay in a full tier.
            for own_bytes in (entry.allocated_bytes if tier.name == entry.tier else 0,)
        ]
        row = FileRow(
            id=0,  # The ID is not used here.
            tier=entry.tier,
            allocated_bytes=entry.allocated_bytes,
            score=entry.score,
            pinned=entry.pinned,
            links=entry.links,
        )
        for decision in decide(
            [row], remaining_limits, now_half_lives=now_half_lives, hysteresis=self.configuration.hysteresis
        ):
            self.move(name, decision.destination, observe=observe)
            return decision.destination
        return entry.tier

    def plan(self) -> MigrationPlan:
        """Return the migrations that the policy requires now. The caller closes the plan."""
        self._check_open()
        self.access_counter.flush()
        limits = self._tier_set.limits(self.catalogue.totals())
        return MigrationPlan(self.catalogue, limits, hysteresis=self.configuration.hysteresis)

    def migrate(
        self,
        *,
        on_begin: Callable[[int, int], None] | None = None,
        observe: PhaseObserver | None = None,
        on_outcome: Callable[[PlannedMove, str], None] | None = None,
        rate_limiter: RateLimiter | None = None,
    ) -> Migrated:
        """Move files as the policy requires. A file that cannot be moved now is skipped.

        Parameters
        ----------
        on_begin : callable or None
            Called once with the number of the files that will be moved, and the space that they take in bytes.
        observe : callable or None
            Called at each phase of each file; see :meth:`move`.
        on_outcome : callable or None
            Called after each file with its planned move and the reason why the file was not moved (empty if it was
            moved).
        rate_limiter : RateLimiter or None
            The rate limit of the copies; see :meth:`move`.
        """
        refused_moves: list[RefusedMove] = []
        moved_count = moved_bytes = 0
        with self.plan() as plan:
            if on_begin is not None:
                on_begin(plan.count, plan.allocated_bytes)
            for planned_move in plan.moves():
                why_not_moved = ""
                try:
                    moved_bytes += self.move(
                        planned_move.name, planned_move.destination, observe=observe, rate_limiter=rate_limiter
                    )
                    moved_count += 1
                except (ApiError, DataMismatch) as error:
                    # Without the catalogue, no other file can be moved either.
                    if isinstance(error, ApiError) and error.api is Api.SQLITE:
                        raise
                    why_not_moved = str(error)
                    refused_moves.append(
                        RefusedMove(planned_move.name, planned_move.destination, error.reason, why_not_moved)
                    )
                if on_outcome is not None:
                    on_outcome(planned_move, why_not_moved)
            return Migrated(moved_count, moved_bytes, tuple(refused_moves), plan.considered_count)

    def pin(self, name: str, tier: str | None = None) -> str:
        """Pin a file to a tier, by default to its current one. The next run of the policy moves the file to that tier.

        Returns
        -------
        str
            Name of the tier.
        """
        pinned_tier = self.configuration.tier(tier).name if tier is not None else self.find(name).tier
        self._set_pin(name, pinned_tier)
        return pinned_tier

    def unpin(self, name: str) -> None:
        """Unpin a file, so that the policy may move it again."""
        self._set_pin(name, None)

    def status(self) -> list[TierStatus]:
        """Return the current state of the tiers, fastest first."""
        self._check_open()
        self.access_counter.flush()
        totals, folders, routes = self.catalogue.totals(), self._tier_set.folders, self.catalogue.routes()
        return [
            TierStatus(
                name=tier.name,
                directory=str(tier.directory),
                accesses_min=tier.accesses_min,
                files=total.files,
                size_bytes=total.size_bytes,
                allocated_bytes=total.allocated_bytes,
                coming_bytes=total.coming_bytes,
                limit_bytes=self._tier_set.limit_bytes(tier.name, totals),
                free_bytes=folders[tier.name].free_bytes() if tier.name in folders else 0,
                absent=self._tier_set.absent.get(tier.name, ""),
                route=routes.get(tier.name, UNOBSERVED),
            )
            for tier in self.configuration.tiers
            for total in (totals.get(tier.name, TierTotals()),)
        ]

    def check(self, *, repair: bool = False) -> list[TierFinding]:
        """Compare the catalogue with the disks and return the differences.

        Parameters
        ----------
        repair : bool
            Whether to correct the catalogue, complete or undo interrupted migrations, and rebuild a damaged catalogue.
            The only files that are removed are incomplete copies, and old files that a complete copy has replaced.
        """
        self._check_open()
        self.access_counter.flush()
        findings = [TierFinding(FindingKind.ABSENT, name, name, why) for name, why in self._tier_set.absent.items()]
        if self.catalogue.is_damaged():
            if repair:
                self.catalogue.rebuild()
            catalogue_path, text = str(self.catalogue.path), "not a valid database"
            findings.append(TierFinding(FindingKind.DAMAGED, catalogue_path, "", text, mended=repair))
            if not repair:
                return findings
        if repair:
            findings += self._recover()
        else:
            findings += find_interrupted_migrations(self._tier_set.folders)
        findings += compare_with_disks(self.catalogue, self._tier_set.folders, repair=repair)
        if any(finding.kind is FindingKind.MISSING and finding.mended for finding in findings):
            self._store_pins()
        return [*findings, *find_kept_files(self._tier_set.folders)]

    def folder(self, tier: str) -> TierFolder:
        """Return the folder of a tier.

        Raises
        ------
        SetupMissing
            The tier is not available.
        """
        self._check_open()
        return self._tier_set.folder(self.configuration.tier(tier).name)

    def close(self) -> None:
        """Write the last access counts to the catalogue, and close it and the tiers. A second close does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self.access_counter.flush()
            self._resources.run()
            self._handle.release()

    def _fill_new_catalogue(self, catalogue: Catalogue) -> None:
        """Fill a new catalogue with the files and the pins on disk."""
        fill_catalogue(catalogue, self.configuration, self._tier_set.folders)
        for name, tier in read_pins(self._tier_set.fastest).items():
            catalogue.pin(name, tier)

    def _recover(self) -> list[TierFinding]:
        """Recover the migrations of processes that died, and log the findings."""
        findings = recover(self._tier_set.folders, self.catalogue)
        for finding in findings:
            _log.warning("%s in %s: %s", printable(finding.name), finding.tier, finding.text)
        return findings

    def _record_location(self, name: str) -> None:
        """Find the file on the disks and write its current tier to the catalogue."""
        with convert_os_errors("find", name=printable(name)):
            tier_folder, descriptor = open_for_reading(name, self._tier_set.folders, self.catalogue)
            try:
                self.catalogue.record_file(name, tier_folder.name, os.fstat(descriptor))
            finally:
                os.close(descriptor)

    def _set_pin(self, name: str, tier: str | None) -> None:
        # The call raises an error if no tier has the file, and adds an existing file to the catalogue.
        self.find(name)
        with self.catalogue.write_transaction("pin"):
            self.catalogue.pin(name, tier)
            self._store_pins()

    def _store_pins(self) -> None:
        """Write all pins of the catalogue to the disk. This also drops the pins of files that the catalogue removed."""
        with self.catalogue.write_transaction("pin"):
            write_pins(self._tier_set.fastest, self.catalogue.pins())

    def _check_open(self) -> None:
        if self._is_closed:
            resource = "the tier manager"
            raise ClosedResource(resource)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _ignore_progress(phase: Phase, name: str, offset_bytes: int) -> None:
    """Ignore the progress of a migration."""
    del phase, name, offset_bytes
