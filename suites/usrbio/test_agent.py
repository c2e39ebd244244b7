"""The usrbio agent and a client that does not use gdrkit's client library: publications, operations, and errors."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.processes import wait_until
from support.raw_usrbio import AgentProcess, RawClient, RawIov, RawRing, Refusal, list_shared_memory_files

from gdrkit import pattern
from gdrkit.harness.needs import host, needs, verbs
from gdrkit.units import KIB, MIB
from gdrkit.usrbio.agent import protocol
from gdrkit.usrbio.agent.protocol import AgentMessage, AgentRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = needs(verbs.nic())

FILE_BYTES = 3 * MIB + 17


@pytest.fixture
def mount(tmp_path: Path, seed: int) -> Path:
    """Return the folder of a mount, which has one file."""
    (tmp_path / "file").write_bytes(pattern.payload(FILE_BYTES, seed=seed))
    return tmp_path


@pytest.fixture
def agent(mount: Path) -> Iterator[AgentProcess]:
    """Yield a running agent. After its end, check that it has removed its semaphores, links and socket."""
    with AgentProcess(mount) as agent_process:
        semaphore_files = list_shared_memory_files(mount)
        yield agent_process
    assert agent_process.process.returncode == 0, agent_process.error_output
    assert len(semaphore_files) == 3
    assert [path for path in semaphore_files if path.exists()] == []
    assert list_link_names(mount) == set()
    assert not (mount / "3fs-virt" / "agent.sock").exists()


def list_link_names(mount: Path) -> set[str]:
    """Return the names of the links of publications and semaphores."""
    return {link.name for link in (mount / "3fs-virt" / "iovs").iterdir()}


@contextlib.contextmanager
def open_descriptor(path: Path, flags: int) -> Iterator[int]:
    """Open a file until the block ends, and yield its descriptor."""
    descriptor = os.open(path, flags, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def refused_with(expected_errno: int) -> contextlib.AbstractContextManager[pytest.ExceptionInfo[Refusal]]:
    """Return a context in which the agent must refuse a request with this errno."""
    return pytest.raises(Refusal, check=lambda error: error.errno == expected_errno)


def test_ring_reads_and_writes_a_file(agent: AgentProcess, seed: int) -> None:
    with RawClient(agent.mount) as client, contextlib.ExitStack() as stack:
        assert client.hello().library.startswith("gdrkit ")
        iov, read_ring, write_ring = RawIov(4 * MIB), RawRing(64, for_read=True), RawRing(64, for_read=False)
        for memory in (iov, read_ring, write_ring):
            stack.callback(memory.close)
        client.publish_iov(iov)
        client.publish_ring(read_ring)
        client.publish_ring(write_ring)
        assert {iov.name(), read_ring.link_name, write_ring.link_name} < list_link_names(agent.mount)
        source_fd = stack.enter_context(open_descriptor(agent.mount / "file", os.O_RDONLY))
        copy_fd = stack.enter_context(open_descriptor(agent.mount / "copy", os.O_RDWR | os.O_CREAT))
        inode, copy_inode = client.register_file(source_fd), client.register_file(copy_fd)
        assert inode == os.fstat(source_fd).st_ino
        chunk_bytes = 64 * KIB
        offsets = range(0, FILE_BYTES, chunk_bytes)
        for offset in offsets:
            read_ring.prepare(
                iov.id.bytes, inode=inode, length=chunk_bytes, buffer_offset=offset, file_offset=offset, userdata=offset
            )
        read_ring.submit()
        results = {userdata: result for _, result, userdata in read_ring.wait(len(offsets))}
        assert results == {offset: min(chunk_bytes, FILE_BYTES - offset) for offset in offsets}
        pattern.check(iov.memory[:FILE_BYTES], seed=seed)
        write_ring.prepare(iov.id.bytes, inode=copy_inode, length=FILE_BYTES)
        write_ring.submit()
        assert [result for _, result, _ in write_ring.wait(1)] == [FILE_BYTES]
        pattern.check((agent.mount / "copy").read_bytes(), seed=seed)
    assert agent.terminate() == 0, agent.error_output
    assert agent.statistics["operations"] == len(offsets) + 1
    assert agent.statistics["bytes"] == 2 * FILE_BYTES


def test_invalid_ring_entry_completes_with_its_errno(agent: AgentProcess) -> None:
    with RawClient(agent.mount) as client, RawClient(agent.mount) as other_client, contextlib.ExitStack() as stack:
        own_iov, other_iov, ring = RawIov(MIB), RawIov(MIB), RawRing(32, for_read=True)
        write_ring = RawRing(2, for_read=False)
        for memory in (own_iov, other_iov, ring, write_ring):
            stack.callback(memory.close)
        # The suffix sets the block size: an operation must not cross the end of a block.
        client.publish_iov(own_iov, f".b{256 * KIB}")
        other_client.publish_iov(other_iov)
        client.publish_ring(ring)
        client.publish_ring(write_ring)
        fd = stack.enter_context(open_descriptor(agent.mount / "file", os.O_RDONLY))
        write_only_fd = stack.enter_context(open_descriptor(agent.mount / "out", os.O_WRONLY | os.O_CREAT))
        inode, write_only_inode = client.register_file(fd), client.register_file(write_only_fd)
        other_fd = stack.enter_context(open_descriptor(agent.mount / "other", os.O_RDWR | os.O_CREAT))
        other_inode = other_client.register_file(other_fd)
        uint64_max = (1 << 64) - 1
        invalid_entries: list[tuple[int, dict[str, int | bytes]]] = [
            (-errno.EACCES, {"iov_id": other_iov.id.bytes}),
            (-errno.EACCES, {"iov_id": uuid.uuid4().bytes}),
            (-errno.EINVAL, {"length": 0}),
            (-errno.EINVAL, {"length": MIB + 1}),
            (-errno.EINVAL, {"buffer_offset": MIB}),
            (-errno.EINVAL, {"buffer_offset": uint64_max, "length": 2}),
            (-errno.EINVAL, {"buffer_offset": 8, "length": uint64_max}),
            (-errno.EINVAL, {"buffer_offset": 256 * KIB - 1, "length": 2}),
            (-errno.EINVAL, {"file_offset": uint64_max}),
            (-errno.EBADF, {"inode": other_inode}),
            (-errno.EBADF, {"inode": 0}),
            (-errno.EACCES, {"inode": write_only_inode}),
        ]
        for entry_index, (_, fields) in enumerate(invalid_entries):
            entry: dict[str, int | bytes] = {"iov_id": own_iov.id.bytes, "inode": inode, "length": 4 * KIB, **fields}
            ring.prepare(userdata=entry_index, **entry)  # type: ignore[arg-type]
        ring.submit()
        results = {userdata: result for _, result, userdata in ring.wait(len(invalid_entries))}
        assert results == {
            entry_index: expected_result for entry_index, (expected_result, _) in enumerate(invalid_entries)
        }
        ring.prepare(own_iov.id.bytes, inode=inode, length=4 * KIB, userdata=99)
        ring.submit()
        assert [(result, userdata) for _, result, userdata in ring.wait(1)] == [(4 * KIB, 99)]
        write_ring.prepare(own_iov.id.bytes, inode=inode, length=4 * KIB)
        write_ring.submit()
        assert [result for _, result, _ in write_ring.wait(1)] == [-errno.EACCES]


# Index 0 is the head of the submissions, index 3 the tail of the completions.
@pytest.mark.parametrize(("index_number", "index_value"), [(0, 1 << 20), (0, -1), (3, -5)])
def test_ring_with_invalid_indices_breaks_and_others_work(
    agent: AgentProcess, index_number: int, index_value: int
) -> None:
    with RawClient(agent.mount) as client, contextlib.ExitStack() as stack:
        iov, broken_ring, intact_ring = RawIov(MIB), RawRing(8, for_read=True), RawRing(8, for_read=True)
        for memory in (iov, broken_ring, intact_ring):
            stack.callback(memory.close)
        client.publish_iov(iov)
        client.publish_ring(broken_ring)
        client.publish_ring(intact_ring)
        fd = stack.enter_context(open_descriptor(agent.mount / "file", os.O_RDONLY))
        inode = client.register_file(fd)
        # The agent may read the ring as soon as the ring has an entry, so an invalid tail is written before prepare().
        # An invalid head is written after prepare(), because prepare() changes the head.
        if index_number:
            broken_ring.set_index(index_number, index_value)
        broken_ring.prepare(iov.id.bytes, inode=inode, length=KIB)
        if not index_number:
            broken_ring.set_index(index_number, index_value)
        broken_ring.submit()
        intact_ring.prepare(iov.id.bytes, inode=inode, length=KIB)
        intact_ring.submit()
        assert [result for _, result, _ in intact_ring.wait(1)] == [KIB]
    assert agent.terminate() == 0, agent.error_output
    assert agent.statistics["broken_rings"] == 1


def test_truncated_ring_breaks_and_the_agent_survives(agent: AgentProcess) -> None:
    with RawClient(agent.mount) as client, contextlib.ExitStack() as stack:
        iov, broken_ring, intact_ring = RawIov(MIB), RawRing(8, for_read=True), RawRing(8, for_read=True)
        for memory in (iov, broken_ring, intact_ring):
            stack.callback(memory.close)
        client.publish_iov(iov)
        client.publish_ring(broken_ring)
        client.publish_ring(intact_ring)
        fd = stack.enter_context(open_descriptor(agent.mount / "file", os.O_RDONLY))
        inode = client.register_file(fd)
        os.ftruncate(broken_ring.fd, 0)
        intact_ring.prepare(iov.id.bytes, inode=inode, length=KIB)
        intact_ring.submit()
        assert [result for _, result, _ in intact_ring.wait(1)] == [KIB]
        # The loop may find the truncated ring only after it has served the intact ring.
        wait_until(
            lambda: broken_ring.link_name not in list_link_names(agent.mount), "the agent removes the broken ring"
        )
    assert agent.terminate() == 0, agent.error_output
    assert agent.statistics["broken_rings"] == 1


def test_refused_publication_leaves_no_link(agent: AgentProcess, tmp_path: Path) -> None:
    links_before = list_link_names(agent.mount)
    with RawClient(agent.mount) as client, RawClient(agent.mount) as other_client, contextlib.ExitStack() as stack:
        iov = RawIov(MIB)
        stack.callback(iov.close)
        missing_path = str(iov.path.with_name(f"hf3fs-iov-{uuid.uuid4()}"))
        short_iov = RawIov(100)
        stack.callback(short_iov.close)
        symlinked_iov = RawIov(KIB)
        stack.callback(symlinked_iov.close)
        symlinked_iov.path.unlink()
        symlinked_iov.path.symlink_to(iov.path)
        for name, target, expected_errno in [
            (iov.name(), missing_path, errno.ENOENT),
            (iov.name(), "/etc/passwd", errno.EINVAL),
            (iov.name(), f"{iov.path.parent}/../../etc/passwd", errno.EINVAL),
            (symlinked_iov.name(), str(symlinked_iov.path), errno.EINVAL),
            (iov.name(".x"), str(iov.path), errno.EINVAL),
            ("../evil", str(iov.path), errno.EINVAL),
            (f"{short_iov.id}.r0", str(short_iov.path), errno.EINVAL),
            (iov.name(".gdr.d0"), "gdr://v2/nonsense", errno.EINVAL),
            (iov.name(".gdr.d0"), "gdr://v2/device/0/allocation/64/offset/0/size/64/dmabuf", errno.EOPNOTSUPP),
        ]:
            with refused_with(expected_errno):
                client.publish(name, target)
        client.publish_iov(iov)
        with refused_with(errno.EEXIST):
            client.publish_iov(iov)
        with refused_with(errno.EEXIST):
            other_client.publish_iov(iov)
        with refused_with(errno.ENOENT):
            other_client.unpublish(iov.name())
        client.unpublish(iov.name())
        assert list_link_names(agent.mount) == links_before
        assert iov.path.exists()


def test_file_outside_of_the_store_is_not_registered(
    agent: AgentProcess, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside_file = tmp_path_factory.mktemp("outside") / "file"
    outside_file.write_bytes(b"1")
    with RawClient(agent.mount) as client:
        for path, flags, allowed_errnos in [
            (outside_file, os.O_RDONLY, {errno.EXDEV, errno.EACCES, errno.ENOENT}),
            (agent.mount, os.O_RDONLY, {errno.EBADF}),
            (agent.mount / "file", os.O_PATH, {errno.EBADF}),
        ]:
            with open_descriptor(path, flags) as descriptor, pytest.raises(Refusal) as refusal:
                client.register_file(descriptor)
            assert refusal.value.errno in allowed_errnos
        with refused_with(errno.ENOENT):
            client.request(AgentRequest.DEREGISTER_FILE, protocol.pack_number(1))


def test_punch_hole_and_hard_link_change_the_file_system(agent: AgentProcess, seed: int) -> None:
    with RawClient(agent.mount) as client, open_descriptor(agent.mount / "file", os.O_RDWR) as file_fd:
        client.request(AgentRequest.PUNCH_HOLE, protocol.pack_punch(0, ((64 * KIB, 128 * KIB),)), [file_fd])
        content = (agent.mount / "file").read_bytes()
        assert content[64 * KIB : 128 * KIB] == bytes(64 * KIB)
        assert content[: 64 * KIB] == pattern.payload(FILE_BYTES, seed=seed)[: 64 * KIB]
        with open_descriptor(agent.mount, os.O_PATH) as folder_fd:
            client.request(AgentRequest.HARD_LINK, protocol.pack_name("second"), [file_fd, folder_fd])
            assert (agent.mount / "second").samefile(agent.mount / "file")
            with refused_with(errno.EEXIST):
                client.request(AgentRequest.HARD_LINK, protocol.pack_name("second"), [file_fd, folder_fd])
            with refused_with(errno.EINVAL):
                client.request(AgentRequest.HARD_LINK, protocol.pack_name("../second"), [file_fd, folder_fd])


def test_malformed_message_ends_only_its_connection(agent: AgentProcess) -> None:
    hello_message = protocol.pack(AgentMessage(AgentRequest.HELLO, 1, bytes(48)))
    with RawClient(agent.mount) as valid_client, open_descriptor(agent.mount / "file", os.O_RDONLY) as fd:
        # Too short, truncated, a wrong magic number, too long, a descriptor that HELLO does not take, and too many.
        for message_bytes, descriptors in [
            (b"x", []),
            (hello_message[:-1], []),
            (b"X" + hello_message[1:], []),
            (hello_message + bytes(protocol.MESSAGE_BYTES_MAX), []),
            (hello_message, [fd]),
            (hello_message, [fd] * 5),
        ]:
            with RawClient(agent.mount) as malformed_client:
                malformed_client.send(message_bytes, descriptors)
                assert malformed_client.receive() == b""
        # The length of the name, 65535, is above the length of the payload.
        with refused_with(errno.EINVAL):
            valid_client.request(AgentRequest.UNPUBLISH, b"\xff\xff")
        # The name of the library has no zero byte at its end, which HELLO requires.
        with refused_with(errno.EINVAL):
            valid_client.request(AgentRequest.HELLO, bytes(16) + b"N" * 32)
        valid_client.hello()


def test_second_agent_of_a_mount_is_refused(agent: AgentProcess) -> None:
    with pytest.raises(AssertionError, match="end the agent that serves this mount"):
        AgentProcess(agent.mount)


def test_unnamed_memory_is_named_until_its_client_ends(agent: AgentProcess) -> None:
    # The client sends a descriptor of unnamed memory (O_TMPFILE), and the agent gives the memory the name in the
    # target.
    shm_folder = Path("/dev/shm")  # noqa: S108 - the folder of shm_open(3).
    name = str(uuid.uuid4())
    path = shm_folder / f"hf3fs-iov-{name}"
    with contextlib.ExitStack() as stack:
        memory_fd = os.open(shm_folder, os.O_TMPFILE | os.O_RDWR, 0o600)
        stack.callback(os.close, memory_fd)
        os.ftruncate(memory_fd, 64 * KIB)
        read_only_fd = os.open(f"/proc/self/fd/{memory_fd}", os.O_RDONLY)
        stack.callback(os.close, read_only_fd)
        other_file_system_fd = os.open(agent.mount, os.O_TMPFILE | os.O_RDWR, 0o600)
        stack.callback(os.close, other_file_system_fd)
        os.ftruncate(other_file_system_fd, 64 * KIB)
        with RawClient(agent.mount) as client:
            # A wrong name, a wrong folder, a read-only descriptor, two descriptors, and a file of another file system.
            for target, descriptors in (
                (str(shm_folder / "other"), [memory_fd]),
                (str(agent.mount / path.name), [memory_fd]),
                (str(path), [read_only_fd]),
                (str(path), [memory_fd, memory_fd]),
                (
                    str(path),
                    [other_file_system_fd]
                    if os.fstat(other_file_system_fd).st_dev != shm_folder.stat().st_dev
                    else [read_only_fd],
                ),
            ):
                with refused_with(errno.EINVAL):
                    client.publish(name, target, descriptors=descriptors)
                assert not path.exists()
            path.write_bytes(b"other")
            with refused_with(errno.EEXIST):
                client.publish(name, str(path), descriptors=[memory_fd])
            assert path.read_bytes() == b"other"
            path.unlink()
            client.publish(name, str(path), descriptors=[memory_fd])
            assert os.path.samestat(path.stat(), os.fstat(memory_fd))
            second_name = str(uuid.uuid4())
            with refused_with(errno.EINVAL):
                client.publish(second_name, str(shm_folder / f"hf3fs-iov-{second_name}"), descriptors=[memory_fd])
        with RawClient(agent.mount) as other_client:
            # The agent removes the memory after its client has disconnected.
            while path.exists():
                other_client.hello()


# Id of a user without privileges.
OTHER_UID = 65534


@needs(host.capability("CAP_SETUID"))
def test_memory_of_another_user_is_not_published(agent: AgentProcess) -> None:
    iov = RawIov(64 * KIB)
    try:
        with RawClient(agent.mount) as client:
            os.chown(iov.path, OTHER_UID, OTHER_UID)
            with refused_with(errno.EACCES):
                client.publish_iov(iov)
            unnamed_fd = os.open(iov.path.parent, os.O_TMPFILE | os.O_RDWR, 0o600)
            os.ftruncate(unnamed_fd, 64 * KIB)
            os.fchown(unnamed_fd, OTHER_UID, OTHER_UID)
            name = str(uuid.uuid4())
            with refused_with(errno.EACCES):
                client.publish(name, f"{iov.path.parent}/hf3fs-iov-{name}", b"", [unnamed_fd])
            os.close(unnamed_fd)
            os.chown(iov.path, os.geteuid(), os.getegid())
            client.publish_iov(iov)
    finally:
        iov.close()
