"""What acting on a machine showed.

Level 4.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gdrkit.inventory.facts import ApiFailure  # noqa: TC001 - types of fields are read at run time.

__all__ = ["Observation"]


@dataclass(frozen=True, slots=True)
class Observation:
    """The answer of one act, or why there is none.

    Attributes
    ----------
    name : str
        Of the act.
    seen : mapping
        What was observed, in words, by what was done.
    failure : ApiFailure or None
        The call that failed, or that the child that acted did not come back (reason ``timeout``).
    """

    name: str
    seen: dict[str, str] = field(default_factory=dict)
    failure: ApiFailure | None = None
