"""The table of the objects that a peer process has created for its case."""

from __future__ import annotations

from typing import Any

from gdrkit.errors import GdrkitError, UsageError

__all__ = ["ObjectTable"]


class ObjectTable:
    """The objects that this peer process has created for its case, by handle number."""

    def __init__(self) -> None:
        self._created: dict[int, Any] = {}
        self._next = 1

    def add(self, created: object) -> int:
        """Keep an object and return its number, which is never used again."""
        number, self._next = self._next, self._next + 1
        self._created[number] = created
        return number

    def get(self, number: int, kind: type) -> Any:  # noqa: ANN401 - the result has the type `kind`.
        """Return the object of this number.

        Raises
        ------
        UsageError
            No object has this number, or it has another type.
        """
        created = self._created.get(number)
        if number not in self._created or not isinstance(created, kind):
            message = f"handle {number} is not an open {kind.__name__}"
            raise UsageError(message)
        return created

    def close(self, number: int) -> None:
        """Close one object."""
        self.get(number, object).close()
        self._created.pop(number)

    def close_all(self) -> None:
        """Close all objects, last created first.

        The first error is raised after all were closed. The other errors are added to it as notes.
        """
        first: GdrkitError | None = None
        for number in sorted(self._created, reverse=True):
            try:
                self._created.pop(number).close()
            except GdrkitError as error:
                if first is None:
                    first = error
                else:
                    first.add_note(f"then also: {error}")
        if first is not None:
            raise first
