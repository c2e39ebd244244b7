"""The session of an agent with its storage server. It raises the errors that the agent sends to its clients."""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING, TypeVar

from gdrkit.errors import ApiError
from gdrkit.storage import messages
from gdrkit.storage.session import StorageSession
from gdrkit.usrbio.agent.agent_error import AgentError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from gdrkit.storage.control import Request
    from gdrkit.usrbio.agent.memory import Nics

__all__ = ["AgentSession"]

_Reply = TypeVar("_Reply")
_CLIENT_NAME = "gdrkit agent"


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
    nic_indices : tuple of int
        For each queue pair, the index of its NIC in ``Nics.all``.
    was_ended_by_memory : bool
        Whether the session ended because a NIC refused access to the memory of one operation. ServerConnection sets it.
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
        super().__init__(connect, nics.all, client=_CLIENT_NAME, token=token, timeout_ms=timeout_ms, replaces=replaces)
        self.nic_indices = tuple(range(len(self.queue_pairs)))
        self.was_ended_by_memory = False
        # Held for the two requests of call() with `user`. Otherwise another thread could set another user in between.
        self._user_lock = threading.Lock()

    def call(
        self,
        request: Request,
        reply_type: type[_Reply],
        *,
        descriptors: Sequence[int] = (),
        user: messages.SetUser | None = None,
    ) -> _Reply:
        """Send a request and return its reply, which is a `reply_type`.

        With `user`, the server executes the request with the rights of this user.

        Raises
        ------
        AgentError
            The error has the errno of the server's reply. EREMOTEIO: the connection failed, and the session has ended.
        """
        try:
            if user is None:
                return self.request(request, reply_type, descriptors=descriptors)
            with self._user_lock:
                self.request(user, messages.Done)
                return self.request(request, reply_type, descriptors=descriptors)
        except ApiError as error:
            raise AgentError(error.errno or errno.EIO, error.detail) from error
