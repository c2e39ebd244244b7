"""Memory that one process published and another one opens or imports: both do I/O with it, and the owner's end is the
end of it for both.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

import pytest
from support.application import Application
from support.borrower import Borrower
from support.kill_world import until
from support.raw_usrbio import AgentProcess, RawClient, RawIov, RawRing, Refusal, shared_memory

from gdrkit import pattern, usrbio
from gdrkit.harness.needs import cuda, needs, verbs
from gdrkit.units import KIB, MIB
from gdrkit.usrbio.agent import protocol
from gdrkit.usrbio.agent.agent_error import AgentError
from gdrkit.usrbio.agent.borrowers import Borrowers
from gdrkit.usrbio.agent.protocol import AgentRequest, PublishRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

needs_nic = needs(verbs.nic())
needs_device = needs(verbs.nic(), verbs.dmabuf_region, cuda.device(), cuda.dmabuf_export)
WAYS = [
    pytest.param("open", marks=needs_nic),
    pytest.param("open_gpu", marks=needs_device),
    pytest.param("import", marks=needs_device),
]
LENGTH = 3 * MIB + 17


@pytest.fixture
def agent(tmp_path: Path, seed: int) -> Iterator[AgentProcess]:
    (tmp_path / "file").write_bytes(pattern.payload(LENGTH, seed=seed))
    with AgentProcess(tmp_path) as running:
        yield running
        seen = shared_memory(tmp_path)
    assert running.process.returncode == 0, running.errors
    assert [path for path in seen if path.exists()] == []
    assert list((tmp_path / "3fs-virt" / "iovs").iterdir()) == []


def refused(number: int) -> contextlib.AbstractContextManager[pytest.ExceptionInfo[Refusal]]:
    return pytest.raises(Refusal, check=lambda error: error.errno == number)


def wait_until_one_client_is_left(mount: Path, links: int) -> None:
    folder = mount / "3fs-virt" / "iovs"
    until(lambda: len(list(folder.iterdir())) == links, "the links of a client that has ended are gone", timeout_s=60)


class Pair:
    """The owner's memory, and how the other process gets it."""

    def __init__(self, mount: Path, way: str) -> None:
        kind = "host" if way == "open" else "device"
        self.application = Application(mount, kind=kind, length_bytes=LENGTH)
        iov = self.application.iov
        self.order = ["import", iov.export_gpu().hex()] if way == "import" else [way, iov.id, LENGTH]


@pytest.mark.parametrize("way", WAYS)
def test_both_sides_reach_the_memory_until_its_owner_ends(agent: AgentProcess, way: str, seed: int) -> None:
    pair = Pair(agent.mount, way)
    with contextlib.ExitStack() as stack:
        stack.callback(pair.application.close)
        other = stack.enter_context(Borrower(agent.mount, agent.mount / "file"))
        assert other.ask(*pair.order) == 0
        pair.application.fill(0xA5)
        assert other.ask("read", 4097, 2 * MIB) == 2 * MIB
        pair.application.check(4097, 2 * MIB, seed=seed, file_offset=4097)
        assert pair.application.peek(0, 4097) == b"\xa5" * 4097
        assert pair.application.peek(4097 + 2 * MIB, 64) == b"\xa5" * 64
        pair.application.close()
        assert other.ask("read", 0, 4096) == -errno.EACCES
        assert other.ask("close") == 0
        other.end()


@pytest.mark.parametrize("way", WAYS)
def test_the_end_of_a_borrower_takes_nothing_from_the_owner(agent: AgentProcess, way: str, seed: int) -> None:
    pair = Pair(agent.mount, way)
    fd = os.open(agent.mount / "file", os.O_RDONLY)
    try:
        usrbio.register_fd(fd)
        links = len(list((agent.mount / "3fs-virt" / "iovs").iterdir()))
        for dies in (False, True):
            with Borrower(agent.mount, agent.mount / "file") as other:
                for _ in range(2):
                    assert other.ask(*pair.order) == 0
                assert other.ask("close") == 0
                assert other.ask("read", 1, 64 * KIB) == 64 * KIB
                if not dies:
                    other.end()
            wait_until_one_client_is_left(agent.mount, links)
            pair.application.fill(0)
            assert pair.application.read((fd, 5, 5, MIB)) == [MIB]
            pair.application.check(5, MIB, seed=seed, file_offset=5)
        usrbio.deregister_fd(fd)
    finally:
        os.close(fd)
        pair.application.close()


