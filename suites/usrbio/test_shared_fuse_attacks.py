"""Attacks on an agent that root shares with all users by a FUSE mount: renames, renewed sessions, lost capabilities."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import signal
from typing import TYPE_CHECKING

import pytest
from support.processes import wait_until
from usrbio.user_processes import (
    ALICE,
    BOB,
    GROUP,
    UserProcess,
    catch_errno,
    publish_iov_and_ring,
    shared_mount,
    transfer,
)

from gdrkit import pattern
from gdrkit.harness.needs import host, needs, verbs
from gdrkit.units import KIB
from gdrkit.usrbio import virtual
from gdrkit.usrbio.agent import protocol
from gdrkit.usrbio.agent.protocol import AgentRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path

pytestmark = needs(verbs.nic(), host.fuse, host.capability("CAP_SETUID"))


@pytest.fixture
def mount() -> Iterator[Path]:
    """Yield a shared FUSE mount in which every user can create files. Its store is the folder `store` beside it."""
    with shared_mount() as (_agent, mount, _plain):
        yield mount


def attack_by_rename(mount: Path, connection: Connection) -> None:
    """Put the private folder of another user at the path of an open file of this user, and register the file."""
    folder = mount / "group"
    (folder / "own").mkdir()
    (folder / "own" / "key").write_bytes(bytes(64 * KIB))
    fd = os.open(folder / "own" / "key", os.O_RDWR)
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    inode = os.fstat(folder_fd).st_ino
    for name, new_name in ((b"own", b"away"), (b"private", b"own")):
        # The kernel of the client does not see this rename, so it still looks for the open file at the old path.
        argument = virtual.MOVE_ARGUMENT.pack(inode, name, inode, new_name, 0)
        fcntl.ioctl(folder_fd, virtual.MOVE, bytearray(argument))
    with publish_iov_and_ring(mount) as (client, _iov, _ring):
        hole_payload = protocol.pack_punch(0, ((0, 64 * KIB),))
        connection.send(
            [
                catch_errno(lambda: client.register_file(fd)),
                catch_errno(lambda: client.request(AgentRequest.PUNCH_HOLE, hole_payload, [fd])),
            ]
        )


def test_renamed_private_folder_gives_no_access(mount: Path) -> None:
    group_folder, private_folder = mount / "group", mount / "group" / "private"
    group_folder.mkdir()
    os.chown(group_folder, 0, GROUP)
    group_folder.chmod(0o775)
    private_folder.mkdir()
    (private_folder / "key").write_bytes(pattern.payload(64 * KIB, seed=7))
    (private_folder / "key").chmod(0o600)
    os.chown(private_folder / "key", ALICE, ALICE)
    os.chown(private_folder, ALICE, ALICE)
    private_folder.chmod(0o700)
    with UserProcess(BOB, lambda pipe: attack_by_rename(mount, pipe), groups=[GROUP]) as bob:
        assert bob.receive() == [errno.EACCES, errno.EACCES]
    assert (group_folder / "own" / "key").read_bytes() == pattern.payload(64 * KIB, seed=7)


def read_registered(mount: Path, path: Path, connection: Connection) -> None:
    """Register a file, read it once, and read it again after each message."""
    with publish_iov_and_ring(mount) as (client, iov, ring), path.open("rb") as file:
        inode = client.register_file(file.fileno())
        while True:
            connection.send(transfer(ring, iov.id.bytes, inode))
            connection.recv()


def test_new_session_reopens_files_as_their_user() -> None:
    with shared_mount() as (agent, mount, _plain):
        path, stored_file = mount / "file", mount.parent / "store" / "file"
        path.write_bytes(bytes(64 * KIB))
        stored_file.chmod(0o644)
        with UserProcess(BOB, lambda pipe: read_registered(mount, path, pipe), groups=[GROUP]) as bob:
            assert bob.receive() == 4 * KIB
            # Until the agent notices the end of the session, its own reads of cached bytes have the old access.
            # The second mode would allow the access, but a file that the server has refused once stays refused.
            for file_mode, results_before_renewal in (
                (0o600, {-errno.EREMOTEIO, 4 * KIB}),
                (0o644, {-errno.EREMOTEIO}),
            ):
                stored_file.chmod(file_mode)
                os.kill(agent.find_server_process_id(), signal.SIGKILL)
                results = [-errno.EREMOTEIO]

                def ask(results: list[int] = results, ignored_results: set[int] = results_before_renewal) -> bool:
                    results.append(bob.ask())
                    return results[-1] not in ignored_results

                wait_until(ask, "the agent has a new session", timeout_s=30)
                assert results[-1] == -errno.EACCES


def truncate_and_punch(folder: Path, connection: Connection) -> None:
    """Truncate a program of another user, punch a hole into another program, and send the errno of each call."""

    def punch() -> None:
        fd = os.open(folder / "punch", os.O_RDWR)
        # PUNCH_HOLE: one range, no flags, 1000 starts and 1000 ends. The range is from 0 to 4096.
        argument = virtual.PUNCH_HOLE_ARGUMENT.pack(1, 0, *[0] * 1000, 4096, *[0] * 999)
        fcntl.ioctl(fd, virtual.PUNCH_HOLE, bytearray(argument))

    def open_empty() -> None:
        os.close(os.open(folder / "open", os.O_WRONLY | os.O_TRUNC))

    connection.send({"open": catch_errno(open_empty), "punch": catch_errno(punch)})


def test_truncation_clears_the_set_user_id_bits(mount: Path) -> None:
    store_folder = mount.parent / "store"
    for name in ("open", "punch"):
        (store_folder / name).write_bytes(bytes(64 * KIB))
        os.chown(store_folder / name, ALICE, GROUP)
        (store_folder / name).chmod(0o6777)
    with UserProcess(BOB, lambda pipe: truncate_and_punch(mount, pipe)) as bob:
        results = bob.receive()
    modes = {name: oct((store_folder / name).stat().st_mode & 0o7777) for name in results}
    assert (results, modes) == (dict.fromkeys(results, 0), dict.fromkeys(results, oct(0o777)))


def use_ioctls_without_capabilities(mount: Path, connection: Connection) -> None:
    """Give up all capabilities of root, and send the errno of each ioctl that names an entry of a folder."""
    # The structs of capset(2): version 3 and thread 0 (this thread), and empty effective, permitted and inheritable
    # sets.
    header, capability_sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, capability_sets) == 0
    root_fd = os.open(mount, os.O_RDONLY | os.O_DIRECTORY)
    inode = os.fstat(root_fd).st_ino
    argument_by_request = {
        virtual.MOVE: virtual.MOVE_ARGUMENT.pack(inode, b"private", inode, b"taken", 0),
        virtual.REMOVE: virtual.REMOVE_ARGUMENT.pack(inode, b"private", 1),
        virtual.RECURSIVE_RM: bytes(4),
        virtual.HARDLINK: virtual.HARDLINK_ARGUMENT.pack(inode, b"linked"),
    }
    results = {}
    with (mount / "readable").open("rb") as file:
        folder_fd = os.open(mount / "open", os.O_RDONLY | os.O_DIRECTORY)
        fd_by_request = {virtual.RECURSIVE_RM: folder_fd, virtual.HARDLINK: file.fileno()}
        for request, argument in argument_by_request.items():
            action = functools.partial(fcntl.ioctl, fd_by_request.get(request, root_fd), request, bytearray(argument))
            results[request] = catch_errno(action)
        make_rm_rf_link = functools.partial((mount / "3fs-virt" / "rm-rf" / "x").symlink_to, mount / "open")
        # The key 0 stands for the link in rm-rf, which is not an ioctl.
        results[0] = catch_errno(make_rm_rf_link)
    connection.send(list(results.values()))


def test_root_without_capabilities_cannot_use_paths_by_ioctls(mount: Path) -> None:
    for name in ("private", "open"):
        (mount / name).mkdir()
        os.chown(mount / name, ALICE, ALICE)
    (mount / "readable").write_bytes(b"content")
    with UserProcess(0, lambda pipe: use_ioctls_without_capabilities(mount, pipe)) as root:
        assert root.receive() == [errno.EPERM] * 5
    assert (mount / "private").exists()
    assert (mount / "open").exists()
