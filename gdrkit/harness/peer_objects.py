"""The table of the objects that a peer process has created for a test case."""

from __future__ import annotations

from typing import Any

from gdrkit.errors import GdrkitError, UsageError

__all__ = ["ObjectTable"]


class ObjectTable:
    """The objects of a peer process. Requests identify an object by its handle number."""

    def __init__(self) -> None:
        self._objects_by_number: dict[int, Any] = {}
        self._next_number = 1

    def add(self, peer_object: object) -> int:
        """Add an object and return its handle number. Numbers are not reused."""
        number, self._next_number = self._next_number, self._next_number + 1
        self._objects_by_number[number] = peer_object
        return number

    def get(self, number: int, object_type: type) -> Any:  # noqa: ANN401 - the result has the type `object_type`.
        """Return the object with the handle number `number`, which must have the type `object_type`.

        Raises
        ------
        UsageError
            No object has this number, or the object is of another type.
        """
        peer_object = self._objects_by_number.get(number)
        if number not in self._objects_by_number or not isinstance(peer_object, object_type):
            message = f"handle {number} is not an open {object_type.__name__}"
            raise UsageError(message)
        return peer_object

    def close(self, number: int) -> None:
        """Close an object and remove it from the table."""
        self.get(number, object).close()
        self._objects_by_number.pop(number)

    def close_all(self) -> None:
        """Close all objects in the reverse order of their creation.

        If an object cannot be closed, the other objects are closed nevertheless. The first error is raised at the end,
        with the texts of later errors as notes.
        """
        first_error: GdrkitError | None = None
        for number in sorted(self._objects_by_number, reverse=True):
            try:
                self._objects_by_number.pop(number).close()
            except GdrkitError as error:
                if first_error is None:
                    first_error = error
                else:
                    first_error.add_note(f"a later close also failed: {error}")
        if first_error is not None:
            raise first_error
