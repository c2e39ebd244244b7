"""A client that knows only the mount: links below ``3fs-virt/iovs``, rings, inodes and ioctls, without the socket."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import multiprocessing
import os
import random
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.fuzz import run_fuzzer
from support.processes import wait_until
from support.python_child import module_command, suites_environ
from support.raw_usrbio import AgentProcess, LinkClient, RawClient, RawIov, RawRing
from support.storage import run_storage_server

from gdrkit import pattern
from gdrkit.harness.needs import host, needs, verbs
from gdrkit.units import KIB, MIB
from gdrkit.usrbio import virtual

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from gdrkit.harness.evidence import Evidence

pytestmark = needs(verbs.nic(), host.fuse)
# Argument of an ioctl that returns a number of four bytes.
RESULT_BUFFER = bytes(4)
FUZZ_S = float(os.environ.get("GDRKIT_FUZZ_S", "3"))


@pytest.fixture(params=["child", "remote"])
def mount(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Yield the mount of an agent in FUSE mode. Its storage server is a child of the agent, or runs on its own."""
    folder, store = tmp_path / "mount", tmp_path / "store"
    folder.mkdir()
    store.mkdir()
    with contextlib.ExitStack() as stack:
        options = ["--store", str(store), "--fuse"]
        if request.param == "remote":
            service = stack.enter_context(run_storage_server(store, tmp_path / "log", "--listen", "127.0.0.1:0"))
            options = ["--server", service.address, "--token-file", str(store / ".gdrkit" / "token")]
        agent = stack.enter_context(AgentProcess(folder, *options))
        yield folder
        assert agent.terminate() == 0, agent.error_output


@pytest.fixture
def fuse_folder(tmp_path: Path) -> Iterator[Path]:
    """Yield the mount of an agent in FUSE mode, which starts the storage server as a child process."""
    folder, store = tmp_path / "mount", tmp_path / "store"
    folder.mkdir()
    store.mkdir()
    with AgentProcess(folder, "--store", str(store), "--fuse") as agent:
        yield folder
        assert agent.terminate() == 0, agent.error_output


@contextlib.contextmanager
def publish_rings(client: LinkClient, iov: RawIov, suffix: str = "") -> Iterator[tuple[RawRing, RawRing]]:
    """Publish an iov, a ring for reads and a ring for writes by links."""
    with contextlib.ExitStack() as stack:
        client.publish_iov(iov, suffix)
        stack.callback(client.unpublish, iov.name(suffix))
        ring_pair = []
        for for_read in (True, False):
            ring = RawRing(16, for_read=for_read)
            stack.callback(ring.close)
            client.publish_ring(ring)
            stack.callback(client.unpublish, ring.link_name)
            ring_pair.append(ring)
        yield ring_pair[0], ring_pair[1]


@contextlib.contextmanager
def open_and_get_inode(path: Path, flags: int) -> Iterator[int]:
    """Open a file and yield its inode."""
    fd = os.open(path, flags)
    try:
        yield os.fstat(fd).st_ino
    finally:
        os.close(fd)


def test_two_rings_without_the_socket_read_and_write(mount: Path) -> None:
    (mount / "file").write_bytes(pattern.payload(MIB, seed=1))
    client = LinkClient(mount)
    with (
        contextlib.closing(RawIov(MIB)) as iov,
        # The first file is open before the rings exist. The second file is opened later.
        open_and_get_inode(mount / "file", os.O_RDWR) as inode,
        publish_rings(client, iov) as (read_ring, write_ring),
        open_and_get_inode(mount / "new", os.O_RDWR | os.O_CREAT) as new_inode,
    ):
        for chunk_index in range(8):
            read_ring.prepare(
                iov.id.bytes,
                inode=inode,
                length=64 * KIB,
                buffer_offset=chunk_index * 64 * KIB,
                file_offset=chunk_index * 64 * KIB + 17,
                userdata=chunk_index,
            )
        read_ring.submit()
        completions = read_ring.wait(8)
        assert sorted(userdata for _, _, userdata in completions) == list(range(8))
        assert {result for _, result, _ in completions} == {64 * KIB}
        pattern.check(iov.memory[: 512 * KIB], seed=1, offset_bytes=17)
        write_ring.prepare(iov.id.bytes, inode=new_inode, length=512 * KIB, file_offset=4097)
        write_ring.submit()
        assert [result for _, result, _ in write_ring.wait(1)] == [512 * KIB]
    expected_bytes = bytes(4097) + pattern.payload(512 * KIB, seed=1, offset_bytes=17)
    assert (mount / "new").read_bytes() == expected_bytes
    assert {link.name for link in client.iovs_folder.iterdir()} == {"submit-ios", "submit-ios.ph", "submit-ios.pl"}


