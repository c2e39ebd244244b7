"""Processes of several users that use one shared agent, for the cases of ``gdrkit agent --shared``."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import traceback
from typing import TYPE_CHECKING, Any, Self

from support.other_user import folder_for_all_users
from support.raw_usrbio import AgentProcess, RawClient, RawIov, RawRing, Refusal

from gdrkit import pattern
from gdrkit.units import KIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path

__all__ = [
    "ALICE",
    "BOB",
    "GROUP",
    "UserProcess",
    "catch_errno",
    "publish_iov_and_ring",
    "read_on_demand",
    "shared_mount",
    "transfer",
]

# Ids of two users and of a group, which need no entries in /etc/passwd and /etc/group.
ALICE, BOB, GROUP = 65533, 65532, 65531
_FORK_CONTEXT = multiprocessing.get_context("fork")
_PR_SET_DUMPABLE = 4


def _become_user(uid: int, groups: list[int]) -> None:
    """Change the user and the groups of this process for good. The new user then owns the process's files in /proc."""
    os.setgroups(groups)
    os.setgid(uid)
    os.setuid(uid)
    assert ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0) == 0


class UserProcess:
    """A forked process that calls `function` as another user. Use it as a context manager, which kills the process.

    The argument of `function` is a connection to the case. If the function raises an exception, :meth:`receive` raises
    an AssertionError with the traceback.
    """

    def __init__(self, uid: int, function: Callable[[Connection], None], *, groups: list[int] | None = None) -> None:
        self.connection, child_connection = _FORK_CONTEXT.Pipe()

        def run() -> None:
            try:
                _become_user(uid, groups or [])
                function(child_connection)
            except BaseException:
                child_connection.send(traceback.format_exc())
                raise

        self.process = _FORK_CONTEXT.Process(target=run)
        self.process.start()
        child_connection.close()

    def receive(self) -> Any:  # noqa: ANN401 - any object that the function sends.
        """Return the next object that the function sent."""
        assert self.connection.poll(60), "the process sends nothing"
        received_object = self.connection.recv()
        assert not (isinstance(received_object, str) and received_object.startswith("Traceback")), received_object
        return received_object

    def ask(self, question: object = None) -> Any:  # noqa: ANN401 - as receive().
        """Send an object and return the reply."""
        self.connection.send(question)
        return self.receive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


@contextlib.contextmanager
def publish_iov_and_ring(mount: Path, *, for_read: bool = True) -> Iterator[tuple[RawClient, RawIov, RawRing]]:
    """Publish an iov and a ring of this process, and yield them with their client."""
    with (
        RawClient(mount) as client,
        contextlib.closing(RawIov(64 * KIB)) as iov,
        contextlib.closing(RawRing(8, for_read=for_read)) as ring,
    ):
        client.publish_iov(iov)
        client.publish_ring(ring)
        yield client, iov, ring


def transfer(ring: RawRing, iov_id: bytes, inode: int, length: int = 4 * KIB) -> int:
    """Execute one operation of a ring and return its result."""
    ring.prepare(iov_id, inode=inode, length=length)
    ring.submit()
    ((_, result, _),) = ring.wait(1)
    return result


def read_on_demand(mount: Path, path: Path) -> Callable[[Connection], None]:
    """Return a function for a :class:`UserProcess`, which reads a private file of the user for each message.

    The function publishes an iov and a ring. First it sends their names and paths, the id of the iov, and the inode
    number of the file.
    """

    def run(connection: Connection) -> None:
        path.write_bytes(pattern.payload(64 * KIB, seed=3))
        path.chmod(0o600)
        with publish_iov_and_ring(mount) as (client, iov, ring), path.open("rb") as file:
            inode = client.register_file(file.fileno())
            published_objects = {
                "iov": iov.name(),
                "target": str(iov.path),
                "ring": ring.link_name,
                "ring_target": str(ring.path),
            }
            connection.send({**published_objects, "inode": inode, "id": iov.id.bytes})
            while True:
                connection.recv()
                iov.memory[:] = bytes(64 * KIB)
                result = transfer(ring, iov.id.bytes, inode, 64 * KIB)
                pattern.check(iov.memory[:], seed=3)
                connection.send(result)

    return run


def catch_errno(action: Callable[[], object]) -> int:
    """Return the errno with which an action fails, or 0 if the action succeeds."""
    try:
        action()
    except Refusal as error:
        return error.errno
    except OSError as error:
        return error.errno or -1
    return 0


@contextlib.contextmanager
def shared_mount() -> Iterator[tuple[AgentProcess, Path, Path]]:
    """Run an agent, and yield it with its FUSE mount and a folder outside it. Every user can create files in both."""
    with folder_for_all_users() as folder:
        mount, store, local_folder = folder / "mount", folder / "store", folder / "local"
        for path in (mount, store, local_folder):
            path.mkdir()
        for path in (store, local_folder):
            path.chmod(0o1777)
        with AgentProcess(mount, "--store", str(store), "--fuse", "--shared") as agent:
            yield agent, mount, local_folder
            assert agent.terminate() == 0, agent.error_output
