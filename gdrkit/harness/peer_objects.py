"""The table of the objects that a peer process has created for its case."""

from __future__ import annotations

from typing import Any

from gdrkit.errors import GdrkitError, UsageError

__all__ = ["ObjectTable"]


class ObjectTable:
    """Objects by handle number."""

    def __init__(self) -> None:
        self._created: dict[int, Any] = {}
        self._next = 1

    def add(self, created: object) -> int:
        """Add an object and return its handle number. Numbers are not reused."""
        number, self._next = self._next, self._next + 1
        self._created[number] = created
        return number

    def get(self, number: int, object_type: type) -> Any:  # noqa: ANN401 - the result has the type `object_type`.
        """Return the object with a handle number.

        Raises
        ------
        UsageError
            No object has this number, or it is of another type.
        """
        created = self._created.get(number)
        if number not in self._created or not isinstance(created, object_type):
            message = f"handle {number} is not an open {object_type.__name__}"
            raise UsageError(message)
        return created

    def close(self, number: int) -> None:
        """Close an object and remove it from the table."""
        self.get(number, object).close()
        self._created.pop(number)

    def close_all(self) -> None:
        """Close all objects in the reverse order of their creation.

        The first error is raised after all objects were closed. Further errors are added to it as notes.
        """
        first: GdrkitError | None = None
        for number in sorted(self._created, reverse=True):
            try:
                self._created.pop(number).close()
            except GdrkitError as error:
                if first is None:
                    first = error
                else:
                    first.add_note(f"a later close also failed: {error}")
        if first is not None:
            raise first
