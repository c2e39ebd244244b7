"""Files in tiers match a model dictionary after random operations, by Hypothesis.

Readers and writers hold files open or open them during a migration, processes are killed, and the catalogue is lost.
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
from support.tier_campaign import Mover
from support.tier_world import NAMES, configuration_of, contents

from gdrkit import handles, pattern
from gdrkit.errors import ApiError, Reason
from gdrkit.tiers import FindingKind, Phase, TieredFile, TierManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FILES = ("a", "b", "folder/c", "folder/d")
SIZE_MAX = 20_000
DAY_S = 86400.0
EXAMPLES = int(os.environ.get("GDRKIT_EXAMPLES", "12"))

names = strategies.sampled_from(FILES)
tiers = strategies.sampled_from(NAMES)
phases = strategies.sampled_from(list(Phase))
seeds = strategies.integers(0, 1000)
sizes = strategies.integers(0, SIZE_MAX)


@dataclass(eq=False)
class OpenFile:
    """An open file.

    `frozen` is the content that an open reader keeps seeing after the file was moved or removed; None before that.
    """

    name: str
    file: TieredFile
    frozen: bytes | None = None


class TierMachine(RuleBasedStateMachine):
    """The state machine of tiers and the model dictionary. Subclasses set the process that migrates."""

    mover: ClassVar[Mover]

    def __init__(self) -> None:
        super().__init__()
        # All tiers are in memory, so that nothing waits for a device. suites/tiers has cases with devices.
        self.root = Path(tempfile.mkdtemp(prefix="gdrkit-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))  # noqa: PTH112, S108
        self.configuration = configuration_of(self.root, half_life_s=DAY_S)
        self.now_s = 1_800_000_000.0
        self.model: dict[str, bytes] = {}
        self.pins: dict[str, str] = {}
        self.readers: list[OpenFile] = []
        self.writers: list[OpenFile] = []
        self.manager = self._manager()

    def _manager(self) -> TierManager:
        return TierManager(self.configuration, clock=lambda: self.now_s)

    def _is_written(self, name: str) -> bool:
        return any(each.name == name for each in self.writers)

    def _freeze_readers(self, name: str) -> None:
        """Save the current content for the open readers, whose descriptors keep the old file."""
        for each in self.readers:
            if each.name == name and each.frozen is None:
                each.frozen = self.model[name]

    def _write(self, file: TieredFile, name: str, offset: int, seed: int) -> None:
        part = pattern.payload(500, seed=seed)
        assert os.pwrite(file.fileno(), part, offset) == len(part)
        old = self.model[name].ljust(offset, b"\0")
        self.model[name] = old[:offset] + part + old[offset + len(part) :]

    # ------------------------------------------------------------------------------------------------------- files

    @rule(name=names, size=sizes, seed=seeds)
    def create(self, name: str, size: int, seed: int) -> None:
        if name in self.model:
            return
        self.model[name] = pattern.payload(size, seed=seed)
        with self.manager.open(name, "a+") as file:
            os.pwrite(file.fileno(), self.model[name], 0)

    @rule(name=names)
    def remove(self, name: str) -> None:
        if self._is_written(name):
            with pytest.raises(ApiError) as raised:
                self.manager.remove(name)
            assert raised.value.reason is Reason.BUSY
        elif name in self.model:
            self._freeze_readers(name)
            self.manager.remove(name)
            del self.model[name]
            self.pins.pop(name, None)
        else:
            with pytest.raises(ApiError):
                self.manager.remove(name)

    @rule(name=names, offset=sizes, seed=seeds)
    def write(self, name: str, offset: int, seed: int) -> None:
        if name in self.model:
            with self.manager.open(name, "r+") as file:
                self._write(file, name, offset, seed)

    @rule(name=names)
    def read(self, name: str) -> None:
        if name in self.model:
            assert contents(self.manager, name) == self.model[name]
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
    @rule(choice=seeds, offset=sizes, seed=seeds)
    def write_by_an_open_writer(self, choice: int, offset: int, seed: int) -> None:
        open_file = self.writers[choice % len(self.writers)]
        self._write(open_file.file, open_file.name, offset, seed)

    @precondition(lambda self: self.writers or self.readers)
    @rule(choice=seeds)
    def close_a_file(self, choice: int) -> None:
        open_files = [*self.writers, *self.readers]
        open_file = open_files[choice % len(open_files)]
        open_file.file.close()
        (self.writers if open_file in self.writers else self.readers).remove(open_file)

    # -------------------------------------------------------------------------------------------------- migrations

    @rule(name=names, to=tiers)
    def move(self, name: str, to: str) -> None:
        if name not in self.model:
            return
        source = self.manager.find(name).tier
        if self._is_written(name) and source != to:
            self._check_move_is_refused(name, to)
        else:
            self._freeze_if_moved(name, source, to)
            self.manager.move(name, to)

    @rule(name=names, to=tiers, phase=phases)
    def move_with_a_reader(self, name: str, to: str, phase: Phase) -> None:
        """Open and read the file during the migration: the reader sees its whole content."""
        if name not in self.model or self._is_written(name):
            return

        def read(reached: Phase, _name: str, _offset: int) -> None:
            if reached is phase:
                assert contents(self.manager, name) == self.model[name]

        self._freeze_if_moved(name, self.manager.find(name).tier, to)
        self.manager.move(name, to, observe=read)

    @rule(name=names, to=tiers, phase=phases, offset=sizes, seed=seeds)
    def move_with_a_writer(self, name: str, to: str, phase: Phase, offset: int, seed: int) -> None:
        """Open and write the file during the migration: the write succeeds whether or not the migration completes."""
        if name not in self.model or self._is_written(name):
            return
        threads: list[threading.Thread] = []
        before, source = self.model[name], self.manager.find(name).tier

        def write() -> None:
            with self.manager.open(name, "r+") as file:
                self._write(file, name, offset, seed)

        def start_writer(reached: Phase, _name: str, _offset: int) -> None:
            if reached is phase and not threads:
                threads.append(threading.Thread(target=write))
                threads[0].start()

        has_moved = self._try_move(name, to, start_writer)
        for thread in threads:
            thread.join()
        for each in self.readers if has_moved and source != to else ():
            if each.name == name and each.frozen is None:
                each.frozen = before

    @rule(name=names, to=tiers, phase=phases)
    def kill_a_move(self, name: str, to: str, phase: Phase) -> None:
        if name not in self.model:
            return
        source = self.manager.find(name).tier
        self.mover.start(self.configuration, name, to, phase=phase.value, how="kill")
        ended = self.mover.migration_code()
        assert ended == (0 if source == to else 1 if self._is_written(name) else -signal.SIGKILL)
        if ended == -signal.SIGKILL:
            self.manager.check(repair=True)
            self._freeze_if_moved(name, source, self.manager.find(name).tier)

    @rule()
    def migrate(self) -> None:
        before = {name: self.manager.find(name).tier for name in self.model}
        report = self.manager.migrate()
        assert {each.name for each in report.refused} <= {each.name for each in self.writers}
        for name, source in before.items():
            self._freeze_if_moved(name, source, self.manager.find(name).tier)
            if name in self.pins and not self._is_written(name):
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

    def _check_move_is_refused(self, name: str, to: str) -> None:
        with pytest.raises(ApiError) as raised:
            self.manager.move(name, to)
        assert raised.value.reason is Reason.BUSY

    def _try_move(self, name: str, to: str, observe: Callable[[Phase, str, int], None]) -> bool:
        try:
            self.manager.move(name, to, observe=observe)
        except ApiError as error:
            if error.reason is not Reason.BUSY:
                raise
            return False
        return True

    def _freeze_if_moved(self, name: str, source: str, to: str) -> None:
        if source != to:
            self._freeze_readers(name)

    # ------------------------------------------------------------------------------------------------- environment

    @rule(days=strategies.floats(-400, 400))
    def set_the_clock(self, days: float) -> None:
        self.now_s += days * DAY_S

    @rule()
    def restart(self) -> None:
        self.manager.close()
        self.manager = self._manager()

    @rule()
    def lose_the_catalogue(self) -> None:
        self.manager.close()
        shutil.rmtree(self.configuration.catalogue)
        self.manager = self._manager()

    @rule(name=names)
    def append_without_gdrkit(self, name: str) -> None:
        if name in self.model:
            with (self.configuration.tier(self.manager.find(name).tier).directory / name).open("ab") as file:
                file.write(b"more")
            self.model[name] += b"more"
            self.manager.check(repair=True)

    @invariant()
    def the_disks_have_each_file_once(self) -> None:
        seen = list(self._on_disk())
        assert sorted(name for name, _tier, _data in seen) == sorted(self.model)
        for name, tier, data in seen:
            assert data == self.model[name], name
            entry = self.manager.catalogue.find(name)
            assert entry is not None
            assert (entry.tier, entry.pinned) == (tier, self.pins.get(name))

    @invariant()
    def open_readers_read_the_expected_bytes(self) -> None:
        for each in self.readers:
            expected = self.model[each.name] if each.frozen is None else each.frozen
            assert os.pread(each.file.fileno(), 2 * SIZE_MAX, 0) == expected

    def _on_disk(self) -> Iterator[tuple[str, str, bytes]]:
        for tier, name in itertools.product(self.configuration.tiers, FILES):
            path = tier.directory / name
            if path.exists():
                yield name, tier.name, path.read_bytes()

    def teardown(self) -> None:
        for each in (*self.readers, *self.writers):
            each.file.close()
        try:
            # A writer that outlived its manager has not recorded the new size of the file.
            assert {each.kind for each in self.manager.check(repair=True)} <= {FindingKind.CHANGED}
            assert not self.manager.check()
        finally:
            self.manager.close()
            shutil.rmtree(self.root)


@pytest.mark.timeout(3600)
def test_tier_files_match_a_model_dictionary(seed: int) -> None:
    settings = hypothesis.settings(
        max_examples=EXAMPLES,
        stateful_step_count=30,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    with Mover() as mover:

        class Machine(TierMachine):
            pass

        Machine.mover = mover
        before = handles.live()
        run_state_machine_as_test(hypothesis.seed(seed)(Machine), settings=settings)
        assert handles.live() == before
