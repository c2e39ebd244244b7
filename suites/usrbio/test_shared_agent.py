"""An agent that root starts with ``--shared``: it serves all users, and keeps the objects of each user apart."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.other_user import folder_for_all_users
from support.processes import wait_until
from support.raw_usrbio import AgentProcess, RawIov, RawRing, list_shared_memory_files
from support.storage import run_storage_server
from usrbio.user_processes import (
    ALICE,
    BOB,
    GROUP,
    UserProcess,
    catch_errno,
    publish_iov_and_ring,
    read_on_demand,
    transfer,
)

from gdrkit import pattern, usrbio
from gdrkit.harness.needs import host, needs, verbs
from gdrkit.storage.server import HANDLES_MAX
from gdrkit.units import KIB, MIB
from gdrkit.usrbio.agent import protocol
from gdrkit.usrbio.agent.agent_error import AgentError
from gdrkit.usrbio.agent.protocol import AgentRequest
from gdrkit.usrbio.agent.quota import SHARED_FILES_MAX, MemoryQuota

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from gdrkit.harness.evidence import Evidence
    from gdrkit.usrbio.native_types import Iovec

pytestmark = needs(verbs.nic(), host.capability("CAP_SETUID"))


@pytest.fixture(
    params=["plain", pytest.param("fuse", marks=needs(host.fuse)), pytest.param("remote", marks=needs(host.fuse))]
)
def mode(request: pytest.FixtureRequest) -> str:
    """The mode of the agent: plain, FUSE with its own storage server, or FUSE with a storage server of root."""
    return str(request.param)


@pytest.fixture
def mount(mode: str, tmp_path: Path) -> Iterator[Path]:
    """Yield the mount of a shared agent, in which every user can create files."""
    with folder_for_all_users() as folder, contextlib.ExitStack() as stack:
        mount_folder = folder / "mount"
        store = mount_folder if mode == "plain" else tmp_path / "store"
        for new_folder in {mount_folder, store}:
            new_folder.mkdir()
        store.chmod(0o1777)
        options = {"plain": [], "fuse": ["--store", str(store), "--fuse"]}.get(mode)
        if options is None:
            server = stack.enter_context(run_storage_server(store, tmp_path / "log", "--listen", "127.0.0.1:0"))
            options = ["--server", server.address, "--token-file", str(store / ".gdrkit" / "token")]
        agent = stack.enter_context(AgentProcess(mount_folder, *options, "--shared", "--user-memory-mib", "8"))
        yield mount_folder
        memory_files = list_shared_memory_files(mount_folder)
        assert agent.terminate() == 0, agent.error_output
    assert [file for file in memory_files if file.exists()] == []


def find_agent_folder(mount: Path) -> Path:
    """Return the folder of the agent: ``3fs-virt``, or a folder outside of a FUSE mount."""
    virtual_folder = mount / "3fs-virt"
    socket_path = virtual_folder / "agent.sock"
    return socket_path.readlink().parent if socket_path.is_symlink() else virtual_folder


def try_attacks(
    mount: Path, victim: dict[str, Any], private_file: Path, readable_file: Path, connection: Connection
) -> None:
    """Try to use the objects of another user and of the agent, and send the errno of each attempt.

    `victim` has the names and numbers of the other user's objects that read_on_demand() has sent.
    """
    virtual_folder = find_agent_folder(mount)
    with (
        publish_iov_and_ring(mount) as (client, iov, ring),
        contextlib.closing(RawRing(8, for_read=False)) as write_ring,
    ):
        client.publish_ring(write_ring)
        path_fd = os.open(private_file, os.O_PATH)
        read_fd = os.open(readable_file, os.O_RDONLY)
        virtual_fd = os.open(virtual_folder, os.O_PATH | os.O_DIRECTORY)
        folder_fd = os.open(mount, os.O_RDONLY | os.O_DIRECTORY)
        readable_inode = client.register_file(read_fd)

        # The functions make_... return an action: a function without arguments that makes one attempt.
        def make_request(request_type: AgentRequest, payload: bytes, *descriptors: int) -> Callable[[], object]:
            return lambda: client.request(request_type, payload, descriptors)

        def make_transfer(ring: RawRing, iov_id: bytes, inode: int) -> Callable[[], object]:
            def run() -> None:
                if (result := transfer(ring, iov_id, inode)) < 0:
                    raise OSError(-result, "the operation failed")

            return run

        def connect_to_server() -> None:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
                server.connect(f"/proc/self/fd/{virtual_fd}/server.sock")

        def make_listing(folder: Path) -> Callable[[], object]:
            return lambda: list(folder.iterdir())

        pack_name, hole_payload = protocol.pack_name, protocol.pack_punch(0, ((0, 4096),))
        actions: dict[str, Callable[[], object]] = {
            "list 3fs-virt": make_listing(virtual_folder),
            "list iovs": make_listing(virtual_folder / "iovs"),
            "list publications": make_listing(virtual_folder / "publications"),
            "open agent.lock": lambda: os.open(virtual_folder / "agent.lock", os.O_RDONLY),
            "connect to server.sock": connect_to_server,
            "list .gdrkit": make_listing(mount / ".gdrkit"),
            "create a file in 3fs-virt": (virtual_folder / "x").touch,
            "create a link in iovs": lambda: (virtual_folder / "iovs" / "x").symlink_to("/dev/shm/x"),  # noqa: S108
            "remove the link of an iov": (virtual_folder / "iovs" / victim["iov"]).unlink,
            "open the memory of an iov": lambda: os.open(victim["target"], os.O_RDONLY),
            "remove the memory of an iov": Path(victim["target"]).unlink,
            "publish the memory of an iov": lambda: client.publish(RawIov(4096).name(), victim["target"]),
            "publish the name of an iov": lambda: client.publish(victim["iov"], str(iov.path)),
            "borrow an iov": make_request(
                AgentRequest.BORROW,
                protocol.pack_publish(protocol.PublishRequest(victim["iov"], victim["target"], b"")),
            ),
            "return an iov": make_request(AgentRequest.RETURN_BORROWED, pack_name(victim["iov"])),
            "unpublish an iov": make_request(AgentRequest.UNPUBLISH, pack_name(victim["iov"])),
            "unpublish a ring": make_request(AgentRequest.UNPUBLISH, pack_name(victim["ring"])),
            "open a private file": lambda: private_file.open("rb"),
            "open a readable file for writing": lambda: readable_file.open("r+b"),
            "register a file by O_PATH": lambda: client.register_file(path_fd),
            "deregister a file": make_request(AgentRequest.DEREGISTER_FILE, protocol.pack_number(victim["inode"])),
            "punch a hole into a readable file": make_request(AgentRequest.PUNCH_HOLE, hole_payload, read_fd),
            "link a readable file": make_request(AgentRequest.HARD_LINK, pack_name("linked"), read_fd, folder_fd),
            "read a private file": make_transfer(ring, iov.id.bytes, victim["inode"]),
            "read into an iov": make_transfer(ring, victim["id"], readable_inode),
            "write a readable file": make_transfer(write_ring, iov.id.bytes, readable_inode),
            "publish more than the quota": lambda: client.publish_iov(RawIov(8 * MIB)),
        }
        connection.send({label: catch_errno(action) for label, action in actions.items()})
        # The publications last until the case kills this process.
        connection.recv()


EXPECTED_ERRNOS = {
    "list 3fs-virt": errno.EACCES,
    "list iovs": errno.EACCES,
    "list publications": errno.EACCES,
    "open agent.lock": errno.EACCES,
    "connect to server.sock": errno.EACCES,
    "list .gdrkit": errno.EACCES,
    "create a file in 3fs-virt": errno.EACCES,
    "create a link in iovs": errno.EACCES,
    "remove the link of an iov": errno.EACCES,
    "open the memory of an iov": errno.EACCES,
    "remove the memory of an iov": errno.EPERM,
    "publish the memory of an iov": errno.EACCES,
    "publish the name of an iov": errno.EEXIST,
    "borrow an iov": errno.EACCES,
    "return an iov": errno.ENOENT,
    "unpublish an iov": errno.ENOENT,
    "unpublish a ring": errno.ENOENT,
    "open a private file": errno.EACCES,
    "open a readable file for writing": errno.EACCES,
    "register a file by O_PATH": errno.EBADF,
    "deregister a file": errno.ENOENT,
    "punch a hole into a readable file": errno.EBADF,
    "link a readable file": errno.EPERM,
    "read a private file": errno.EBADF,
    "read into an iov": errno.EACCES,
    "write a readable file": errno.EACCES,
    "publish more than the quota": errno.EDQUOT,
}


def test_attempts_on_another_users_objects_are_refused(mount: Path, mode: str, evidence: Evidence) -> None:
    expected_errnos = dict(EXPECTED_ERRNOS)
    if mode != "plain":
        expected_errnos["list .gdrkit"] = errno.ENOENT  # Clients of a storage server do not see its private folder.
    if mode == "remote":
        expected_errnos["connect to server.sock"] = errno.ENOENT
    private_file, readable_file = mount / "private", mount / "readable"
    readable_file.write_bytes(bytes(64 * KIB))
    readable_file.chmod(0o644)
    with UserProcess(ALICE, read_on_demand(mount, private_file)) as alice:
        victim = alice.receive()
        with UserProcess(BOB, lambda pipe: try_attacks(mount, victim, private_file, readable_file, pipe)) as bob:
            results = bob.receive()
            evidence["refused"] = {label: errno.errorcode.get(result, result) for label, result in results.items()}
            assert results == expected_errnos
        assert alice.ask() == 64 * KIB


def use_files(mount: Path, paths: list[Path], *, by_rings: bool) -> Callable[[Connection], None]:
    """Return a function that opens, reads and writes files, by rings or by the kernel, and sends all results.

    A result has the number of bytes that were read and that were written, or the errno of open(2) and 0.
    """

    def run(connection: Connection) -> None:
        results = {}
        with (
            publish_iov_and_ring(mount) as (client, iov, read_ring),
            contextlib.closing(RawRing(8, for_read=False)) as write_ring,
        ):
            client.publish_ring(write_ring)
            for path in paths:
                for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
                    try:
                        fd = os.open(path, flags)
                    except OSError as error:
                        results[path.name, flags] = (error.errno, 0)
                        continue
                    is_readable, is_writable = flags != os.O_WRONLY, flags != os.O_RDONLY
                    if by_rings:
                        inode = client.register_file(fd)
                        transferred_bytes = tuple(
                            transfer(ring, iov.id.bytes, inode) for ring in (read_ring, write_ring)
                        )
                        client.request(AgentRequest.DEREGISTER_FILE, protocol.pack_number(inode))
                        results[path.name, flags] = (max(transferred_bytes[0], 0), max(transferred_bytes[1], 0))
                    else:
                        results[path.name, flags] = (
                            len(os.pread(fd, 4 * KIB, 0)) if is_readable else 0,
                            os.pwrite(fd, bytes(4 * KIB), 0) if is_writable else 0,
                        )
                    os.close(fd)
        connection.send(results)

    return run


def test_rights_are_those_of_the_kernel(mount: Path) -> None:
    paths = []
    for owner in (0, ALICE, BOB):
        for file_mode in (0o600, 0o640, 0o660, 0o644, 0o666, 0o400, 0o000):
            path = mount / f"{owner}-{file_mode:o}"
            path.write_bytes(bytes(64 * KIB))
            os.chown(path, owner, GROUP)
            path.chmod(file_mode)
            paths.append(path)
    for uid, groups in ((0, [0]), (ALICE, []), (BOB, [GROUP])):
        with (
            UserProcess(uid, use_files(mount, paths, by_rings=True), groups=groups) as ring_process,
            UserProcess(uid, use_files(mount, paths, by_rings=False), groups=groups) as kernel_process,
        ):
            assert ring_process.receive() == kernel_process.receive()


def write_once(mount: Path, path: Path) -> Callable[[Connection], None]:
    """Return a function that writes a file by a ring once, and sends the result."""

    def run(connection: Connection) -> None:
        with publish_iov_and_ring(mount, for_read=False) as (client, iov, ring), path.open("r+b") as file:
            connection.send(transfer(ring, iov.id.bytes, client.register_file(file.fileno())))

    return run


def test_write_clears_the_set_user_id_bits(mount: Path) -> None:
    path = mount / "program"
    path.write_bytes(bytes(64 * KIB))
    os.chown(path, ALICE, GROUP)
    path.chmod(0o6777)
    with UserProcess(BOB, write_once(mount, path)) as bob:
        assert bob.receive() == 4 * KIB
    assert stat.S_IMODE(path.stat().st_mode) == 0o777


def test_killed_clients_of_one_user_do_not_harm_another(mount: Path) -> None:
    with (
        UserProcess(ALICE, read_on_demand(mount, mount / "alice")) as alice,
        UserProcess(0, read_on_demand(mount, mount / "root")) as root,
    ):
        alice.receive()
        root.receive()
        memory_files_before = set(list_shared_memory_files(mount))
        for file_index in range(10):
            with UserProcess(BOB, read_on_demand(mount, mount / f"bob{file_index}")) as bob:
                published_names = bob.receive()
                targets = [Path(published_names[name]) for name in ("target", "ring_target")]
                assert bob.ask() == 64 * KIB
                bob.connection.send(None)  # The process is killed while it reads.
            assert alice.ask() == root.ask() == 64 * KIB
            wait_until(
                lambda: list_shared_memory_files(mount) == memory_files_before,
                "the agent removes the links of the killed client",
                timeout_s=30,
            )
            assert not any(path.exists() for path in targets)


def test_client_library_works_for_every_user(mount: Path) -> None:
    path = mount / "file"
    path.write_bytes(pattern.payload(MIB, seed=6))
    path.chmod(0o644)
    usrbio.capabilities()  # Opens the library, whose file the users may not be able to read.
    for uid in (0, ALICE, BOB):
        with UserProcess(uid, lambda pipe: pipe.send(usrbio.read_file(path, str(mount)))) as user:
            pattern.check(user.receive(), seed=6)


def test_small_iovs_cost_a_page_of_the_quota() -> None:
    quota = MemoryQuota(2 * os.sysconf("SC_PAGESIZE"))
    release_functions = [quota.charge(ALICE, 1) for _ in range(2)]
    with pytest.raises(AgentError, match="EDQUOT"):
        quota.charge(ALICE, 1)
    release_functions[0]()
    quota.charge(ALICE, 1)
    quota.charge(BOB, 1)


@pytest.mark.parametrize("mode", ["plain"], indirect=True)
def test_files_of_one_user_leave_handles_for_another(mount: Path) -> None:
    """In an older version, one user could take all handles of the agent's session with the server."""

    def register_many(pipe: Connection) -> None:
        """Register files until the agent refuses one, then one more after a deregistration. Send both results."""
        folder = mount / "alice"
        folder.mkdir()
        with publish_iov_and_ring(mount) as (client, _iov, _ring):
            inodes: list[int] = []

            def register() -> int:
                path = folder / str(len(inodes))
                path.touch()
                with path.open("rb") as file:
                    inodes.append(client.register_file(file.fileno()))
                return 0

            while (error_number := catch_errno(register)) == 0 and len(inodes) < HANDLES_MAX:
                pass
            pipe.send((error_number, len(inodes)))
            client.request(AgentRequest.DEREGISTER_FILE, protocol.pack_number(inodes.pop()))
            pipe.send(catch_errno(register))
            pipe.recv()

    with UserProcess(ALICE, register_many) as alice, UserProcess(BOB, read_on_demand(mount, mount / "bob")) as bob:
        assert alice.receive() == (errno.EMFILE, SHARED_FILES_MAX)
        assert alice.receive() == 0
        bob.receive()
        assert bob.ask() == 64 * KIB
        alice.connection.send(None)