class Two:
    """The owner of some memory, another client with a ring of its own, and what both may ask."""

    def __init__(self, mount: Path, stack: contextlib.ExitStack) -> None:
        self.owner, self.other = (stack.enter_context(RawClient(mount)) for _ in range(2))
        self.iov, self.ring, self.theirs = RawIov(64 * KIB), RawRing(8, for_read=True), RawRing(8, for_read=True)
        for each in (self.iov, self.ring, self.theirs):
            stack.callback(each.close)
        self.owner.publish_iov(self.iov)
        self.owner.publish_ring(self.theirs)
        self.other.publish_ring(self.ring)
        file = os.open(mount / "file", os.O_RDONLY)
        stack.callback(os.close, file)
        self.inode = self.other.register_file(file)

    def borrow(
        self, client: RawClient, *, name: str | None = None, target: str | None = None, handle: bytes = b""
    ) -> None:
        asked = PublishRequest(name or self.iov.name(), target or str(self.iov.path), handle)
        client.ask(AgentRequest.BORROW, protocol.pack_publish(asked))

    def give_back(self, client: RawClient) -> None:
        client.ask(AgentRequest.GIVE_BACK, protocol.pack_name(self.iov.name()))

    def read(self) -> int:
        self.ring.prepare(self.iov.id.bytes, inode=self.inode, length=4096)
        self.ring.submit()
        return self.ring.wait(1)[0][1]


@pytest.fixture
def two(agent: AgentProcess) -> Iterator[Two]:
    with contextlib.ExitStack() as stack:
        yield Two(agent.mount, stack)


@needs_nic
def test_only_what_is_published_is_borrowed(two: Two) -> None:
    with refused(errno.ENOENT):
        two.borrow(two.other, name=two.iov.name(".b4096"))
    with refused(errno.EINVAL):
        two.borrow(two.other, target=str(two.theirs.path))
    with refused(errno.EINVAL):
        two.borrow(two.other, handle=b"handle")
    with refused(errno.ENOENT):
        two.borrow(two.other, name=two.theirs.link, target=str(two.theirs.path))
    with refused(errno.EEXIST):
        two.other.publish_iov(two.iov)
    with refused(errno.ENOENT):
        two.give_back(two.other)
    assert two.read() == -errno.EACCES


@needs_nic
def test_it_is_borrowed_as_often_as_it_is_given_back(two: Two) -> None:
    # Its owner too; what that gives back is the borrowing alone.
    two.borrow(two.owner)
    two.give_back(two.owner)
    with refused(errno.ENOENT):
        two.give_back(two.owner)
    two.borrow(two.other)
    two.borrow(two.other)
    two.give_back(two.other)
    assert two.read() == 4096
    with refused(errno.ENOENT):
        two.other.unpublish(two.iov.name())
    two.give_back(two.other)
    assert two.read() == -errno.EACCES


@needs_nic
def test_the_owner_takes_it_back_by_unpublishing_or_by_its_end(two: Two) -> None:
    two.borrow(two.other)
    two.owner.unpublish(two.iov.name())
    assert two.read() == -errno.EACCES
    with refused(errno.ENOENT):
        two.give_back(two.other)
    two.owner.publish_iov(two.iov)
    assert two.read() == -errno.EACCES, "a new publication is borrowed anew"
    two.borrow(two.other)
    assert two.read() == 4096
    two.owner.close()
    until(lambda: two.read() == -errno.EACCES, "what its owner has closed is lent no more", timeout_s=60)


def test_another_user_borrows_nothing() -> None:
    served: list[int] = []
    borrowers = Borrowers(owner=1, uid=1000, target="there", serve=served.append, remove=served.remove)
    with pytest.raises(AgentError, check=lambda error: error.errno == errno.EACCES):
        borrowers.borrow(2, uid=1001, target="there")
    assert served == []
    borrowers.borrow(2, uid=1000, target="there")
    assert served == [2]
    borrowers.close()
    assert served == []
    with pytest.raises(AgentError, check=lambda error: error.errno == errno.ENOENT):
        borrowers.borrow(3, uid=1000, target="there")
