"""Readers and writers in threads and processes use files while the files move. No call fails, and no byte is lost."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.processes import wait_until
from support.python_child import suites_environ
from support.tier_campaign import MigrationProcess
from support.tier_world import TIER_NAMES, create_file, read_contents, select_errors

from gdrkit.errors import ApiError, Reason
from gdrkit.tiers import TierManager
from gdrkit.units import KIB

if TYPE_CHECKING:
    from gdrkit.tiers import Configuration

# A record is a version and its bitwise inverse. If they do not match, the read returned parts of two versions (a torn
# record).
RECORD = struct.Struct("=QQ")
FILE_BYTES = 512 * KIB
MOVE_COUNT = 24


def make_contents(version: int) -> bytes:
    """Return the contents of one version of the file: the same record, repeated."""
    return RECORD.pack(version, ~version & 0xFFFF_FFFF_FFFF_FFFF) * (FILE_BYTES // RECORD.size)


def move_unless_busy(manager: TierManager, name: str, tier: str) -> None:
    """Move a file. The file stays in its tier if it is open for writing."""
    try:
        manager.move(name, tier)
    except ApiError as error:
        if error.reason is not Reason.BUSY:
            raise


def test_readers_continue_while_a_file_moves(manager: TierManager) -> None:
    data = create_file(manager, "file", FILE_BYTES, seed=1)
    finish_event = threading.Event()

    def read_repeatedly() -> int:
        read_count = 0
        while not finish_event.is_set():
            assert read_contents(manager, "file") == data
            read_count += 1
        return read_count

    with ThreadPoolExecutor(3) as executor:
        readers = [executor.submit(read_repeatedly) for _ in range(3)]
        with contextlib.ExitStack() as stack:
            stack.callback(finish_event.set)
            for tier in itertools.islice(itertools.cycle(TIER_NAMES), MOVE_COUNT):
                manager.move("file", tier)
        assert all(reader.result() > 0 for reader in readers)


def test_writes_during_moves_are_not_lost(manager: TierManager) -> None:
    create_file(manager, "file", FILE_BYTES, seed=1)
    finish_event, last_version = threading.Event(), [0]

    def write_versions() -> None:
        while not finish_event.is_set():
            last_version[0] += 1
            with manager.open("file", "r+") as file:
                assert os.pwrite(file.fileno(), make_contents(last_version[0]), 0) == FILE_BYTES

    def check_versions() -> None:
        newest_read_version = 0
        while not finish_event.is_set():
            version_before_read = last_version[0]
            with manager.open("file") as file:
                version, inverted_version = RECORD.unpack(os.pread(file.fileno(), RECORD.size, 0))
            # A record that was read during its write may be torn.
            if inverted_version == ~version & 0xFFFF_FFFF_FFFF_FFFF:
                assert version <= last_version[0]
                assert version >= newest_read_version, "the file has the bytes of an older version"
                newest_read_version = max(newest_read_version, min(version, version_before_read))

    with ThreadPoolExecutor(2) as executor:
        futures = [executor.submit(write_versions), executor.submit(check_versions)]
        with contextlib.ExitStack() as stack:
            stack.callback(finish_event.set)
            for tier in itertools.islice(itertools.cycle(TIER_NAMES), MOVE_COUNT):
                move_unless_busy(manager, "file", tier)
        for future in futures:
            future.result()
    assert read_contents(manager, "file") == make_contents(last_version[0])
    assert not select_errors(manager.check())


def test_waiting_writer_opens_the_new_file_of_that_name(manager: TierManager, configuration: Configuration) -> None:
    create_file(manager, "file", 1000, seed=1)
    path = configuration.tier("hdd").directory / "file"

    def is_writer_waiting() -> bool:
        # In /proc/locks, "->" marks a request that waits for a lock.
        waiting_locks = [line for line in Path("/proc/locks").read_text().splitlines() if "-> FLOCK" in line]
        return any(f":{inode} " in line for line in waiting_locks)

    with path.open("rb") as old_file, ThreadPoolExecutor(1) as executor:
        inode = os.fstat(old_file.fileno()).st_ino
        fcntl.flock(old_file, fcntl.LOCK_EX)
        writer = executor.submit(manager.open, "file", "r+")
        wait_until(is_writer_waiting, "the writer waits for the lock")
        path.rename(configuration.tier("nvme").directory / "elsewhere")
        path.write_bytes(b"new")
        fcntl.flock(old_file, fcntl.LOCK_UN)
        with writer.result() as file:
            assert os.pread(file.fileno(), 10, 0) == b"new"


def test_processes_share_one_catalogue(configuration: Configuration) -> None:
    names = [f"file-{index}" for index in range(4)]
    with TierManager(configuration) as manager:
        data_by_name = {name: create_file(manager, name, 100_000 + len(name), seed=7) for name in names}
        with contextlib.ExitStack() as stack:
            migration_processes = [stack.enter_context(MigrationProcess()) for _ in range(3)]
            for repetition in range(6):
                for index, migration_process in enumerate(migration_processes):
                    tier = TIER_NAMES[(repetition + index) % len(TIER_NAMES)]
                    # The first two processes move the same file. One of them may fail with BUSY, and then its exit code
                    # is 1.
                    migration_process.start(configuration, names[(repetition + index // 2) % len(names)], tier)
                for name, data in data_by_name.items():
                    assert read_contents(manager, name) == data
                for migration_process in migration_processes:
                    assert migration_process.wait_for_exit_code() in {0, 1}
        assert not select_errors(manager.check())
        assert {name: read_contents(manager, name) for name in names} == data_by_name


@pytest.mark.timeout(300)
def test_processes_that_start_together_create_one_catalogue(configuration: Configuration) -> None:
    (configuration.tier("ssd").directory / "file").write_bytes(b"here")
    opening_program = """
import sys
from pathlib import Path
from support.tier_world import make_configuration, read_contents
from gdrkit.tiers import TierManager
sys.stdin.read(1)
with TierManager(make_configuration(Path(sys.argv[1]))) as manager:
    for _ in range(20):
        manager.open("file").close()
    assert read_contents(manager, "file") == b"here"
"""
    command = [sys.executable, "-c", opening_program, str(configuration.catalogue.parent)]
    with contextlib.ExitStack() as stack:
        environ = suites_environ()
        processes = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, env=environ)) for _ in range(4)
        ]
        for process in processes:
            # The process waits for this byte before it opens the tiers.
            assert process.stdin is not None
            process.stdin.write(b"x")
            process.stdin.close()
        assert [process.wait(240) for process in processes] == [0] * 4
    with TierManager(configuration) as manager:
        assert len(list(configuration.catalogue.glob("*.sqlite"))) == 1
        # Each of the 4 processes opened the file 20 times in the loop, and once in read_contents().
        assert manager.find("file").accesses == 4 * 21


def test_two_managers_create_a_file_once(configuration: Configuration) -> None:
    with TierManager(configuration) as first_manager, TierManager(configuration) as second_manager:
        with ThreadPoolExecutor(2) as executor:
            for index in range(20):
                name = f"folder-{index}/file"
                files = list(
                    executor.map(lambda manager, name=name: manager.open(name, "a+"), (first_manager, second_manager))
                )
                assert len({os.fstat(file.fileno()).st_ino for file in files}) == 1
                for file in files:
                    file.close()
        assert not select_errors(first_manager.check())