def test_idle_memory_yields_to_other_iovs_of_its_user(mount: Path) -> None:
    def create_iovs(pipe: Connection) -> None:
        """Create an iov of more than half of the quota for each "create", and destroy it for each "destroy"."""
        iov: Iovec | None = None
        while (request := pipe.recv()) is not None:
            if request == "create":
                try:
                    iov = usrbio.create_iovec(str(mount), length_bytes=5 * MIB)
                except OSError as error:
                    pipe.send(error.errno)
                    continue
                with memoryview(iov) as view:
                    is_zero = bytes(view) == bytes(5 * MIB)
                    view[:] = b"x" * (5 * MIB)
                pipe.send(is_zero)
            else:
                assert iov is not None
                iov.close()
                pipe.send("destroyed")

    usrbio.capabilities()  # Opens the library, whose file the users may not be able to read.
    with UserProcess(ALICE, create_iovs) as first_process, UserProcess(ALICE, create_iovs) as second_process:
        for turn in range(3):
            user_process, other_process = (
                (first_process, second_process) if turn % 2 == 0 else (second_process, first_process)
            )
            assert user_process.ask("create") is True, turn  # The idle memory of the other process does not count.
            assert other_process.ask("create") == errno.EDQUOT
            assert user_process.ask("destroy")
            assert user_process.ask("create") is True
            assert user_process.ask("destroy")
        for user_process in (first_process, second_process):
            user_process.connection.send(None)


def test_memory_limit_without_shared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="--shared"):
        AgentProcess(tmp_path, "--user-memory-mib", "1")