def test_operation_errors_without_the_socket(fuse_folder: Path) -> None:
    (fuse_folder / "file").write_bytes(bytes(MIB))
    client = LinkClient(fuse_folder)
    with contextlib.closing(RawIov(64 * KIB)) as iov, publish_rings(client, iov, ".b4096") as (read_ring, write_ring):
        with open_and_get_inode(fuse_folder / "file", os.O_RDONLY) as inode:
            write_ring.prepare(iov.id.bytes, inode=inode, length=512)
            write_ring.submit()
            assert [result for _, result, _ in write_ring.wait(1)] == [-errno.EACCES]
            read_ring.prepare(iov.id.bytes, inode=inode, length=4096, buffer_offset=512)
            read_ring.submit()
            assert [result for _, result, _ in read_ring.wait(1)] == [-errno.EINVAL]
            read_ring.prepare(iov.id.bytes, inode=inode, length=4096, buffer_offset=4096)
            read_ring.submit()
            assert [result for _, result, _ in read_ring.wait(1)] == [4096]

        def read_after_close() -> int:
            read_ring.prepare(iov.id.bytes, inode=inode, length=4096)
            read_ring.submit()
            ((_, result, _),) = read_ring.wait(1)
            return result

        # The kernel informs the agent of a close(2) only some time after the call.
        wait_until(lambda: read_after_close() == -errno.EBADF, "the closed file is refused", timeout_s=10)


def read_until_killed(mount: Path, progress_sender: Connection) -> None:
    """Read a file by a ring again and again, and send a message after each batch."""
    with (
        contextlib.closing(RawIov(MIB)) as iov,
        open_and_get_inode(mount / "file", os.O_RDONLY) as inode,
        publish_rings(LinkClient(mount), iov) as (read_ring, _),
    ):
        while True:
            for _ in range(8):
                read_ring.prepare(iov.id.bytes, inode=inode, length=64 * KIB)
            read_ring.submit()
            assert {result for _, result, _ in read_ring.wait(8)} == {64 * KIB}
            progress_sender.send(None)


def test_killed_clients_leave_nothing_behind(fuse_folder: Path, seed: int) -> None:
    random_source = random.Random(seed)
    (fuse_folder / "file").write_bytes(pattern.payload(MIB, seed=7))
    client = LinkClient(fuse_folder)
    fork_context = multiprocessing.get_context("fork")
    with (
        contextlib.closing(RawIov(64 * KIB)) as iov,
        open_and_get_inode(fuse_folder / "file", os.O_RDONLY) as inode,
        publish_rings(client, iov) as (read_ring, _),
    ):
        own_links = set(client.iovs_folder.iterdir())
        for _ in range(8):
            progress_receiver, progress_sender = fork_context.Pipe(duplex=False)
            process = fork_context.Process(target=read_until_killed, args=(fuse_folder, progress_sender))
            process.start()
            for _ in range(random_source.randrange(1, 40)):
                assert progress_receiver.poll(30)
                progress_receiver.recv()
            client_links = set(client.iovs_folder.iterdir()) - own_links
            assert len(client_links) == 3
            memory_files = [link.readlink() for link in client_links]
            process.kill()
            process.join()
            progress_receiver.close()
            progress_sender.close()
            wait_until(
                lambda: set(client.iovs_folder.iterdir()) == own_links,
                "the agent removes the links of the killed client",
                timeout_s=30,
            )
            assert not any(path.exists() for path in memory_files)
            iov.memory[:] = bytes(64 * KIB)
            read_ring.prepare(iov.id.bytes, inode=inode, length=64 * KIB)
            read_ring.submit()
            assert [result for _, result, _ in read_ring.wait(1)] == [64 * KIB]
            pattern.check(iov.memory[:], seed=7)


