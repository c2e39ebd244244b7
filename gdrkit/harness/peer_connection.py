"""The process of a peer and its requests, by which a case controls it.

A peer is spawned (never forked), reports when it is ready, and replies to one request at a time, each with a time
limit. If a peer dies or does not reply, the call raises :class:`BrokenResource`. No call waits for a peer without a
limit.
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
from gdrkit.harness.wire import Channel, error_from_plain
from gdrkit.serialization import from_json_data

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

__all__ = ["PeerConnection", "PeerObject"]

_READY_TIMEOUT_S = 60.0
_REQUEST_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 10.0
_SHOWN_BYTES = 2000


class PeerConnection:
    """A spawned process that executes requests.

    Parameters
    ----------
    name : str
        Name of the peer in errors and records.
    environment : mapping or None
        Environment of the peer; that of this process if None.
    """

    def __init__(self, name: str = "peer", *, environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._requests = 0
        self._is_ready = False
        # The output of the peer is kept in a file, as it would appear amid other cases. It is shown when the peer
        # breaks.
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - the file is open as long as the peer.
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gdrkit.harness.peer_process", str(theirs.fileno())],
                env=None if environment is None else dict(environment),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=subprocess.STDOUT,
            )
        except BaseException:
            ours.close()
            self._printed.close()
            raise
        finally:
            theirs.close()
        self._channel = Channel(ours)

    @property
    def process_id(self) -> int:
        """Process id of the peer."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Exit code as in :mod:`subprocess` (minus the signal number after a signal); None while the peer runs."""
        return self._process.poll()

    def libraries(self) -> tuple[LoadedLibrary, ...]:
        """Return the API libraries that the peer has mapped."""
        return from_json_data(tuple[LoadedLibrary, ...], self.request("libraries"))

    def modules(self) -> frozenset[str]:
        """Return the top-level Python modules that the peer has imported."""
        return frozenset(self.request("modules"))

    def exit(self, status: int = 0) -> None:
        """Make the peer end at once without any clean-up (``os._exit``), and wait for its end.

        Raises
        ------
        BrokenResource
            ``TIMEOUT``: the peer has not ended within 10 s, and was killed.
        """
        self._ensure_ready()
        self._requests += 1
        arguments = {"status": status}
        self._channel.send({"id": self._requests, "op": "exit", "arguments": arguments, "descriptors": 0})
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            self.kill()
            what = f"did not end within {_END_TIMEOUT_S:g} s of os._exit, and was killed"
            raise self._broken_by(what, Reason.TIMEOUT) from error

    def kill(self) -> None:
        """End the peer with SIGKILL and wait for its end. Only the kernel closes what the peer had opened.

        Raises
        ------
        BrokenResource
            ``TIMEOUT``: the peer does not end, and is abandoned.
        """
        if left := kill_child(self._process, leads_group=False):
            what = f"was killed: {left}"
            raise self._broken_by(what, Reason.TIMEOUT)

    def stop(self) -> None:
        """Send SIGSTOP. The peer stays alive and does not reply until :meth:`resume`."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def reset(self) -> tuple[LoadedLibrary, ...]:
        """Make the peer close all objects that it created, last first, and return the API libraries that it has mapped.

        Raises
        ------
        LeakDetected
            Something is still open in the peer.
        BrokenResource
            The peer is gone or does not reply.
        """
        answer = self.request("reset")
        if answer["leaked"]:
            raise LeakDetected({f"{self.name}: {kind}": count for kind, count in answer["leaked"].items()})
        return from_json_data(tuple[LoadedLibrary, ...], answer["libraries"])

    def close(self) -> None:
        """End the peer by closing the socket, or by SIGKILL after 10 s. A second close does nothing."""
        if self._printed.closed:
            return
        self._channel.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        finally:
            self._printed.close()

    def descriptors(self) -> frozenset[int]:
        """Return the descriptors of this process that belong to the peer."""
        if self._printed.closed:
            return frozenset()
        return frozenset((self._channel.fileno(), self._printed.fileno()))

    def request(
        self,
        operation: str,
        *,
        descriptors: Sequence[int] = (),
        request_timeout_s: float = _REQUEST_TIMEOUT_S,
        **arguments: Any,  # noqa: ANN401 - each operation has its own arguments.
    ) -> Any:  # noqa: ANN401 - each operation has its own result.
        """Make the peer execute an operation, and return its result.

        Raises
        ------
        GdrkitError
            The error that the operation raised in the peer, with a note that names the peer.
        BrokenResource
            ``PEER_GONE``: the peer ended. ``TIMEOUT``: it did not reply in time; it is killed then, since its state is
            unknown.
        """
        self._ensure_ready()
        self._requests += 1
        message = {"id": self._requests, "op": operation, "arguments": arguments, "descriptors": len(descriptors)}
        try:
            self._channel.send(message, descriptors=tuple(descriptors))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._gone(operation) from error
        answer = self._receive(operation, request_timeout_s)
        if answer["id"] != self._requests:
            self.kill()
            what = f"answered request {answer['id']} instead of {self._requests}"
            raise self._broken_by(what, Reason.MALFORMED)
        if "error" in answer:
            error_there = error_from_plain(answer["error"])
            error_there.add_note(f"raised in {self.name} (process {self.process_id}) by {operation}")
            raise error_there
        return answer["result"]

    def _ensure_ready(self) -> None:
        if not self._is_ready:
            # The wait is not part of the start: several peers can start at once while the case continues.
            self._receive("start", _READY_TIMEOUT_S)
            self._is_ready = True

    def _receive(self, operation: str, timeout_s: float) -> dict[str, Any]:
        try:
            answer = self._channel.receive(timeout_s=timeout_s)
        except TimeoutError as error:
            self.kill()
            what = f"gave no answer to {operation} within {timeout_s:g} s"
            raise self._broken_by(what, Reason.TIMEOUT) from error
        if answer is None:
            raise self._gone(operation)
        return answer

    def _gone(self, operation: str) -> BrokenResource:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S)
        code = self._process.poll()
        how = "closed its socket" if code is None else f"ended with {code}"
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        return self._broken_by(f"{how} during {operation}", Reason.PEER_GONE)

    def _broken_by(self, what: str, reason: Reason) -> BrokenResource:
        self._printed.seek(0)
        printed = self._printed.read()[-_SHOWN_BYTES:].decode("utf-8", "backslashreplace").strip()
        error = BrokenResource(f"{self.name} (process {self.process_id}) {what}", reason=reason)
        if printed:
            error.add_note(f"it printed: {printed}")
        return error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, process {self.process_id})"


class PeerObject:
    """A proxy of the case for an object in the peer, which it names by a handle number."""

    def __init__(self, peer: PeerConnection, reply: dict[str, Any]) -> None:
        self.peer = peer
        self.number: int = reply["handle"]

    def close(self) -> None:
        """Close the object in the peer."""
        self.peer.request("close", number=self.number)
