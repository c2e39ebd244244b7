"""The agent and a client without the C library: publications, operations, errors, and the end of the agent."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.raw_usrbio import AgentProcess, RawClient, RawIov, RawRing, Refusal, shared_memory

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
    (tmp_path / "file").write_bytes(pattern.payload(FILE_BYTES, seed=seed))
    return tmp_path


@pytest.fixture
def agent(mount: Path) -> Iterator[AgentProcess]:
    with AgentProcess(mount) as running:
        semaphores = shared_memory(mount)
        yield running
    assert running.process.returncode == 0, running.errors
    assert len(semaphores) == 3
    assert [path for path in semaphores if path.exists()] == []
    assert links(mount) == set()
    assert not (mount / "3fs-virt" / "agent.sock").exists()


def links(mount: Path) -> set[str]:
    return {link.name for link in (mount / "3fs-virt" / "iovs").iterdir()}


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def refused_with(expected_errno: int) -> contextlib.AbstractContextManager[pytest.ExceptionInfo[Refusal]]:
    return pytest.raises(Refusal, check=lambda error: error.errno == expected_errno)


def test_ring_reads_and_writes_a_file(agent: AgentProcess, seed: int) -> None:
    with RawClient(agent.mount) as client, contextlib.ExitStack() as stack:
        assert client.hello().library.startswith("gdrkit ")
        iov, reader, writer = RawIov(4 * MIB), RawRing(64, for_read=True), RawRing(64, for_read=False)
        for shared in (iov, reader, writer):
            stack.callback(shared.close)
        client.publish_iov(iov)
        client.publish_ring(reader)
        client.publish_ring(writer)
        assert {iov.name(), reader.link, writer.link} < links(agent.mount)
        source = stack.enter_context(opened(agent.mount / "file", os.O_RDONLY))
        copy = stack.enter_context(opened(agent.mount / "copy", os.O_RDWR | os.O_CREAT))
        inode, copy_inode = client.register_file(source), client.register_file(copy)
        assert inode == os.fstat(source).st_ino
        step = 64 * KIB
        offsets = range(0, FILE_BYTES, step)
        for offset in offsets:
            reader.prepare(
                iov.id.bytes, inode=inode, length=step, buffer_offset=offset, file_offset=offset, userdata=offset
            )
        reader.submit()
        results = {userdata: result for _, result, userdata in reader.wait(len(offsets))}
        assert results == {offset: min(step, FILE_BYTES - offset) for offset in offsets}
        pattern.check(iov.memory[:FILE_BYTES], seed=seed)
        writer.prepare(iov.id.bytes, inode=copy_inode, length=FILE_BYTES)
        writer.submit()
        assert [result for _, result, _ in writer.wait(1)] == [FILE_BYTES]
        pattern.check((agent.mount / "copy").read_bytes(), seed=seed)
    assert agent.terminate() == 0, agent.errors
    assert agent.statistics["operations"] == len(offsets) + 1
    assert agent.statistics["bytes"] == 2 * FILE_BYTES


def test_invalid_ring_entry_completes_with_its_errno(agent: AgentProcess) -> None:
    with RawClient(agent.mount) as client, RawClient(agent.mount) as other, contextlib.ExitStack() as stack:
        own_iov, other_iov, ring = RawIov(MIB), RawIov(MIB), RawRing(32, for_read=True)
        for shared in (own_iov, other_iov, ring):
            stack.callback(shared.close)
        client.publish_iov(own_iov, f".b{256 * KIB}")
        other.publish_iov(other_iov)
        client.publish_ring(ring)
        source = stack.enter_context(opened(agent.mount / "file", os.O_RDONLY))
        write_only = stack.enter_context(opened(agent.mount / "out", os.O_WRONLY | os.O_CREAT))
        inode, write_only_inode = client.register_file(source), client.register_file(write_only)
        other_file = stack.enter_context(opened(agent.mount / "other", os.O_RDWR | os.O_CREAT))
        other_inode = other.register_file(other_file)
        uint64_max = (1 << 64) - 1
        invalid: list[tuple[int, dict[str, int | bytes]]] = [
            (-errno.EACCES, {"iov": other_iov.id.bytes}),
            (-errno.EACCES, {"iov": uuid.uuid4().bytes}),
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
        for number, (_, values) in enumerate(invalid):
            entry: dict[str, int | bytes] = {"iov": own_iov.id.bytes, "inode": inode, "length": 4 * KIB, **values}
            ring.prepare(userdata=number, **entry)  # type: ignore[arg-type]
        ring.submit()
        results = {userdata: result for _, result, userdata in ring.wait(len(invalid))}
        assert results == {number: expected for number, (expected, _) in enumerate(invalid)}
        ring.prepare(own_iov.id.bytes, inode=inode, length=4 * KIB, userdata=99)
        ring.submit()
        assert [(result, userdata) for _, result, userdata in ring.wait(1)] == [(4 * KIB, 99)]


@pytest.mark.parametrize(("index", "value"), [(0, 1 << 20), (0, -1), (3, -5)])
def test_ring_with_invalid_indices_breaks_and_others_work(agent: AgentProcess, index: int, value: int) -> None:
    with RawClient(agent.mount) as client, contextlib.ExitStack() as stack:
        iov, bad, good = RawIov(MIB), RawRing(8, for_read=True), RawRing(8, for_read=True)
        for shared in (iov, bad, good):
            stack.callback(shared.close)
        client.publish_iov(iov)
        client.publish_ring(bad)
        client.publish_ring(good)
        source = stack.enter_context(opened(agent.mount / "file", os.O_RDONLY))
        inode = client.register_file(source)
        # The agent may read the ring as soon as it has an entry, so the invalid index is written first. prepare()
        # changes the head (index 0), so an invalid head is written after it.
        if index:
            bad.set_index(index, value)
        bad.prepare(iov.id.bytes, inode=inode, length=KIB)
        if not index:
            bad.set_index(index, value)
        bad.submit()
        good.prepare(iov.id.bytes, inode=inode, length=KIB)
        good.submit()
        assert [result for _, result, _ in good.wait(1)] == [KIB]
    assert agent.terminate() == 0, agent.errors
    assert agent.statistics["broken_rings"] == 1


def test_truncated_ring_breaks_and_the_agent_survives(agent: AgentProcess) -> None:
    with RawClient(agent.mount) as client, contextlib.ExitStack() as stack:
        iov, bad, good = RawIov(MIB), RawRing(8, for_read=True), RawRing(8, for_read=True)
        for shared in (iov, bad, good):
            stack.callback(shared.close)
        client.publish_iov(iov)
        client.publish_ring(bad)
        client.publish_ring(good)
        source = stack.enter_context(opened(agent.mount / "file", os.O_RDONLY))
        inode = client.register_file(source)
        os.ftruncate(bad.fd, 0)
        good.prepare(iov.id.bytes, inode=inode, length=KIB)
        good.submit()
        assert [result for _, result, _ in good.wait(1)] == [KIB]
    assert agent.terminate() == 0, agent.errors
    assert agent.statistics["broken_rings"] == 1


def test_refused_publication_leaves_no_link(agent: AgentProcess, tmp_path: Path) -> None:
    before = links(agent.mount)
    with RawClient(agent.mount) as client, RawClient(agent.mount) as other, contextlib.ExitStack() as stack:
        iov = RawIov(MIB)
        stack.callback(iov.close)
        missing = str(iov.path.with_name(f"hf3fs-iov-{uuid.uuid4()}"))
        short = RawIov(100)
        stack.callback(short.close)
        symlink = RawIov(KIB)
        stack.callback(symlink.close)
        symlink.path.unlink()
        symlink.path.symlink_to(iov.path)
        for name, target, expected_errno in [
            (iov.name(), missing, errno.ENOENT),
            (iov.name(), "/etc/passwd", errno.EINVAL),
            (iov.name(), f"{iov.path.parent}/../../etc/passwd", errno.EINVAL),
            (symlink.name(), str(symlink.path), errno.EINVAL),
            (iov.name(".x"), str(iov.path), errno.EINVAL),
            ("../evil", str(iov.path), errno.EINVAL),
            (f"{short.id}.r0", str(short.path), errno.EINVAL),
            (iov.name(".gdr.d0"), "gdr://v2/nonsense", errno.EINVAL),
            (iov.name(".gdr.d0"), "gdr://v2/device/0/allocation/64/offset/0/size/64/dmabuf", errno.EOPNOTSUPP),
        ]:
            with refused_with(expected_errno):
                client.publish(name, target)
        client.publish_iov(iov)
        with refused_with(errno.EEXIST):
            client.publish_iov(iov)
        with refused_with(errno.EEXIST):
            other.publish_iov(iov)
        with refused_with(errno.ENOENT):
            other.unpublish(iov.name())
        client.unpublish(iov.name())
        assert links(agent.mount) == before
        assert iov.path.exists()


def test_file_outside_of_the_store_is_not_registered(
    agent: AgentProcess, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside") / "file"
    outside.write_bytes(b"1")
    with RawClient(agent.mount) as client:
        for path, flags, numbers in [
            (outside, os.O_RDONLY, {errno.EXDEV, errno.EACCES, errno.ENOENT}),
            (agent.mount, os.O_RDONLY, {errno.EBADF}),
            (agent.mount / "file", os.O_PATH, {errno.EBADF}),
        ]:
            with opened(path, flags) as descriptor, pytest.raises(Refusal) as refusal:
                client.register_file(descriptor)
            assert refusal.value.errno in numbers
        with refused_with(errno.ENOENT):
            client.ask(AgentRequest.DEREGISTER_FILE, protocol.pack_number(1))


def test_punched_hole_and_hard_link(agent: AgentProcess, seed: int) -> None:
    with RawClient(agent.mount) as client, opened(agent.mount / "file", os.O_RDWR) as file:
        client.ask(AgentRequest.PUNCH_HOLE, protocol.pack_punch(0, ((64 * KIB, 128 * KIB),)), [file])
        content = (agent.mount / "file").read_bytes()
        assert content[64 * KIB : 128 * KIB] == bytes(64 * KIB)
        assert content[: 64 * KIB] == pattern.payload(FILE_BYTES, seed=seed)[: 64 * KIB]
        with opened(agent.mount, os.O_PATH) as folder:
            client.ask(AgentRequest.HARD_LINK, protocol.pack_name("second"), [file, folder])
            assert (agent.mount / "second").samefile(agent.mount / "file")
            with refused_with(errno.EEXIST):
                client.ask(AgentRequest.HARD_LINK, protocol.pack_name("second"), [file, folder])
            with refused_with(errno.EINVAL):
                client.ask(AgentRequest.HARD_LINK, protocol.pack_name("../second"), [file, folder])


def test_malformed_message_ends_only_its_connection(agent: AgentProcess) -> None:
    hello = protocol.pack(AgentMessage(AgentRequest.HELLO, 1, bytes(48)))
    with RawClient(agent.mount) as good, opened(agent.mount / "file", os.O_RDONLY) as file:
        for data, descriptors in [
            (b"x", []),
            (hello[:-1], []),
            (b"X" + hello[1:], []),
            (hello + bytes(protocol.MESSAGE_BYTES_MAX), []),
            (hello, [file]),
            (hello, [file] * 5),
        ]:
            with RawClient(agent.mount) as bad:
                bad.send(data, descriptors)
                assert bad.receive() == b""
        with refused_with(errno.EINVAL):
            good.ask(AgentRequest.UNPUBLISH, b"\xff\xff")
        good.hello()


def test_second_agent_of_a_mount_is_refused(agent: AgentProcess) -> None:
    with pytest.raises(AssertionError, match="end the agent that serves this mount"):
        AgentProcess(agent.mount)


def test_unnamed_memory_is_named_until_its_client_ends(agent: AgentProcess) -> None:
    folder = Path("/dev/shm")  # noqa: S108 - the folder of shm_open(3).
    name = str(uuid.uuid4())
    path = folder / f"hf3fs-iov-{name}"
    with contextlib.ExitStack() as stack:
        memory = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
        stack.callback(os.close, memory)
        os.ftruncate(memory, 64 * KIB)
        read_only = os.open(f"/proc/self/fd/{memory}", os.O_RDONLY)
        stack.callback(os.close, read_only)
        other_folder = os.open(agent.mount, os.O_TMPFILE | os.O_RDWR, 0o600)
        stack.callback(os.close, other_folder)
        os.ftruncate(other_folder, 64 * KIB)
        with RawClient(agent.mount) as client:
            for target, descriptors in (
                (str(folder / "other"), [memory]),
                (str(agent.mount / path.name), [memory]),
                (str(path), [read_only]),
                (str(path), [memory, memory]),
                (str(path), [other_folder] if os.fstat(other_folder).st_dev != folder.stat().st_dev else [read_only]),
            ):
                with refused_with(errno.EINVAL):
                    client.publish(name, target, descriptors=descriptors)
                assert not path.exists()
            path.write_bytes(b"other")
            with refused_with(errno.EEXIST):
                client.publish(name, str(path), descriptors=[memory])
            assert path.read_bytes() == b"other"
            path.unlink()
            client.publish(name, str(path), descriptors=[memory])
            assert os.path.samestat(path.stat(), os.fstat(memory))
            second_name = str(uuid.uuid4())
            with refused_with(errno.EINVAL):
                client.publish(second_name, str(folder / f"hf3fs-iov-{second_name}"), descriptors=[memory])
        with RawClient(agent.mount) as other_client:
            while path.exists():
                other_client.hello()


OTHER_USER = 65534


@needs(host.capability("CAP_SETUID"))
def test_memory_of_another_user_is_not_published(agent: AgentProcess) -> None:
    iov = RawIov(64 * KIB)
    try:
        with RawClient(agent.mount) as client:
            os.chown(iov.path, OTHER_USER, OTHER_USER)
            with refused_with(errno.EACCES):
                client.publish_iov(iov)
            unnamed = os.open(iov.path.parent, os.O_TMPFILE | os.O_RDWR, 0o600)
            os.ftruncate(unnamed, 64 * KIB)
            os.fchown(unnamed, OTHER_USER, OTHER_USER)
            name = str(uuid.uuid4())
            with refused_with(errno.EACCES):
                client.publish(name, f"{iov.path.parent}/hf3fs-iov-{name}", b"", [unnamed])
            os.close(unnamed)
            os.chown(iov.path, os.geteuid(), os.getegid())
            client.publish_iov(iov)
    finally:
        iov.close()
