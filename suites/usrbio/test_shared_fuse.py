"""A FUSE mount that root shares with all users: each user has the same rights as on a plain folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.other_user import folder_for_all_users
from support.processes import wait_until
from support.raw_usrbio import AgentProcess, LinkClient, RawIov, RawRing
from support.storage import run_storage_server
from usrbio.user_processes import ALICE, BOB, GROUP, UserProcess, catch_errno, shared_mount, transfer

from gdrkit import pattern
from gdrkit.harness.needs import host, needs, verbs
from gdrkit.storage import messages
from gdrkit.storage.store import FileStore
from gdrkit.units import KIB
from gdrkit.usrbio import virtual

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from gdrkit.harness.evidence import Evidence

pytestmark = needs(verbs.nic(), host.fuse, host.capability("CAP_SETUID"))
# Users and their supplementary groups.
USERS: tuple[tuple[int, list[int]], ...] = ((0, [0]), (ALICE, []), (BOB, [GROUP]))


@pytest.fixture
def folders() -> Iterator[tuple[Path, Path]]:
    """Yield a shared FUSE mount and a plain folder, in which every user can create files."""
    with shared_mount() as (_agent, mount, plain_folder):
        yield mount, plain_folder


def make_tree(root: Path) -> None:
    """Create files and folders of several users, with several modes."""
    for owner in (0, ALICE, BOB):
        for folder_mode in (0o700, 0o750, 0o744, 0o1777, 0o2775):
            folder = root / f"{owner}-{folder_mode:o}"
            folder.mkdir()
            for name, file_mode in (("secret", 0o600), ("public", 0o666), ("write-only", 0o200)):
                (folder / name).write_bytes(b"content")
                os.chown(folder / name, owner, GROUP)
                (folder / name).chmod(file_mode)
            os.chown(folder, owner, GROUP)
            folder.chmod(folder_mode)


def make_operations(folder: Path) -> dict[str, Callable[[], object]]:
    """Return operations on the entries of a folder, by their labels."""
    secret, public, write_only = folder / "secret", folder / "public", folder / "write-only"

    def make_write(path: Path, flags: int) -> Callable[[], object]:
        def run() -> None:
            fd = os.open(path, flags, 0o666)
            try:
                os.write(fd, b"written")
            finally:
                os.close(fd)

        return run

    def make_set_times(path: Path, times_ns: tuple[int, int] | None) -> Callable[[], object]:
        return lambda: os.utime(path, ns=times_ns) if times_ns else os.utime(path)

    return {
        "list": lambda: list(folder.iterdir()),
        "stat": secret.stat,
        "read secret": secret.read_bytes,
        "read public": public.read_bytes,
        "read write-only": write_only.read_bytes,
        "write secret": make_write(secret, os.O_WRONLY),
        "write public": make_write(public, os.O_WRONLY),
        "write write-only": make_write(write_only, os.O_WRONLY),
        "read and write write-only": make_write(write_only, os.O_RDWR),
        "truncate secret": lambda: os.truncate(secret, 3),
        "truncate public": lambda: os.truncate(public, 3),
        "set times of public": make_set_times(public, (10**9, 2 * 10**9)),
        "touch public": make_set_times(public, None),
        "set times of secret": make_set_times(secret, (10**9, 2 * 10**9)),
        "chmod public": lambda: public.chmod(0o640),
        "chmod back": lambda: public.chmod(0o666),
        "give public away": lambda: os.chown(public, BOB, -1),
        "change the group of public": lambda: os.chown(public, -1, GROUP),
        "create": make_write(folder / "new", os.O_WRONLY | os.O_CREAT | os.O_EXCL),
        "create or open": make_write(folder / "public", os.O_WRONLY | os.O_CREAT),
        "create read-only": lambda: os.close(os.open(folder / "read-only", os.O_WRONLY | os.O_CREAT, 0o400)),
        "mkdir": lambda: (folder / "inner").mkdir(0o777),
        "chmod the folder": lambda: (folder / "inner").chmod(0o2770),
        "symlink": lambda: (folder / "symlink").symlink_to("public"),
        "read by symlink": (folder / "symlink").read_bytes,
        "link public": lambda: (folder / "link").hardlink_to(public),
        "link secret": lambda: (folder / "second").hardlink_to(secret),
        "rename secret": lambda: secret.rename(folder / "renamed"),
        "replace public": lambda: (folder / "new").rename(public),
        "unlink write-only": write_only.unlink,
        "rmdir": (folder / "inner").rmdir,
        "move out": lambda: public.rename(folder.parent / f"moved-{folder.name}"),
    }


def try_operations(root: Path, connection: Connection) -> None:
    """Run all operations in each folder of a tree, and send the errno of each."""
    os.umask(0o027)
    results = {}
    for folder in sorted(root.iterdir()):
        if folder.name != "3fs-virt":
            for label, operation in make_operations(folder).items():
                results[folder.name, label] = catch_errno(operation)
    connection.send(results)


def read_attributes(root: Path) -> dict[str, tuple[int, int, int, int]]:
    """Return mode, user, group and size of every entry of a tree.

    The size of a folder is 0 here, because the actual size depends on the file system.
    """
    attributes = {}
    for parent, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(parent, name)
            status = path.lstat()
            size_bytes = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
            attributes[str(path.relative_to(root))] = (status.st_mode, status.st_uid, status.st_gid, size_bytes)
    return {path: values for path, values in attributes.items() if not path.startswith("3fs-virt")}


@pytest.mark.parametrize(("uid", "groups"), USERS)
def test_calls_have_the_results_of_a_plain_folder(folders: tuple[Path, Path], uid: int, groups: list[int]) -> None:
    results, attributes_after = [], []
    for root in folders:
        make_tree(root)
        attributes_before = read_attributes(root)
        with UserProcess(uid, functools.partial(try_operations, root), groups=groups) as user:
            results.append(user.receive())
        attributes_after.append(read_attributes(root))
        assert attributes_before != attributes_after[-1]
    assert results[0] == results[1]
    assert attributes_after[0] == attributes_after[1]
    # The calls of a user other than root have at least three different results: 0 and two errnos.
    assert len(set(results[0].values())) >= (1 if uid == 0 else 3)


def publish_and_read_on_request(mount: Path, connection: Connection) -> None:
    """Publish an iov and a ring by links, open a private file, and read it by the ring for each message received."""
    client = LinkClient(mount)
    path = mount / f"private-{os.getuid()}"
    path.write_bytes(pattern.payload(64 * KIB, seed=5))
    path.chmod(0o600)
    with (
        contextlib.closing(RawIov(64 * KIB)) as iov,
        contextlib.closing(RawRing(8, for_read=True)) as ring,
        path.open("rb") as file,
    ):
        client.publish_iov(iov)
        client.publish_ring(ring)
        inode = os.fstat(file.fileno()).st_ino
        published_names = {"iov": iov.name(), "target": str(iov.path), "ring": ring.link_name}
        connection.send({**published_names, "path": str(path), "inode": inode, "id": iov.id.bytes})
        while True:
            connection.recv()
            iov.memory[:] = bytes(64 * KIB)
            result = transfer(ring, iov.id.bytes, inode, 64 * KIB)
            pattern.check(iov.memory[:], seed=5)
            connection.send(result)


def try_attacks(mount: Path, victim: dict[str, Any], connection: Connection) -> None:
    """Try to use the objects of another user through the mount, and send the errno of each attempt."""
    iovs_folder, private_file = mount / "3fs-virt" / "iovs", Path(victim["path"])
    client = LinkClient(mount)
    root_fd = os.open(mount, os.O_RDONLY | os.O_DIRECTORY)
    root_inode = os.fstat(root_fd).st_ino
    own_file = mount / f"own-{os.getuid()}"
    own_file.write_bytes(bytes(64 * KIB))

    def make_ioctl(request: int, argument: bytes, fd: int = root_fd) -> Callable[[], object]:
        return lambda: fcntl.ioctl(fd, request, bytearray(argument))

    def make_transfer(iov_id: bytes, inode: int) -> Callable[[], object]:
        def run() -> None:
            if (result := transfer(ring, iov_id, inode)) < 0:
                raise OSError(-result, "the operation failed")

        return run

    with (
        contextlib.closing(RawIov(64 * KIB)) as iov,
        contextlib.closing(RawRing(8, for_read=True)) as ring,
        own_file.open("rb") as file,
    ):
        client.publish_iov(iov)
        client.publish_ring(ring)
        # A user sees only the links of its own publications.
        visible_names = {path.name for path in iovs_folder.iterdir() if not path.name.startswith("submit-ios")}
        assert visible_names == {iov.name(), ring.link_name}
        folder_fd = os.open(mount / "folder", os.O_RDONLY | os.O_DIRECTORY)
        private_name = private_file.name.encode()
        inode = os.fstat(file.fileno()).st_ino
        actions: dict[str, Callable[[], object]] = {
            "read the link of an iov": (iovs_folder / victim["iov"]).readlink,
            "find the link of a ring": (iovs_folder / victim["ring"]).lstat,
            "remove the link of an iov": (iovs_folder / victim["iov"]).unlink,
            "remove the link of a ring": (iovs_folder / victim["ring"]).unlink,
            "publish the name of an iov": lambda: (iovs_folder / victim["iov"]).symlink_to(iov.path),
            "publish the memory of an iov": lambda: (iovs_folder / RawIov(4096).name()).symlink_to(victim["target"]),
            "read a private file by a ring": make_transfer(iov.id.bytes, victim["inode"]),
            "read into an iov": make_transfer(victim["id"], inode),
            "open a private file": lambda: private_file.open("rb"),
            "remove a private file": private_file.unlink,
            "rename a private file": lambda: private_file.rename(mount / "taken"),
            "link a private file": lambda: (mount / "linked").hardlink_to(private_file),
            "change the mode of a private file": lambda: private_file.chmod(0o666),
            "change the owner of a private file": lambda: os.chown(private_file, os.getuid(), -1),
            "change the times of a private file": lambda: os.utime(private_file),
            "truncate a private file": lambda: os.truncate(private_file, 0),
            "remove a tree by rm-rf": lambda: (mount / "3fs-virt" / "rm-rf" / "x").symlink_to(mount / "folder"),
            "ioctl REMOVE": make_ioctl(virtual.REMOVE, virtual.REMOVE_ARGUMENT.pack(root_inode, private_name, 0)),
            "ioctl REMOVE of a tree": make_ioctl(
                virtual.REMOVE, virtual.REMOVE_ARGUMENT.pack(root_inode, b"folder", 1)
            ),
            "ioctl MOVE": make_ioctl(
                virtual.MOVE, virtual.MOVE_ARGUMENT.pack(root_inode, private_name, root_inode, b"taken", 0)
            ),
            "ioctl RECURSIVE_RM": make_ioctl(virtual.RECURSIVE_RM, bytes(4), folder_fd),
            "ioctl HARDLINK": make_ioctl(
                virtual.HARDLINK,
                virtual.HARDLINK_ARGUMENT.pack(os.fstat(folder_fd).st_ino, b"linked"),
                file.fileno(),
            ),
            "ioctl PUNCH_HOLE": make_ioctl(
                # PUNCH_HOLE: one range, no flags, 1000 starts and 1000 ends. The range is from 0 to 4096.
                virtual.PUNCH_HOLE,
                virtual.PUNCH_HOLE_ARGUMENT.pack(1, 0, *[0] * 1000, 4096, *[0] * 999),
                os.open(mount / "readable", os.O_RDONLY),
            ),
        }
        connection.send({label: catch_errno(action) for label, action in actions.items()})
        connection.recv()


EXPECTED_ERRNOS = {
    "read the link of an iov": errno.ENOENT,
    "find the link of a ring": errno.ENOENT,
    "remove the link of an iov": errno.ENOENT,
    "remove the link of a ring": errno.ENOENT,
    "publish the name of an iov": errno.EEXIST,
    "publish the memory of an iov": errno.EACCES,
    "read a private file by a ring": errno.EBADF,
    "read into an iov": errno.EACCES,
    "open a private file": errno.EACCES,
    "remove a private file": errno.EPERM,
    "rename a private file": errno.EPERM,
    "link a private file": errno.EPERM,
    "change the mode of a private file": errno.EPERM,
    "change the owner of a private file": errno.EPERM,
    "change the times of a private file": errno.EACCES,
    "truncate a private file": errno.EACCES,
    "remove a tree by rm-rf": errno.EACCES,
    "ioctl REMOVE": errno.EPERM,
    "ioctl REMOVE of a tree": errno.EACCES,
    "ioctl MOVE": errno.EPERM,
    "ioctl RECURSIVE_RM": errno.EACCES,
    "ioctl HARDLINK": errno.EACCES,
    "ioctl PUNCH_HOLE": errno.EBADF,
}


def test_attempts_through_the_mount_are_refused(folders: tuple[Path, Path], evidence: Evidence) -> None:
    mount, _plain = folders
    (mount / "folder").mkdir(0o755)
    (mount / "folder" / "file").touch()
    (mount / "readable").write_bytes(bytes(64 * KIB))
    with UserProcess(ALICE, lambda pipe: publish_and_read_on_request(mount, pipe)) as alice:
        victim = alice.receive()
        with UserProcess(BOB, lambda pipe: try_attacks(mount, victim, pipe)) as bob:
            results = bob.receive()
            evidence["refused"] = {label: errno.errorcode.get(result, result) for label, result in results.items()}
            assert results == EXPECTED_ERRNOS
        assert alice.ask() == 64 * KIB
    assert (mount / "folder" / "file").exists()


def test_killed_link_clients_of_one_user_do_not_harm_another(folders: tuple[Path, Path]) -> None:
    mount, _plain = folders
    iovs_folder = mount / "3fs-virt" / "iovs"
    with (
        UserProcess(ALICE, lambda pipe: publish_and_read_on_request(mount, pipe)) as alice,
        UserProcess(0, lambda pipe: publish_and_read_on_request(mount, pipe)) as root,
    ):
        alice.receive()
        root.receive()
        links_before = set(iovs_folder.iterdir())
        for _ in range(10):
            with UserProcess(BOB, lambda pipe: publish_and_read_on_request(mount, pipe)) as bob:
                target = Path(bob.receive()["target"])
                assert bob.ask() == 64 * KIB
                bob.connection.send(None)  # The process is killed while it reads.
            assert alice.ask() == root.ask() == 64 * KIB
            wait_until(
                lambda: set(iovs_folder.iterdir()) == links_before,
                "the agent removes the links of the killed client",
                timeout_s=30,
            )
            assert not target.exists()


def use_after_change_of_user(mount: Path, connection: Connection) -> None:
    """Publish and read a file as root, then again as another user. The file was opened as root."""
    client = LinkClient(mount)
    with (mount / "of-root").open("rb") as file:
        inode = os.fstat(file.fileno()).st_ino
        results = []
        for uid in (0, BOB):
            os.seteuid(uid)
            with contextlib.closing(RawIov(64 * KIB)) as iov, contextlib.closing(RawRing(8, for_read=True)) as ring:
                client.publish_iov(iov)
                client.publish_ring(ring)
                results.append(transfer(ring, iov.id.bytes, inode))
        connection.send(results)


def test_ring_has_the_files_of_its_user_only(folders: tuple[Path, Path]) -> None:
    mount, _plain = folders
    (mount / "of-root").write_bytes(bytes(64 * KIB))
    (mount / "of-root").chmod(0o600)
    with UserProcess(0, lambda pipe: use_after_change_of_user(mount, pipe)) as user:
        assert user.receive() == [4 * KIB, -errno.EBADF]


# SERVER_PROGRAM calls prctl(2) with these arguments, and then starts the server by exec. This pair is PR_CAPBSET_DROP
# and CAP_SETUID: at exec, root does not get a capability that is missing in the bounding set.
WITHOUT_SETUID = "24, 7"
# This pair is PR_SET_SECUREBITS and SECBIT_NO_SETUID_FIXUP: a thread that acts as another user keeps root's
# capabilities.
WITH_CAPABILITIES_OF_ROOT = "28, 4"
SERVER_PROGRAM = """
import ctypes, os, sys
assert ctypes.CDLL(None).prctl({}, 0, 0, 0) == 0
os.execv(sys.executable, [sys.executable, "-m", "gdrkit", *sys.argv[1:]])
"""


@pytest.mark.parametrize("prctl_arguments", [WITHOUT_SETUID, WITH_CAPABILITIES_OF_ROOT], ids=["setuid", "securebits"])
def test_server_that_cannot_change_its_user_is_refused(tmp_path: Path, prctl_arguments: str) -> None:
    store, mount = tmp_path / "store", tmp_path / "mount"
    mount.mkdir()
    program = [sys.executable, "-c", SERVER_PROGRAM.format(prctl_arguments)]
    with run_storage_server(store, tmp_path / "log", "--listen", "127.0.0.1:0", program=program) as server:
        options = ("--server", server.address, "--token-file", str(store / ".gdrkit" / "token"), "--shared")
        with pytest.raises(AssertionError, match=r"cannot serve several users: .*user 65534"):
            AgentProcess(mount, *options)
    assert not mount.is_mount()


def open_as_user(store: Path, connection: Connection) -> None:
    """Open a store without root, and try to act as another user."""
    with FileStore(store) as files:
        connection.send(catch_errno(lambda: files.set_user(messages.SetUser(0, 0))))


def test_server_without_root_cannot_change_its_user() -> None:
    with folder_for_all_users() as folder:
        os.chown(folder, ALICE, ALICE)
        with UserProcess(ALICE, lambda pipe: open_as_user(folder, pipe)) as alice:
            assert alice.receive() == errno.EPERM
