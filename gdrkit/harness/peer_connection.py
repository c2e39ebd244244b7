"""The process of a peer, and the requests by which a test case controls it.

A peer is a second process that a test case uses, for example as the other end of a connection. It is spawned (never
forked), reports when it is ready, and executes one request at a time. Every request has a timeout. If the peer dies or
does not reply in time, the call raises :class:`BrokenResource`.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any, Self

from gdrkit.children import kill_child
from gdrkit.errors import BrokenResource, LeakDetected, Reason
from gdrkit.evidence import LoadedLibrary
from gdrkit.harness.wire import Channel, error_from_json_data
from gdrkit.serialization import from_json_data

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

__all__ = ["PeerConnection", "PeerObject"]

# Longest waits for the start, for a reply and for the end of a peer.
_READY_TIMEOUT_S = 60.0
_REPLY_TIMEOUT_S = 30.0
_EXIT_TIMEOUT_S = 10.0
# An error quotes the last bytes of the output of a peer, at most this many.
_OUTPUT_TAIL_BYTES = 2000


class PeerConnection:
    """A spawned process that executes requests.

    Parameters
    ----------
    name : str
        Name of the peer in errors and records.
    environment : mapping or None
        Environment of the peer. If None, it is the environment of this process.
    """

    def __init__(self, name: str = "peer", *, environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._last_request_id = 0
        self._is_ready = False
        # The output of the peer is written to a file, and errors quote it. On the terminal it would appear between the
        # output of other cases.
        self._output_file = tempfile.TemporaryFile()  # noqa: SIM115 - the file is open as long as the peer.
        case_end, peer_end = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gdrkit.harness.peer_process", str(peer_end.fileno())],
                env=None if environment is None else dict(environment),
                pass_fds=[peer_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output_file,
                stderr=subprocess.STDOUT,
            )
        except BaseException:
            case_end.close()
            self._output_file.close()
            raise
        finally:
            peer_end.close()
        self._channel = Channel(case_end)

    @property
    def process_id(self) -> int:
        """Process id of the peer."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Exit code as in :mod:`subprocess`: negative after a signal, and None while the peer runs."""
        return self._process.poll()

    def libraries(self) -> tuple[LoadedLibrary, ...]:
        """Return the API libraries that the peer has mapped."""
        return from_json_data(tuple[LoadedLibrary, ...], self.request("libraries"))

    def modules(self) -> frozenset[str]:
        """Return the top-level Python modules that the peer has imported."""
        return frozenset(self.request("modules"))

    def exit(self, status: int = 0) -> None:
        """Make the peer exit without any clean-up (``os._exit``), and wait for its end. `status` is its exit code.

        Raises
        ------
        BrokenResource
            ``TIMEOUT``: the peer did not end within 10 s and was killed.
        """
        self._ensure_ready()
        self._last_request_id += 1
        arguments = {"status": status}
        self._channel.send({"id": self._last_request_id, "op": "exit", "arguments": arguments, "descriptors": 0})
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            self.kill()
            cause = f"did not end within {_EXIT_TIMEOUT_S:g} s of os._exit and was killed"
            raise self._make_broken_peer_error(cause, Reason.TIMEOUT) from error

    def kill(self) -> None:
        """Kill the peer and wait for its end. The kernel, and not the peer, then closes the objects of the peer.

        Raises
        ------
        BrokenResource
            ``TIMEOUT``: the peer did not end after SIGKILL and is left behind.
        """
        if kill_failure := kill_child(self._process, leads_group=False):
            cause = f"was killed: {kill_failure}"
            raise self._make_broken_peer_error(cause, Reason.TIMEOUT)

    def suspend(self) -> None:
        """Suspend the peer by SIGSTOP. It does not reply until :meth:`resume` is called."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a suspended peer continue (SIGCONT)."""
        self._process.send_signal(signal.SIGCONT)

    def reset(self) -> tuple[LoadedLibrary, ...]:
        """Make the peer close all objects that it has created, and return the API libraries that it has mapped.

        Raises
        ------
        LeakDetected
            An object is still open in the peer.
        BrokenResource
            The peer has ended or does not reply.
        """
        reply = self.request("reset")
        if reply["leaked"]:
            raise LeakDetected({f"{self.name}: {type_name}": count for type_name, count in reply["leaked"].items()})
        return from_json_data(tuple[LoadedLibrary, ...], reply["libraries"])

    def close(self) -> None:
        """Close the socket, which makes the peer exit. Kill the peer if it still runs after 10 s.

        A second call has no effect.
        """
        if self._output_file.closed:
            return
        self._channel.close()
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        finally:
            self._output_file.close()

    def descriptors(self) -> frozenset[int]:
        """Return the descriptors of this process for the peer: the socket and the file with the output of the peer."""
        if self._output_file.closed:
            return frozenset()
        return frozenset((self._channel.fileno(), self._output_file.fileno()))

    def request(
        self,
        operation: str,
        *,
        descriptors: Sequence[int] = (),
        request_timeout_s: float = _REPLY_TIMEOUT_S,
        **arguments: Any,  # noqa: ANN401 - each operation has its own arguments.
    ) -> Any:  # noqa: ANN401 - each operation has its own result.
        """Make the peer execute an operation, and return its result.

        Raises
        ------
        GdrkitError
            The error that the operation raised in the peer. A note of the error names the peer.
        BrokenResource
            ``PEER_GONE``: the peer has ended. ``TIMEOUT``: the peer did not reply in time, and was killed because its
            state is unknown.
        """
        self._ensure_ready()
        self._last_request_id += 1
        message = {
            "id": self._last_request_id,
            "op": operation,
            "arguments": arguments,
            "descriptors": len(descriptors),
        }
        try:
            self._channel.send(message, descriptors=tuple(descriptors))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._make_peer_gone_error(operation) from error
        reply = self._receive(operation, request_timeout_s)
        if reply["id"] != self._last_request_id:
            self.kill()
            cause = f"replied to request {reply['id']} instead of {self._last_request_id}"
            raise self._make_broken_peer_error(cause, Reason.MALFORMED)
        if "error" in reply:
            peer_error = error_from_json_data(reply["error"])
            peer_error.add_note(f"raised in {self.name} (process {self.process_id}) by {operation}")
            raise peer_error
        return reply["result"]

    def _ensure_ready(self) -> None:
        if not self._is_ready:
            # The constructor does not wait, so that several peers can start at the same time.
            self._receive("start", _READY_TIMEOUT_S)
            self._is_ready = True

    def _receive(self, operation: str, timeout_s: float) -> dict[str, Any]:
        """Return the next message of the peer. `operation` names, in errors, the operation that the peer executes."""
        try:
            reply = self._channel.receive(timeout_s=timeout_s)
        except TimeoutError as error:
            self.kill()
            cause = f"did not reply to {operation} within {timeout_s:g} s and was killed"
            raise self._make_broken_peer_error(cause, Reason.TIMEOUT) from error
        if reply is None:
            raise self._make_peer_gone_error(operation)
        return reply

    def _make_peer_gone_error(self, operation: str) -> BrokenResource:
        """Return the error for a peer that has ended or closed its socket."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_TIMEOUT_S)
        exit_code = self._process.poll()
        cause = "closed its socket" if exit_code is None else f"exited with code {exit_code}"
        if exit_code is not None and exit_code < 0:
            cause = f"was ended by {signal.Signals(-exit_code).name}"
        return self._make_broken_peer_error(f"{cause} during {operation}", Reason.PEER_GONE)

    def _make_broken_peer_error(self, cause: str, reason: Reason) -> BrokenResource:
        """Return the error for a broken peer, with the end of its output as a note."""
        self._output_file.seek(0)
        output = self._output_file.read()[-_OUTPUT_TAIL_BYTES:].decode("utf-8", "backslashreplace").strip()
        error = BrokenResource(f"{self.name} (process {self.process_id}) {cause}", reason=reason)
        if output:
            error.add_note(f"output of {self.name}: {output}")
        return error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, process {self.process_id})"


class PeerObject:
    """A proxy, in the process of the case, for an object in the peer. `handle_number` identifies it there."""

    def __init__(self, peer: PeerConnection, reply: dict[str, Any]) -> None:
        self.peer = peer
        self.handle_number: int = reply["handle"]

    def close(self) -> None:
        """Make the peer close the object."""
        self.peer.request("close", number=self.handle_number)
