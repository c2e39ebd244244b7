"""A rank as seen by rank 0: the facts of its machine, and the requests to it.

Requests have numbers, and a reply has the number of its request, so that a late reply is not taken for another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gdrkit.errors import GdrkitError, Reason, UsageError
from gdrkit.qualify.ranks.lines import Gone

if TYPE_CHECKING:
    from gdrkit.qualify.ranks.lines import Lines
    from gdrkit.qualify.ranks.pairs import RankFacts

__all__ = ["Member", "StepFailed"]

# A child that needs longer than this for a step is stuck. With the time for the reply, a row takes at most a minute.
_STEP_S, _ANSWER_S = 30.0, 10.0
_ANSWERS = frozenset({"result", "error", "lost"})


class StepFailed(GdrkitError):
    """A rank failed to do a requested step. The text names the rank, the step and the cause."""


class Member:
    """A rank that has reported.

    Parameters
    ----------
    about : RankFacts
        The facts that it has reported.
    lines : Lines
        The connection to it.
    step_s : float
        Longest duration of a step.
    answer_s : float
        Longest transit time of a request and its reply.
    """

    def __init__(self, about: RankFacts, lines: Lines, *, step_s: float = _STEP_S, answer_s: float = _ANSWER_S) -> None:
        self.about = about
        self._lines = lines
        self._step_s = step_s
        self._answer_s = answer_s
        self._asked = 0
        self._owed = ""
        self._lost = ""

    def ask(self, do: str, arguments: dict[str, Any]) -> Any:  # noqa: ANN401 - each step has its own result.
        """Make the rank do a step, and return its result.

        Raises
        ------
        StepFailed
            The step failed, or was not done in time. A rank whose reply is outstanding gets no other request until it
            comes.
        """
        try:
            answer = self._exchange(do, arguments)
        except Gone as error:
            raise self._failed(do, "the rank is gone") from error
        except TimeoutError as error:
            raise self._failed(do, "the rank does not answer") from error
        except UsageError as error:
            # Any further message would be the reply to another request.
            self._lost = f"the rank does not answer as it must: {error.message}"
            self._lines.close()
            raise self._failed(do, self._lost) from error
        if "result" in answer:
            return answer["result"]
        if "error" in answer:
            raise self._failed(do, str(answer["error"]))
        raise self._failed(do, f"the measuring process: {answer['lost']}")

    def _exchange(self, do: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if self._lost:
            raise self._failed(do, self._lost)
        if self._owed:
            try:
                self._receive(self._answer_s)  # This is the late reply to an earlier request; it is discarded.
            except TimeoutError as error:
                raise self._failed(do, f"the rank has not answered {self._owed} yet") from error
        self._asked += 1
        self._owed = do
        request = {"request": self._asked, "do": do, "with": arguments, "limit_s": self._step_s}
        self._lines.send(request, limit_s=self._answer_s)
        return self._receive(self._step_s + self._answer_s)

    def _receive(self, limit_s: float) -> dict[str, Any]:
        """Return the reply to the last request."""
        answer = self._lines.receive(limit_s=limit_s)
        number = answer.get("answer")
        if type(number) is not int or number != self._asked:
            message = f"it answered request {number!r} when it was asked request {self._asked}"
            raise UsageError(message, reason=Reason.MALFORMED)
        if len(_ANSWERS & answer.keys()) != 1:
            message = f"its answer has {', '.join(sorted(answer))}"
            raise UsageError(message, reason=Reason.MALFORMED)
        self._owed = ""
        return answer

    def _failed(self, do: str, why: str) -> StepFailed:
        return StepFailed(f"{do} on rank {self.about.rank} ({self.about.host.partition(' ')[0]}): {why}")
