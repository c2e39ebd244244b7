"""The result of an experiment on a machine (:mod:`gdrkit.inventory.experiments`), or of reading its processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from gdrkit.inventory.facts import ApiFailure  # noqa: TC001 - types of fields are read at run time.

__all__ = ["DESCRIPTOR_0", "Observation"]

# Name of the step that an experiment adds if it has closed or replaced descriptor 0 of its process.
DESCRIPTOR_0 = "descriptor 0"


@dataclass(frozen=True, slots=True)
class Observation:
    """The result of one experiment, or the reason why there is none. The processes that use a GPU have this form, too.

    Attributes
    ----------
    name : str
        Name of the experiment, or ``gpu_processes``.
    seen : mapping
        For each step of the experiment, or for each process, a text that says what was observed.
    failure : ApiFailure or None
        The call that failed. Its reason is ``timeout`` if the child process did not end in time.
    """

    name: str
    seen: dict[str, str] = field(default_factory=dict)
    failure: ApiFailure | None = None