def test_iov_of_any_length_is_used_to_its_end(fuse_folder: Path) -> None:
    (fuse_folder / "file").write_bytes(pattern.payload(MIB, seed=3))
    client = LinkClient(fuse_folder)
    with contextlib.closing(RawIov(5001)) as iov, open_and_get_inode(fuse_folder / "file", os.O_RDONLY) as inode:
        with publish_rings(client, iov) as (read_ring, _):
            read_ring.prepare(iov.id.bytes, inode=inode, length=4990, buffer_offset=11, file_offset=3)
            read_ring.prepare(iov.id.bytes, inode=inode, length=4990, buffer_offset=12)
            read_ring.submit()
            assert [result for _, result, _ in sorted(read_ring.wait(2))] == [4990, -errno.EINVAL]
        pattern.check(iov.memory[11:5001], seed=3, offset_bytes=3)


def move_by_ioctl(folder: Path, name: str, new_folder: Path, new_name: str, *, inode: int | None = None) -> None:
    """Call the ioctl MOVE on a folder. `inode` replaces the inode number of the folder in the argument."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        argument = virtual.MOVE_ARGUMENT.pack(
            inode or os.fstat(fd).st_ino, name.encode(), new_folder.stat().st_ino, new_name.encode(), 0
        )
        fcntl.ioctl(fd, virtual.MOVE, argument)
    finally:
        os.close(fd)


def remove_by_ioctl(folder: Path, name: str, *, recursive: bool = False) -> None:
    """Call the ioctl REMOVE on a folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(fd, virtual.REMOVE, virtual.REMOVE_ARGUMENT.pack(os.fstat(fd).st_ino, name.encode(), recursive))
    finally:
        os.close(fd)


def test_move_and_remove_change_the_entries(fuse_folder: Path) -> None:
    # The sizes and numbers of these requests are part of the interface: hf3fs_utils has them as constants.
    assert (virtual.MOVE, virtual.REMOVE) == (0x4218680E, 0x4110680F)
    assert (virtual.MOVE_ARGUMENT.size, virtual.REMOVE_ARGUMENT.size) == (536, 272)
    source, destination = fuse_folder / "from", fuse_folder / "to"
    (source / "inner").mkdir(parents=True)
    destination.mkdir()
    (source / "file").write_bytes(b"content")
    move_by_ioctl(source, "file", destination, "moved")
    assert (destination / "moved").read_bytes() == b"content"
    assert not (source / "file").exists()
    remove_by_ioctl(destination, "moved")
    remove_by_ioctl(source, "inner")
    (source / "full").mkdir()
    (source / "full" / "file").touch()
    with pytest.raises(OSError, match="not empty") as error_info:
        remove_by_ioctl(source, "full")
    assert error_info.value.errno == errno.ENOTEMPTY
    remove_by_ioctl(source, "full", recursive=True)
    assert list(source.iterdir()) == list(destination.iterdir()) == []


def test_move_and_remove_refuse_invalid_names(fuse_folder: Path) -> None:
    (fuse_folder / "folder").mkdir()
    (fuse_folder / "file").touch()
    for name, new_name in (("../file", "x"), ("", "x"), ("file", "a/b"), ("file", "..")):
        with pytest.raises(OSError, match="Invalid") as error_info:
            move_by_ioctl(fuse_folder, name, fuse_folder, new_name)
        assert error_info.value.errno == errno.EINVAL
    with pytest.raises(OSError, match="Invalid"):
        move_by_ioctl(fuse_folder, "file", fuse_folder, "x", inode=(fuse_folder / "folder").stat().st_ino)
    for name in ("", ".", "..", "folder/x"):
        with pytest.raises(OSError, match="Invalid"):
            remove_by_ioctl(fuse_folder, name, recursive=True)
    with pytest.raises(PermissionError):
        remove_by_ioctl(fuse_folder, "3fs-virt", recursive=True)
    with pytest.raises(FileNotFoundError):
        move_by_ioctl(fuse_folder, "file", fuse_folder / "3fs-virt", "x")
    assert {path.name for path in fuse_folder.iterdir()} == {"3fs-virt", "folder", "file"}


