"""The connection of an agent to its storage server: one session at a time, which is renewed when it fails.

When a session ends, the agent first puts the session's queue pairs into the error state, and then completes the
operations. In the reverse order, the server could still write to memory that a client already uses for something else.

A client can end the session: if it truncates or frees its memory while the server accesses the memory, the NIC reports
an access error. The text below calls this "the memory of a client ended the session". Requests of other clients then
wait for the next session instead of failing.
"""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING, TypeVar

from gdrkit.children import join_threads
from gdrkit.errors import GdrkitError
from gdrkit.usrbio.agent.agent_error import AgentError
from gdrkit.usrbio.agent.session import AgentSession

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdrkit.usrbio.agent._agent_loop import AgentLoop
    from gdrkit.usrbio.agent.memory import Nics
    from gdrkit.usrbio.agent.server import ServerEndpoint

__all__ = ["ServerConnection"]

# Longest time that close() waits for the thread that renews sessions. Each step of that thread has a shorter limit.
_THREAD_TIMEOUT_S = 120.0
# First and longest pause between two attempts to begin a session. Each pause is twice as long as the last one.
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.05, 2.0
# Longest time that a request waits for the next session.
_RENEWAL_TIMEOUT_S = 10.0
# Largest number of sessions that one request tries.
_ATTEMPTS_MAX = 1000
# Interval at which the thread that renews sessions checks whether it has to stop.
_EVENTS_TIMEOUT_MS = 100

_ActionResult = TypeVar("_ActionResult")


