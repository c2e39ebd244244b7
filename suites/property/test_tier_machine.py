"""State machine test (Hypothesis) of storage tiers: after random operations, the files match a model dictionary.

The operations also keep files open, open files during a migration, kill migrating processes, and delete the catalogue.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import hypothesis
import pytest
from hypothesis import strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from support.tier_campaign import MigrationProcess
from support.tier_world import TIER_NAMES, make_configuration, read_contents

from gdrkit import handles, pattern
from gdrkit.errors import ApiError, Reason
from gdrkit.tiers import FindingKind, Phase, TieredFile, TierManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FILE_NAMES = ("a", "b", "folder/c", "folder/d")
FILE_BYTES_MAX = 20_000
WRITE_BYTES = 500
DAY_S = 86400.0
EXAMPLES_COUNT = int(os.environ.get("GDRKIT_EXAMPLES", "12"))

# Strategies of the arguments of the rules.
names = strategies.sampled_from(FILE_NAMES)
tiers = strategies.sampled_from(TIER_NAMES)
phases = strategies.sampled_from(list(Phase))
seeds = strategies.integers(0, 1000)
byte_counts = strategies.integers(0, FILE_BYTES_MAX)


@dataclass(eq=False)
class OpenFile:
    """An open file.

    Attributes
    ----------
    name : str
        Name of the file.
    file : TieredFile
        The open file.
    contents_when_moved : bytes, optional
        The contents of the file when it was moved or removed, which an open reader still reads. None before that.
    """

    name: str
    file: TieredFile
    contents_when_moved: bytes | None = None


class TierMachine(RuleBasedStateMachine):
    """The state machine of the tiers and the model dictionary. A subclass sets `migration_process`."""

    migration_process: ClassVar[MigrationProcess]

    def __init__(self) -> None:
        super().__init__()
        # All tiers are in memory, so that no operation waits for a disk. suites/tiers has cases with disks.
        self.root = Path(tempfile.mkdtemp(prefix="gdrkit-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))  # noqa: PTH112, S108
        self.configuration = make_configuration(self.root, half_life_s=DAY_S)
        self.now_s = 1_800_000_000.0  # In January 2027.
        # The model dictionary: the expected contents of each file, by the name of the file.
        self.model: dict[str, bytes] = {}
        # The tier to which each pinned file is pinned, by the name of the file.
        self.pins: dict[str, str] = {}
        self.readers: list[OpenFile] = []
        self.writers: list[OpenFile] = []
        self.manager = self._open_manager()

    def _open_manager(self) -> TierManager:
        return TierManager(self.configuration, clock=lambda: self.now_s)

    def _has_writer(self, name: str) -> bool:
        return any(writer.name == name for writer in self.writers)

    def _save_contents_for_readers(self, name: str) -> None:
        """Save the contents that the open readers of a file still read after it is moved or removed."""
        for reader in self.readers:
            if reader.name == name and reader.contents_when_moved is None:
                reader.contents_when_moved = self.model[name]

    def _write(self, file: TieredFile, name: str, offset_bytes: int, seed: int) -> None:
        new_data = pattern.payload(WRITE_BYTES, seed=seed)
        assert os.pwrite(file.fileno(), new_data, offset_bytes) == len(new_data)
        padded_contents = self.model[name].ljust(offset_bytes, b"\0")
        self.model[name] = padded_contents[:offset_bytes] + new_data + padded_contents[offset_bytes + len(new_data) :]

    # ------------------------------------------------------------------------------------------------------- files

    @rule(name=names, size_bytes=byte_counts, seed=seeds)
    def create(self, name: str, size_bytes: int, seed: int) -> None:
        if name in self.model:
            return
        self.model[name] = pattern.payload(size_bytes, seed=seed)
        with self.manager.open(name, "a+") as file:
            os.pwrite(file.fileno(), self.model[name], 0)

    @rule(name=names)
    def remove(self, name: str) -> None:
        if self._has_writer(name):
            with pytest.raises(ApiError) as error_info:
                self.manager.remove(name)
            assert error_info.value.reason is Reason.BUSY
        elif name in self.model:
            self._save_contents_for_readers(name)
            self.manager.remove(name)
            del self.model[name]
            self.pins.pop(name, None)
        else:
            with pytest.raises(ApiError):
                self.manager.remove(name)

    @rule(name=names, offset_bytes=byte_counts, seed=seeds)
    def write(self, name: str, offset_bytes: int, seed: int) -> None:
        if name in self.model:
            with self.manager.open(name, "r+") as file:
                self._write(file, name, offset_bytes, seed)

    @rule(name=names)
    def read(self, name: str) -> None:
        if name in self.model:
            assert read_contents(self.manager, name) == self.model[name]
        else:
            with pytest.raises(ApiError):
                self.manager.open(name)

    @rule(name=names)
    def open_a_reader(self, name: str) -> None:
        if name in self.model and len(self.readers) < 5:
            self.readers.append(OpenFile(name, self.manager.open(name)))

    @rule(name=names)
    def open_a_writer(self, name: str) -> None:
        if name in self.model and len(self.writers) < 3:
            self.writers.append(OpenFile(name, self.manager.open(name, "r+")))

    @precondition(lambda self: self.writers)
    @rule(file_number=seeds, offset_bytes=byte_counts, seed=seeds)
    def write_by_an_open_writer(self, file_number: int, offset_bytes: int, seed: int) -> None:
        open_file = self.writers[file_number % len(self.writers)]
        self._write(open_file.file, open_file.name, offset_bytes, seed)

    @precondition(lambda self: self.writers or self.readers)
    @rule(file_number=seeds)
    def close_a_file(self, file_number: int) -> None:
        open_files = [*self.writers, *self.readers]
        open_file = open_files[file_number % len(open_files)]
        open_file.file.close()
        (self.writers if open_file in self.writers else self.readers).remove(open_file)

    # -------------------------------------------------------------------------------------------------- migrations

    @rule(name=names, destination=tiers)
    def move(self, name: str, destination: str) -> None:
        if name not in self.model:
            return
        source = self.manager.find(name).tier
        if self._has_writer(name) and source != destination:
            self._check_move_is_refused(name, destination)
        else:
            self._save_contents_if_moved(name, source, destination)
            self.manager.move(name, destination)

    @rule(name=names, destination=tiers, phase=phases)
    def move_with_a_reader(self, name: str, destination: str, phase: Phase) -> None:
        """Open and read the file during the migration. The reader gets all bytes of the file."""
        if name not in self.model or self._has_writer(name):
            return

        def read_in_phase(current_phase: Phase, _name: str, _offset: int) -> None:
            if current_phase is phase:
                assert read_contents(self.manager, name) == self.model[name]

        self._save_contents_if_moved(name, self.manager.find(name).tier, destination)
        self.manager.move(name, destination, observe=read_in_phase)

    @rule(name=names, destination=tiers, phase=phases, offset_bytes=byte_counts, seed=seeds)
    def move_with_a_writer(self, name: str, destination: str, phase: Phase, offset_bytes: int, seed: int) -> None:
        """Open and write the file during the migration: the write succeeds whether or not the migration completes."""
        if name not in self.model or self._has_writer(name):
            return
        # Opening a file for writing waits for the end of its migration, so the writer has a thread of its own.
        threads: list[threading.Thread] = []
        old_contents, source = self.model[name], self.manager.find(name).tier

        def write() -> None:
            with self.manager.open(name, "r+") as file:
                self._write(file, name, offset_bytes, seed)

        def start_writer(current_phase: Phase, _name: str, _offset: int) -> None:
            # Some phases begin several times.
            if current_phase is phase and not threads:
                threads.append(threading.Thread(target=write))
                threads[0].start()

        has_moved = self._try_move(name, destination, start_writer)
        for thread in threads:
            thread.join()
        for reader in self.readers if has_moved and source != destination else ():
            if reader.name == name and reader.contents_when_moved is None:
                reader.contents_when_moved = old_contents

    @rule(name=names, destination=tiers, phase=phases)
    def kill_a_move(self, name: str, destination: str, phase: Phase) -> None:
        if name not in self.model:
            return
        source = self.manager.find(name).tier
        # The migration of an empty file copies and verifies no chunk, so it begins neither of these two phases.
        reaches_phase = bool(self.model[name]) or phase not in {Phase.COPY, Phase.VERIFY}
        self.migration_process.start(self.configuration, name, destination, phase=phase.value, signal_name="kill")
        exit_code = self.migration_process.wait_for_exit_code()
        # The process exits with 0 if the file is in the destination, and with 1 if the file is busy.
        is_busy = self._has_writer(name) and source != destination
        assert exit_code == (1 if is_busy else -signal.SIGKILL if reaches_phase and source != destination else 0)
        if not is_busy:
            self.manager.check(repair=True)
            self._save_contents_if_moved(name, source, self.manager.find(name).tier)

    @rule()
    def migrate(self) -> None:
        tiers_before = {name: self.manager.find(name).tier for name in self.model}
        report = self.manager.migrate()
        assert {refusal.name for refusal in report.refused} <= {writer.name for writer in self.writers}
        for name, source in tiers_before.items():
            self._save_contents_if_moved(name, source, self.manager.find(name).tier)
            if name in self.pins and not self._has_writer(name):
                assert self.manager.find(name).tier == self.pins[name]

    @rule(name=names, tier=tiers)
    def pin(self, name: str, tier: str) -> None:
        if name in self.model:
            self.manager.pin(name, tier)
            self.pins[name] = tier

    @rule(name=names)
    def unpin(self, name: str) -> None:
        if name in self.model:
            self.manager.unpin(name)
            self.pins.pop(name, None)

    def _check_move_is_refused(self, name: str, destination: str) -> None:
        with pytest.raises(ApiError) as error_info:
            self.manager.move(name, destination)
        assert error_info.value.reason is Reason.BUSY

    def _try_move(self, name: str, destination: str, observe: Callable[[Phase, str, int], None]) -> bool:
        """Move the file and return True, or return False if a program writes the file."""
        try:
            self.manager.move(name, destination, observe=observe)
        except ApiError as error:
            if error.reason is not Reason.BUSY:
                raise
            return False
        return True

    def _save_contents_if_moved(self, name: str, source: str, destination: str) -> None:
        if source != destination:
            self._save_contents_for_readers(name)

    # ------------------------------------------------------------------------------------------------- environment

    @rule(shift_days=strategies.floats(-400, 400))
    def shift_the_clock(self, shift_days: float) -> None:
        self.now_s += shift_days * DAY_S

    @rule()
    def restart(self) -> None:
        self.manager.close()
        self.manager = self._open_manager()

    @rule()
    def lose_the_catalogue(self) -> None:
        self.manager.close()
        shutil.rmtree(self.configuration.catalogue)
        self.manager = self._open_manager()

    @rule(name=names)
    def append_without_gdrkit(self, name: str) -> None:
        if name in self.model:
            with (self.configuration.tier(self.manager.find(name).tier).directory / name).open("ab") as file:
                file.write(b"more")
            self.model[name] += b"more"
            self.manager.check(repair=True)

    @invariant()
    def the_disks_have_each_file_once(self) -> None:
        files_on_disk = list(self._read_files_on_disk())
        assert sorted(name for name, _tier, _contents in files_on_disk) == sorted(self.model)
        for name, tier, contents in files_on_disk:
            assert contents == self.model[name], name
            entry = self.manager.catalogue.find(name)
            assert entry is not None
            assert (entry.tier, entry.pinned) == (tier, self.pins.get(name))

    @invariant()
    def open_readers_read_the_expected_bytes(self) -> None:
        for reader in self.readers:
            expected_bytes = (
                self.model[reader.name] if reader.contents_when_moved is None else reader.contents_when_moved
            )
            assert os.pread(reader.file.fileno(), 2 * FILE_BYTES_MAX, 0) == expected_bytes

    def _read_files_on_disk(self) -> Iterator[tuple[str, str, bytes]]:
        for tier, name in itertools.product(self.configuration.tiers, FILE_NAMES):
            path = tier.directory / name
            if path.exists():
                yield name, tier.name, path.read_bytes()

    def teardown(self) -> None:
        for open_file in (*self.readers, *self.writers):
            open_file.file.close()
        try:
            # A writer that was opened before a restart of the manager does not record the new size of the file in the
            # catalogue. The first check may report and repair such a size.
            assert {finding.kind for finding in self.manager.check(repair=True)} <= {FindingKind.CHANGED}
            assert not self.manager.check()
        finally:
            self.manager.close()
            shutil.rmtree(self.root)


@pytest.mark.timeout(3600)
def test_tier_files_match_a_model_dictionary(seed: int) -> None:
    settings = hypothesis.settings(
        max_examples=EXAMPLES_COUNT,
        stateful_step_count=30,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    with MigrationProcess() as migration_process:

        class Machine(TierMachine):
            pass

        Machine.migration_process = migration_process
        handles_before = handles.live()
        run_state_machine_as_test(hypothesis.seed(seed)(Machine), settings=settings)
        assert handles.live() == handles_before
