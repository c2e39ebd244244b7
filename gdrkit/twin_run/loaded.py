"""Search for the processes of a run that have mapped a real library of an API instead of its twin.

A twin is a library that emulates the hardware. The dynamic loader opens a twin in place of a real library only if the
process has the environment of ``gdrkit run`` (LD_AUDIT). So a program that clears the environment, has the set-user-ID
bit, or has a C library other than glibc opens the real libraries.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gdrkit import launch
from gdrkit.host import HostTree, descendants

if TYPE_CHECKING:
    from gdrkit.errors import Api

__all__ = ["LoadedLibraries", "RealLibrary"]

# A line of /proc/PID/maps about an executable mapping of a shared library. The group is the path of the library.
_EXECUTABLE_MAPPING = re.compile(r"^\S+ ..x. \S+ \S+ \S+\s+(/.*\.so.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, order=True)
class RealLibrary:
    """A real library that a process has mapped although the run has a twin of its API."""

    api: str
    path: str
    program: str
    process_id: int


@dataclass(slots=True)
class LoadedLibraries:
    """The real libraries that processes of a run have mapped although the run has a twin of the API.

    Parameters
    ----------
    twin_apis : frozenset of Api
        The APIs that the run has twins of.
    usage_file : str
        Path of the usage file. Each process of the run has this path in its environment, and is found by it.
    """

    twin_apis: frozenset[Api]
    usage_file: str
    real_libraries: set[RealLibrary] = field(default_factory=set)
    _api_by_path: dict[str, Api | None] = field(default_factory=dict)
    _tree: HostTree = field(default_factory=HostTree)

    def observe(self, command_process_id: int) -> None:
        """Examine the command with this process ID, its descendants, and all other processes of the run."""
        marker = f"{launch.USAGE_VARIABLE}={self.usage_file}".encode()
        for process_id, program in descendants(self._tree, command_process_id, marker=marker).items():
            self._observe_process(process_id, program)

    def _observe_process(self, process_id: int, program: str) -> None:
        maps_text = self._tree.text(f"/proc/{process_id}/maps") or ""
        for path in dict.fromkeys(_EXECUTABLE_MAPPING.findall(maps_text)):
            api = self._find_replaced_api(path)
            if api is not None:
                self.real_libraries.add(RealLibrary(api.value, path, program, process_id))

    def _find_replaced_api(self, path: str) -> Api | None:
        """Return the API whose twin should have been loaded instead of this library, or None."""
        if path not in self._api_by_path:
            api = launch.api_of_library(path)
            is_real = api in self.twin_apis and not launch.is_twin(path)
            self._api_by_path[path] = api if is_real else None
        return self._api_by_path[path]