class ServerConnection:
    """The connection to the storage server. It can be used by any number of threads.

    Parameters
    ----------
    endpoint : ServerEndpoint
        The storage server. The connection closes it.
    loop : AgentLoop
        The loop, which gets the data connection of each session.
    nics : Nics
        The NICs to which the queue pairs of a session belong.
    reopen : callable
        Called with a new session, to reopen the files of all clients before the loop uses the session.
    remove_ring : callable
        Called with the client number and the id of a ring that the loop has found to be broken.
    timeout_ms : float
        Longest wait for a reply of the server, in milliseconds.
    """

    def __init__(
        self,
        endpoint: ServerEndpoint,
        loop: AgentLoop,
        nics: Nics,
        *,
        reopen: Callable[[AgentSession], None],
        remove_ring: Callable[[int, bytes], None],
        timeout_ms: float = 30000,
    ) -> None:
        self._endpoint = endpoint
        self._loop = loop
        self._nics = nics
        self._reopen = reopen
        self._remove_ring = remove_ring
        self._timeout_ms = timeout_ms
        self._session: AgentSession | None = None
        # The secret of the last session. The next session sends the secret, and the server first ends the last session.
        # Otherwise a server that was only slow could still execute requests of the last session.
        self._session_secret: str | None = None
        # A session that has ended and is not yet closed. Operations of this session may still be in flight.
        self._ending_session: AgentSession | None = None
        self._session_changed = threading.Condition()
        # If true, requests use `_session`, or fail with EREMOTEIO if `_session` is None. If false, requests wait: a
        # session has ended, and it is not yet known whether the requests get the next session or fail.
        self._is_session_decided = True
        self._is_server_hanging = False
        # Number of the data connection that the loop uses. Events of earlier connections are ignored.
        self._generation = 0
        # -1, because the first session also increments the number, but is not a renewal.
        self._renewal_count = -1
        # The end of the error text of requests that find no session: empty, or a colon and the last error.
        self._error_suffix = ""
        self._stop_event = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def renewal_count(self) -> int:
        """The number of sessions after the first one."""
        return self._renewal_count

    def start(self) -> None:
        """Begin the first session, and start the thread that renews it."""
        self._begin_session()
        self._thread = threading.Thread(target=self._renew_sessions, name="agent-server", daemon=True)
        self._thread.start()

    def with_session(self, action: Callable[[AgentSession], _ActionResult]) -> _ActionResult:
        """Call `action` with the current session and return its result.

        If the memory of a client ends the session during the call, call `action` again with the next session. So a
        repeated `action` must have the same effect as a single one.

        Raises
        ------
        AgentError
            The error of `action`. EREMOTEIO: there is no session.
        """
        for _ in range(_ATTEMPTS_MAX):
            session = self._current_session()
            try:
                return action(session)
            except AgentError as error:
                if error.errno != errno.EREMOTEIO or not self._was_ended_by_memory(session):
                    raise
        raise AgentError(errno.EREMOTEIO, "the memory of other clients ends each session with the storage server")

    def interrupt(self) -> None:
        """End the session and its operations in flight. Call this method if the server does not answer."""
        session = self._session
        if session is not None:
            self._is_server_hanging = True
            session.interrupt()

    def close(self) -> None:
        """End the session, and then the server if it is a child process."""
        self._stop_event.set()
        if self._thread is not None:
            join_threads([self._thread], timeout_s=_THREAD_TIMEOUT_S)
        self._end_session()
        self._abandon()
        self._endpoint.close()

    def _current_session(self) -> AgentSession:
        """Return the current session. If the memory of a client ended the last session, wait for the next one."""
        with self._session_changed:
            self._session_changed.wait_for(lambda: self._is_session_decided, _RENEWAL_TIMEOUT_S)
            session = self._session
        if session is None:
            raise AgentError(errno.EREMOTEIO, f"the agent has no session with a storage server{self._error_suffix}")
        return session

    def _begin_session(self) -> None:
        """Begin a session, reopen the files of all clients, and give the data connection to the loop."""
        self._endpoint.prepare()
        session = AgentSession(
            self._endpoint.connect,
            self._nics,
            token=self._endpoint.token,
            timeout_ms=self._timeout_ms,
            replaces=self._session_secret,
        )
        self._session_secret = session.secret
        try:
            self._reopen(session)
            self._generation += 1
            self._loop.connect(
                os.dup(session.data_socket.fileno()),
                queue_pair_nic_indices=session.nic_indices,
                generation=self._generation,
            )
        except BaseException:
            session.close()
            raise
        self._renewal_count += 1
        self._error_suffix = ""
        self._decide_session(session)

    def _end_session(self) -> None:
        """Close the session, which puts its queue pairs into the error state, then end its operations.

        If the method raises, the next call continues with the same session.
        """
        self._withdraw_session()
        if self._ending_session is not None:
            if self._is_server_hanging:
                self._endpoint.kill_if_child()
            self._ending_session.interrupt()
            self._ending_session.close()
            was_ended_by_memory = self._ending_session.was_ended_by_memory = self._loop.disconnect()
            self._ending_session, self._is_server_hanging = None, False
            if not was_ended_by_memory:
                self._decide_session(None)

    def _withdraw_session(self) -> None:
        """Stop new requests from using the session. They wait until :meth:`_decide_session` is called."""
        if self._session is not None:
            with self._session_changed:
                self._ending_session, self._session, self._is_session_decided = self._session, None, False

    def _decide_session(self, session: AgentSession | None) -> None:
        """Wake the requests that wait for a session, with the new session or with None."""
        with self._session_changed:
            self._session, self._is_session_decided = session, True
            self._session_changed.notify_all()

    def _abandon(self) -> None:
        """End the operations and requests that wait for the next session, because no session can begin now."""
        self._loop.abandon()
        if self._session is None and self._ending_session is None:
            self._decide_session(None)

    def _was_ended_by_memory(self, session: AgentSession) -> bool:
        """Wait until the session has ended, and return whether the memory of a client ended it."""
        with self._session_changed:
            self._session_changed.wait_for(
                lambda: self._is_session_decided and self._session is not session, _RENEWAL_TIMEOUT_S
            )
        return session.was_ended_by_memory

    def _renew_sessions(self) -> None:
        """Handle the events of the loop, and renew the session when it has ended, until :meth:`close`.

        The steps are: new requests wait (:meth:`_withdraw_session`), the old session and its operations end
        (:meth:`_end_session`), the next session begins and the requests continue (:meth:`_begin_session`).
        """
        pause_s = _BACKOFF_FIRST_S
        while not self._stop_event.is_set():
            for event_type, client_number, ring_id, generation in self._loop.events(_EVENTS_TIMEOUT_MS):
                if event_type == "ring_broken":
                    self._remove_ring(client_number, ring_id)
                elif generation == self._generation and self._session is not None:
                    self._is_server_hanging |= event_type == "silent"
                    self._withdraw_session()
            if self._session is not None:
                pause_s = _BACKOFF_FIRST_S
                continue
            try:
                self._end_session()
                self._begin_session()
            except TimeoutError as error:
                # The server accepts connections but does not answer.
                self._endpoint.kill_if_child()
                self._error_suffix = f": {error}"
                self._abandon()
            except (GdrkitError, OSError, EOFError) as error:
                self._error_suffix = f": {error}"
                self._abandon()
                self._stop_event.wait(pause_s)
                pause_s = min(pause_s * 2, _BACKOFF_MAX_S)
