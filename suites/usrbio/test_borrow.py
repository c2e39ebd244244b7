"""Memory that one process publishes and another one opens or imports.

Both processes do I/O with it until the owner ends its publication.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

import pytest
from support.application import Application
from support.processes import wait_until
from support.raw_usrbio import AgentProcess, RawClient, RawIov, RawRing, Refusal, shared_memory
from usrbio.borrower import Borrower

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
METHODS = [
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
        memory = shared_memory(tmp_path)
    assert running.process.returncode == 0, running.errors
    assert [path for path in memory if path.exists()] == []
    assert list((tmp_path / "3fs-virt" / "iovs").iterdir()) == []


def refused(number: int) -> contextlib.AbstractContextManager[pytest.ExceptionInfo[Refusal]]:
    return pytest.raises(Refusal, check=lambda error: error.errno == number)


def wait_for_links(mount: Path, count: int) -> None:
    """Wait until the agent has removed the links of clients that have ended."""
    folder = mount / "3fs-virt" / "iovs"
    wait_until(lambda: len(list(folder.iterdir())) == count, f"the mount has {count} links", timeout_s=60)


class Owner:
    """An application with published memory, and the command by which a :class:`Borrower` gets the memory."""

    def __init__(self, mount: Path, method: str) -> None:
        kind = "host" if method == "open" else "device"
        self.application = Application(mount, kind=kind, length_bytes=LENGTH)
        iov = self.application.iov
        self.command = ["import", iov.export_gpu().hex()] if method == "import" else [method, iov.id, LENGTH]


@pytest.mark.parametrize("method", METHODS)
def test_owner_and_borrower_use_memory_until_the_owner_ends(agent: AgentProcess, method: str, seed: int) -> None:
    owner = Owner(agent.mount, method)
    with contextlib.ExitStack() as stack:
        stack.callback(owner.application.close)
        other = stack.enter_context(Borrower(agent.mount, agent.mount / "file"))
        assert other.call(*owner.command) == 0
        owner.application.fill(0xA5)
        assert other.call("read", 4097, 2 * MIB) == 2 * MIB
        owner.application.check(4097, 2 * MIB, seed=seed, file_offset=4097)
        assert owner.application.peek(0, 4097) == b"\xa5" * 4097
        assert owner.application.peek(4097 + 2 * MIB, 64) == b"\xa5" * 64
        owner.application.close()
        assert other.call("read", 0, 4096) == -errno.EACCES
        assert other.call("close") == 0
        other.close()


@pytest.mark.parametrize("method", METHODS)
def test_end_of_a_borrower_does_not_affect_the_owner(agent: AgentProcess, method: str, seed: int) -> None:
    owner = Owner(agent.mount, method)
    fd = os.open(agent.mount / "file", os.O_RDONLY)
    try:
        usrbio.register_fd(fd)
        links = len(list((agent.mount / "3fs-virt" / "iovs").iterdir()))
        for dies in (False, True):
            with Borrower(agent.mount, agent.mount / "file") as other:
                for _ in range(2):
                    assert other.call(*owner.command) == 0
                assert other.call("close") == 0
                assert other.call("read", 1, 64 * KIB) == 64 * KIB
                if not dies:
                    other.close()
            wait_for_links(agent.mount, links)
            owner.application.fill(0)
            assert owner.application.read((fd, 5, 5, MIB)) == [MIB]
            owner.application.check(5, MIB, seed=seed, file_offset=5)
        usrbio.deregister_fd(fd)
    finally:
        os.close(fd)
        owner.application.close()


class TwoClients:
    """The owner of an iov, and another client with a ring. Both can borrow and return the iov."""

    def __init__(self, mount: Path, stack: contextlib.ExitStack) -> None:
        self.owner, self.other = (stack.enter_context(RawClient(mount)) for _ in range(2))
        self.iov, self.ring, self.owner_ring = RawIov(64 * KIB), RawRing(8, for_read=True), RawRing(8, for_read=True)
        for each in (self.iov, self.ring, self.owner_ring):
            stack.callback(each.close)
        self.owner.publish_iov(self.iov)
        self.owner.publish_ring(self.owner_ring)
        self.other.publish_ring(self.ring)
        file = os.open(mount / "file", os.O_RDONLY)
        stack.callback(os.close, file)
        self.inode = self.other.register_file(file)

    def borrow(
        self, client: RawClient, *, name: str | None = None, target: str | None = None, handle: bytes = b""
    ) -> None:
        request = PublishRequest(name or self.iov.name(), target or str(self.iov.path), handle)
        client.ask(AgentRequest.BORROW, protocol.pack_publish(request))

    def return_iov(self, client: RawClient) -> None:
        client.ask(AgentRequest.RETURN_BORROWED, protocol.pack_name(self.iov.name()))

    def read(self) -> int:
        self.ring.prepare(self.iov.id.bytes, inode=self.inode, length=4096)
        self.ring.submit()
        return self.ring.wait(1)[0][1]


@pytest.fixture
def two(agent: AgentProcess) -> Iterator[TwoClients]:
    with contextlib.ExitStack() as stack:
        yield TwoClients(agent.mount, stack)


@needs_nic
def test_only_a_published_iov_can_be_borrowed(two: TwoClients) -> None:
    with refused(errno.ENOENT):
        two.borrow(two.other, name=two.iov.name(".b4096"))
    with refused(errno.EINVAL):
        two.borrow(two.other, target=str(two.owner_ring.path))
    with refused(errno.EINVAL):
        two.borrow(two.other, handle=b"handle")
    with refused(errno.ENOENT):
        two.borrow(two.other, name=two.owner_ring.link, target=str(two.owner_ring.path))
    with refused(errno.EEXIST):
        two.other.publish_iov(two.iov)
    with refused(errno.ENOENT):
        two.return_iov(two.other)
    assert two.read() == -errno.EACCES


@needs_nic
def test_iov_is_borrowed_until_it_is_returned_as_often(two: TwoClients) -> None:
    # The owner can borrow its own iov too. Returning it does not end the publication.
    two.borrow(two.owner)
    two.return_iov(two.owner)
    with refused(errno.ENOENT):
        two.return_iov(two.owner)
    two.borrow(two.other)
    two.borrow(two.other)
    two.return_iov(two.other)
    assert two.read() == 4096
    with refused(errno.ENOENT):
        two.other.unpublish(two.iov.name())
    two.return_iov(two.other)
    assert two.read() == -errno.EACCES


@needs_nic
def test_unpublish_or_end_of_the_owner_ends_the_borrowing(two: TwoClients) -> None:
    two.borrow(two.other)
    two.owner.unpublish(two.iov.name())
    assert two.read() == -errno.EACCES
    with refused(errno.ENOENT):
        two.return_iov(two.other)
    two.owner.publish_iov(two.iov)
    assert two.read() == -errno.EACCES, "a new publication is not borrowed yet"
    two.borrow(two.other)
    assert two.read() == 4096
    two.owner.close()
    wait_until(lambda: two.read() == -errno.EACCES, "the iov of an ended owner is not borrowed any more", timeout_s=60)


def test_client_of_another_user_cannot_borrow() -> None:
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
