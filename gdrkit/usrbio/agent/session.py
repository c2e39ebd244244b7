"""The session of an agent with its storage server, whose errors are those that the agent returns to its clients."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, TypeVar

from gdrkit.errors import ApiError
from gdrkit.storage.session import StorageSession
from gdrkit.usrbio.agent.refusal import Refused

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from gdrkit.storage.control import Request
    from gdrkit.usrbio.agent.memory import Nics

__all__ = ["AgentSession"]

_R = TypeVar("_R")
_CLIENT = "gdrkit agent"


class AgentSession(StorageSession):
    """A session of an agent. The agent's loop uses the data connection.

    Parameters
    ----------
    connect, token, timeout_ms, replaces
        See :class:`~gdrkit.storage.session.StorageSession`.
    nics : Nics
        NICs of the agent.

    Attributes
    ----------
    lanes : tuple of int
        Index of the NIC of each queue pair.
    was_ended_by_memory : bool
        Whether the session ended because a NIC refused access to the memory of one operation. The owner sets it.
    """

    def __init__(
        self,
        connect: Callable[[], socket.socket],
        nics: Nics,
        *,
        token: str | None,
        timeout_ms: float,
        replaces: str | None = None,
    ) -> None:
        super().__init__(connect, nics.all, client=_CLIENT, token=token, timeout_ms=timeout_ms, replaces=replaces)
        self.lanes = tuple(range(len(self.queue_pairs)))
        self.was_ended_by_memory = False

    def ask(self, request: Request, kind: type[_R], *, descriptors: Sequence[int] = ()) -> _R:
        """Send a request and return its reply, which is a `kind`.

        Raises
        ------
        Refused
            The server replied with this errno. EREMOTEIO: the connection failed, and the session has ended.
        """
        try:
            return self.request(request, kind, descriptors=descriptors)
        except ApiError as error:
            raise Refused(error.errno or errno.EIO, error.detail) from error