def test_recursive_rm_removes_the_open_folder(fuse_folder: Path) -> None:
    (fuse_folder / "folder" / "inner").mkdir(parents=True)
    (fuse_folder / "folder" / "inner" / "file").touch()
    fd = os.open(fuse_folder / "folder", os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(fd, virtual.RECURSIVE_RM, RESULT_BUFFER)
    finally:
        os.close(fd)
    assert not (fuse_folder / "folder").exists()
    for refused_folder, expected_errno in (
        (fuse_folder, errno.EPERM),
        (fuse_folder / "3fs-virt" / "iovs", errno.EPERM),
    ):
        fd = os.open(refused_folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with pytest.raises(OSError, match="permitted") as error_info:
                fcntl.ioctl(fd, virtual.RECURSIVE_RM, RESULT_BUFFER)
        finally:
            os.close(fd)
        assert error_info.value.errno == expected_errno


def test_ioctls_without_an_argument_succeed(fuse_folder: Path) -> None:
    (fuse_folder / "folder" / "inner").mkdir(parents=True)
    (fuse_folder / "file").write_bytes(b"content")
    with (fuse_folder / "file").open("r+b") as file:
        assert fcntl.ioctl(file, virtual.FSYNC) == 0
        # The agent omits the result of an ioctl that has no argument. It must not omit the results of later ioctls.
        for _ in range(20):
            assert fcntl.ioctl(file, virtual.GET_MAGIC, RESULT_BUFFER) == virtual.MAGIC.to_bytes(4, "little")
    fd = os.open(fuse_folder / "folder", os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert fcntl.ioctl(fd, virtual.RECURSIVE_RM) == 0
    finally:
        os.close(fd)
    assert not (fuse_folder / "folder").exists()


def test_random_ioctls_change_nothing(fuse_folder: Path, seed: int) -> None:
    random_source = random.Random(seed)
    (fuse_folder / "folder").mkdir()
    (fuse_folder / "folder" / "file").write_bytes(b"content")
    # HARDLINK is missing, because it could succeed with a random name.
    requests = (virtual.PUNCH_HOLE, virtual.MOVE, virtual.REMOVE, virtual.FSYNC, virtual.GET_MAGIC)
    fds = [os.open(fuse_folder / name, os.O_RDONLY) for name in ("", "folder", "folder/file", "3fs-virt")]
    inodes = [os.fstat(fd).st_ino for fd in fds]
    try:
        for _ in range(500):
            request = random_source.choice(requests)
            # The bits 16 to 29 of an ioctl request are the size of its argument.
            argument = bytearray(random_source.randbytes(request >> 16 & 0x3FFF))
            if random_source.random() < 0.5:
                # The first field of most arguments is the inode number of a folder.
                argument[:8] = random_source.choice(inodes).to_bytes(8, "little")[: len(argument)]
            with contextlib.suppress(OSError):
                fcntl.ioctl(random_source.choice(fds), request, argument)
        assert fcntl.ioctl(fds[0], virtual.GET_MAGIC, RESULT_BUFFER) == virtual.MAGIC.to_bytes(4, "little")
    finally:
        for fd in fds:
            os.close(fd)
    assert {path.name for path in fuse_folder.iterdir()} == {"3fs-virt", "folder"}
    assert [path.name for path in (fuse_folder / "folder").iterdir()] == ["file"]
    assert (fuse_folder / "folder" / "file").read_bytes() == b"content"


@pytest.mark.timeout(FUZZ_S + 240)
def test_fuzzer_of_ioctls_links_and_rings_finds_nothing(
    fuse_folder: Path, monkeypatch: pytest.MonkeyPatch, evidence: Evidence
) -> None:
    """The fuzzer runs for GDRKIT_FUZZ_S seconds, while another client writes, reads and compares."""
    (fuse_folder / "input").write_bytes(pattern.payload(64 * KIB, seed=8))
    links_before = set((fuse_folder / "3fs-virt" / "iovs").iterdir())
    monkeypatch.setenv("GDRKIT_FUZZ_MOUNT", str(fuse_folder))
    with ThreadPoolExecutor(1) as executor:
        fuzzer_run = executor.submit(run_fuzzer, "usrbio.fuzz_mount", seconds=FUZZ_S)
        round_count = 0
        while round_count == 0 or not fuzzer_run.done():
            command = module_command("usrbio.verifying_client", fuse_folder, 4000)
            honest_client = subprocess.run(
                command, env=suites_environ(), capture_output=True, text=True, check=False, timeout=100
            )
            assert honest_client.returncode == 0, honest_client.stderr
            statistics = json.loads(honest_client.stdout)
            assert (statistics["failed"], statistics["wrong_bytes"]) == ({}, 0)
            round_count += 1
        evidence["fuzzer"] = fuzzer_run.result()
        print(evidence["fuzzer"], round_count)  # noqa: T201 - the number of inputs.
    evidence.number("honest_rounds_count", round_count)
    wait_until(
        lambda: set((fuse_folder / "3fs-virt" / "iovs").iterdir()) == links_before,
        "the agent removes the links of the fuzzer",
        timeout_s=30,
    )
    assert (fuse_folder / "input").read_bytes() == pattern.payload(64 * KIB, seed=8)


def test_plain_folder_has_no_ioctls_of_3fs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with AgentProcess(tmp_path) as agent:
        fd = os.open(tmp_path / "file", os.O_RDWR)
        try:
            for request in (virtual.GET_MAGIC, virtual.GET_IOCTL_VERSION, virtual.FSYNC, virtual.MOVE, virtual.REMOVE):
                with pytest.raises(OSError, match="ioctl") as error_info:
                    fcntl.ioctl(fd, request, bytes(1024))
                assert error_info.value.errno == errno.ENOTTY
        finally:
            os.close(fd)
        assert agent.terminate() == 0, agent.error_output


def read_mapped_iov_bytes(agent: AgentProcess) -> int:
    """Return how many bytes of iovs and rings an agent has mapped."""
    map_lines = Path(f"/proc/{agent.process.pid}/maps").read_text().splitlines()
    address_ranges = [line.split()[0].split("-") for line in map_lines if "/hf3fs-iov-" in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in address_ranges)


def test_removed_link_frees_memory_in_plain_mode(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(pattern.payload(MIB, seed=4))
    iovs_folder = tmp_path / "3fs-virt" / "iovs"
    with (
        AgentProcess(tmp_path) as agent,
        RawClient(tmp_path) as client,
        contextlib.closing(RawIov(MIB)) as iov,
        contextlib.closing(RawRing(4, for_read=True)) as ring,
        (tmp_path / "file").open("rb") as file,
    ):
        client.publish_ring(ring)
        ring_bytes = read_mapped_iov_bytes(agent)
        inode = client.register_file(file.fileno())

        def read_and_get_result() -> int:
            ring.prepare(iov.id.bytes, inode=inode, length=4096)
            ring.submit()
            ((_, result, _),) = ring.wait(1)
            return result

        for _ in range(2):
            client.publish_iov(iov)
            assert read_mapped_iov_bytes(agent) == ring_bytes + MIB
            assert read_and_get_result() == 4096
            (iovs_folder / iov.name()).unlink()
            wait_until(lambda: read_mapped_iov_bytes(agent) == ring_bytes, "the agent unmaps the memory", timeout_s=10)
            assert read_and_get_result() == -errno.EACCES
        assert agent.terminate() == 0, agent.error_output
