"""Memory that one process publishes to the usrbio agent, and that another process opens or imports.

Both processes do I/O with this memory until its owner ends the publication.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

import pytest
from support.application import Application
from support.processes import wait_until
from support.raw_usrbio import AgentProcess, RawClient, RawIov, RawRing, Refusal, list_shared_memory_files
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
# The commands by which a Borrower opens or imports memory.
BORROW_METHODS = [
    pytest.param("open", marks=needs_nic),
    pytest.param("open_gpu", marks=needs_device),
    pytest.param("import", marks=needs_device),
]
FILE_BYTES = 3 * MIB + 17


@pytest.fixture
def agent(tmp_path: Path, seed: int) -> Iterator[AgentProcess]:
    """Yield a running agent. After its end, check that no shared memory and no link is left."""
    (tmp_path / "file").write_bytes(pattern.payload(FILE_BYTES, seed=seed))
    with AgentProcess(tmp_path) as agent_process:
        yield agent_process
        memory_files = list_shared_memory_files(tmp_path)
    assert agent_process.process.returncode == 0, agent_process.error_output
    assert [path for path in memory_files if path.exists()] == []
    assert list((tmp_path / "3fs-virt" / "iovs").iterdir()) == []


def refused_with(expected_errno: int) -> contextlib.AbstractContextManager[pytest.ExceptionInfo[Refusal]]:
    """Return a context in which the agent must refuse a request with this errno."""
    return pytest.raises(Refusal, check=lambda error: error.errno == expected_errno)


def wait_for_links(mount: Path, count: int) -> None:
    """Wait until only `count` links are left, because the agent has removed the links of clients that have ended."""
    folder = mount / "3fs-virt" / "iovs"
    wait_until(lambda: len(list(folder.iterdir())) == count, f"the mount has {count} links", timeout_s=60)


class Owner:
    """An application with published memory, and the command by which a :class:`Borrower` gets the memory."""

    def __init__(self, mount: Path, method: str) -> None:
        memory_kind = "host" if method == "open" else "device"
        self.application = Application(mount, memory_kind=memory_kind, length_bytes=FILE_BYTES)
        iov = self.application.iov
        self.borrow_command = ["import", iov.export_gpu().hex()] if method == "import" else [method, iov.id, FILE_BYTES]


@pytest.mark.parametrize("method", BORROW_METHODS)
def test_owner_and_borrower_use_memory_until_the_owner_ends(agent: AgentProcess, method: str, seed: int) -> None:
    owner = Owner(agent.mount, method)
    with contextlib.ExitStack() as stack:
        stack.callback(owner.application.close)
        borrower = stack.enter_context(Borrower(agent.mount, agent.mount / "file"))
        assert borrower.call(*owner.borrow_command) == 0
        owner.application.fill(0xA5)
        assert borrower.call("read", 4097, 2 * MIB) == 2 * MIB
        owner.application.check(4097, 2 * MIB, seed=seed, file_offset=4097)
        assert owner.application.read_memory(0, 4097) == b"\xa5" * 4097
        assert owner.application.read_memory(4097 + 2 * MIB, 64) == b"\xa5" * 64
        owner.application.close()
        assert borrower.call("read", 0, 4096) == -errno.EACCES
        assert borrower.call("close") == 0
        borrower.close()


@pytest.mark.parametrize("method", BORROW_METHODS)
def test_end_of_a_borrower_does_not_affect_the_owner(agent: AgentProcess, method: str, seed: int) -> None:
    owner = Owner(agent.mount, method)
    fd = os.open(agent.mount / "file", os.O_RDONLY)
    try:
        usrbio.register_fd(fd)
        link_count = len(list((agent.mount / "3fs-virt" / "iovs").iterdir()))
        for is_killed in (False, True):
            with Borrower(agent.mount, agent.mount / "file") as borrower:
                for _ in range(2):
                    assert borrower.call(*owner.borrow_command) == 0
                assert borrower.call("close") == 0
                assert borrower.call("read", 1, 64 * KIB) == 64 * KIB
                if not is_killed:
                    borrower.close()
            wait_for_links(agent.mount, link_count)
            owner.application.fill(0)
            assert owner.application.read((fd, 5, 5, MIB)) == [MIB]
            owner.application.check(5, MIB, seed=seed, file_offset=5)
        usrbio.deregister_fd(fd)
    finally:
        os.close(fd)
        owner.application.close()


@needs(verbs.nic(), verbs.dmabuf_region, cuda.device(count_min=2), cuda.dmabuf_export)
@pytest.mark.parametrize("method", ["open_gpu", "import"])
def test_borrower_may_number_the_devices_differently(agent: AgentProcess, method: str, seed: int) -> None:
    owner = Owner(agent.mount, method)
    # The memory is on the owner's device 0, which is device 1 of the borrower.
    device_arguments = {"import": (), "open_gpu": (1,)}[method]
    with contextlib.ExitStack() as stack:
        stack.callback(owner.application.close)
        borrower = stack.enter_context(Borrower(agent.mount, agent.mount / "file", visible_devices="1,0"))
        if method == "open_gpu":
            assert borrower.call(*owner.borrow_command, 0) == -errno.EINVAL
        assert borrower.call(*owner.borrow_command, *device_arguments) == 0
        assert borrower.call("read", 4097, MIB) == MIB
        owner.application.check(4097, MIB, seed=seed, file_offset=4097)
        borrower.close()
        borrower_without_device = stack.enter_context(Borrower(agent.mount, agent.mount / "file", visible_devices="1"))
        assert (
            borrower_without_device.call(*owner.borrow_command)
            == {"import": -errno.EINVAL, "open_gpu": -errno.EIO}[method]
        )
        borrower_without_device.close()


class TwoClients:
    """The owner of an iov and another client, each with a ring. Both can borrow and return the iov."""

    def __init__(self, mount: Path, stack: contextlib.ExitStack) -> None:
        self.owner, self.other = (stack.enter_context(RawClient(mount)) for _ in range(2))
        self.iov, self.other_ring, self.owner_ring = (
            RawIov(64 * KIB),
            RawRing(8, for_read=True),
            RawRing(8, for_read=True),
        )
        for memory in (self.iov, self.other_ring, self.owner_ring):
            stack.callback(memory.close)
        self.owner.publish_iov(self.iov)
        self.owner.publish_ring(self.owner_ring)
        self.other.publish_ring(self.other_ring)
        fd = os.open(mount / "file", os.O_RDONLY)
        stack.callback(os.close, fd)
        self.inode = self.other.register_file(fd)

    def borrow(
        self, client: RawClient, *, name: str | None = None, target: str | None = None, handle: bytes = b""
    ) -> None:
        """Borrow the iov for a client. The arguments replace fields of the request."""
        request = PublishRequest(name or self.iov.name(), target or str(self.iov.path), handle)
        client.request(AgentRequest.BORROW, protocol.pack_publish(request))

    def return_iov(self, client: RawClient) -> None:
        client.request(AgentRequest.RETURN_BORROWED, protocol.pack_name(self.iov.name()))

    def read_by_other(self) -> int:
        """Read a file into the iov by the ring of the other client, and return the result."""
        self.other_ring.prepare(self.iov.id.bytes, inode=self.inode, length=4096)
        self.other_ring.submit()
        ((_, result, _),) = self.other_ring.wait(1)
        return result


@pytest.fixture
def clients(agent: AgentProcess) -> Iterator[TwoClients]:
    with contextlib.ExitStack() as stack:
        yield TwoClients(agent.mount, stack)


@needs_nic
def test_only_a_published_iov_can_be_borrowed(clients: TwoClients) -> None:
    with refused_with(errno.ENOENT):
        clients.borrow(clients.other, name=clients.iov.name(".b4096"))
    with refused_with(errno.EINVAL):
        clients.borrow(clients.other, target=str(clients.owner_ring.path))
    with refused_with(errno.EINVAL):
        clients.borrow(clients.other, handle=b"handle")
    with refused_with(errno.ENOENT):
        clients.borrow(clients.other, name=clients.owner_ring.link_name, target=str(clients.owner_ring.path))
    with refused_with(errno.EEXIST):
        clients.other.publish_iov(clients.iov)
    with refused_with(errno.ENOENT):
        clients.return_iov(clients.other)
    assert clients.read_by_other() == -errno.EACCES


@needs_nic
def test_iov_is_borrowed_until_every_borrow_is_returned(clients: TwoClients) -> None:
    # The owner can borrow its own iov too. Returning it does not end the publication.
    clients.borrow(clients.owner)
    clients.return_iov(clients.owner)
    with refused_with(errno.ENOENT):
        clients.return_iov(clients.owner)
    clients.borrow(clients.other)
    clients.borrow(clients.other)
    clients.return_iov(clients.other)
    assert clients.read_by_other() == 4096
    with refused_with(errno.ENOENT):
        clients.other.unpublish(clients.iov.name())
    clients.return_iov(clients.other)
    assert clients.read_by_other() == -errno.EACCES


@needs_nic
def test_unpublish_or_end_of_the_owner_ends_the_borrowing(clients: TwoClients) -> None:
    clients.borrow(clients.other)
    clients.owner.unpublish(clients.iov.name())
    assert clients.read_by_other() == -errno.EACCES
    with refused_with(errno.ENOENT):
        clients.return_iov(clients.other)
    clients.owner.publish_iov(clients.iov)
    assert clients.read_by_other() == -errno.EACCES, "a new publication is not borrowed yet"
    clients.borrow(clients.other)
    assert clients.read_by_other() == 4096
    clients.owner.close()
    wait_until(
        lambda: clients.read_by_other() == -errno.EACCES,
        "the iov of an ended owner is not borrowed any more",
        timeout_s=60,
    )


def test_client_of_another_user_cannot_borrow() -> None:
    borrowing_clients: list[int] = []
    # The arguments of borrow() and of the callbacks are numbers of clients.
    borrowers = Borrowers(
        owner_number=1,
        owner_uid=1000,
        target="there",
        add_to_client=borrowing_clients.append,
        remove_from_client=borrowing_clients.remove,
    )
    with pytest.raises(AgentError, check=lambda error: error.errno == errno.EACCES):
        borrowers.borrow(2, uid=1001, target="there")
    assert borrowing_clients == []
    borrowers.borrow(2, uid=1000, target="there")
    assert borrowing_clients == [2]
    borrowers.close()
    assert borrowing_clients == []
    with pytest.raises(AgentError, check=lambda error: error.errno == errno.ENOENT):
        borrowers.borrow(3, uid=1000, target="there")
