"""Proxy of a rank in the process of rank 0. It has the facts about the rank's machine, and sends requests to the rank.

Each request has a number, and the reply repeats it. So a late reply is not taken for the reply to a later request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gdrkit.errors import GdrkitError, Reason, UsageError
from gdrkit.qualify.ranks.messages import PeerGone

if TYPE_CHECKING:
    from gdrkit.qualify.ranks.messages import MessageSocket
    from gdrkit.qualify.ranks.pairs import RankFacts

__all__ = ["RankProxy", "StepFailed"]

# Longest duration of a step in a rank, and longest transit of the request and of the reply. A step that takes longer is
# considered to hang.
_STEP_TIMEOUT_S, _TRANSIT_TIMEOUT_S = 30.0, 10.0
# A reply has exactly one of these keys: the result, the error of the measuring child, or how that child ended.
_OUTCOME_KEYS = frozenset({"result", "error", "lost"})


class StepFailed(GdrkitError):
    """A rank failed to execute a requested step. The message names the step, the rank and the cause."""


class RankProxy:
    """A rank that rank 0 has admitted.

    Parameters
    ----------
    rank_facts : RankFacts
        The facts that the rank has sent.
    connection : MessageSocket
        The connection to the rank.
    step_timeout_s : float
        Longest duration of a step.
    transit_timeout_s : float
        Longest transit time of a request, and of its reply.
    """

    def __init__(
        self,
        rank_facts: RankFacts,
        connection: MessageSocket,
        *,
        step_timeout_s: float = _STEP_TIMEOUT_S,
        transit_timeout_s: float = _TRANSIT_TIMEOUT_S,
    ) -> None:
        self.rank_facts = rank_facts
        self._connection = connection
        self._step_timeout_s = step_timeout_s
        self._transit_timeout_s = transit_timeout_s
        self._last_request_number = 0
        # The step to which the rank has not replied yet, or an empty string.
        self._pending_step = ""
        # The reason why this proxy accepts no further reply of the rank, or an empty string.
        self._failure = ""

    def request(self, step: str, arguments: dict[str, Any]) -> Any:  # noqa: ANN401 - each step has its own result.
        """Make the rank execute a step, and return the result.

        Raises
        ------
        StepFailed
            The step failed or timed out. After a timeout, further calls fail until the late reply has arrived.
        """
        try:
            reply = self._exchange(step, arguments)
        except PeerGone as error:
            raise self._make_error(step, "the rank has closed its connection") from error
        except TimeoutError as error:
            raise self._make_error(step, "the rank did not reply in time") from error
        except UsageError as error:
            # It is unknown to which request the next reply would belong, so no further reply is accepted.
            self._failure = f"the rank sent an invalid reply: {error.message}"
            self._connection.close()
            raise self._make_error(step, self._failure) from error
        if "result" in reply:
            return reply["result"]
        if "error" in reply:
            raise self._make_error(step, str(reply["error"]))
        raise self._make_error(step, f"the measuring process: {reply['lost']}")

    def _exchange(self, step: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if self._failure:
            raise self._make_error(step, self._failure)
        if self._pending_step:
            try:
                self._receive(self._transit_timeout_s)  # The late reply to the previous request is discarded.
            except TimeoutError as error:
                raise self._make_error(step, f"the rank has not replied to {self._pending_step} yet") from error
        self._last_request_number += 1
        self._pending_step = step
        request = {"request": self._last_request_number, "do": step, "with": arguments, "limit_s": self._step_timeout_s}
        self._connection.send(request, timeout_s=self._transit_timeout_s)
        return self._receive(self._step_timeout_s + self._transit_timeout_s)

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        """Return the reply to the last request."""
        reply = self._connection.receive(timeout_s=timeout_s)
        request_number = reply.get("answer")
        if type(request_number) is not int or request_number != self._last_request_number:
            message = f"it is the reply to request {request_number!r}, not to request {self._last_request_number}"
            raise UsageError(message, reason=Reason.MALFORMED)
        if len(_OUTCOME_KEYS & reply.keys()) != 1:
            message = f"exactly one of {', '.join(sorted(_OUTCOME_KEYS))} is allowed, not {', '.join(sorted(reply))}"
            raise UsageError(message, reason=Reason.MALFORMED)
        self._pending_step = ""
        return reply

    def _make_error(self, step: str, cause: str) -> StepFailed:
        return StepFailed(f"{step} on rank {self.rank_facts.rank} ({self.rank_facts.host_name}): {cause}")
