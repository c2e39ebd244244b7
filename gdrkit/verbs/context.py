"""An open RDMA device, which owns everything that is made from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdrkit.errors import ClosedResource, UsageError
from gdrkit.handles import Closeable, Handle, ReleaseStack
from gdrkit.verbs import _pyverbs
from gdrkit.verbs.ports import choose_gid, query_ports

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NicContext"]


class NicContext(Closeable):
    """An open RDMA device with one port and one protection domain; the base of :class:`~gdrkit.verbs.Nic`.

    Regions, completion queues and queue pairs belong to the device. :meth:`close` closes those that are still open, in
    the reverse order of their creation. A queue pair is created after its completion queues, so it is closed before
    them.

    Attributes
    ----------
    name : str
        Name of the device.
    port : PortInfo
        The state of the port when the device was opened.
    gid_index : int
        Index of the used GID in the port's GID table.
    gid : str
        The used GID.
    """

    def __init__(self, name: str, *, port: int, gid_index: int | None) -> None:
        """Open the device. Callers use :meth:`Nic.open` instead."""
        self.name = name
        self._release_actions = ReleaseStack()
        self._is_closed = False
        try:
            self._context = _pyverbs.open_device(name)
            self._release_actions.push(lambda: _pyverbs.close("ibv_close_device", self._context))
            ports = query_ports(self._context)
            if not 1 <= port <= len(ports):
                message = f"port must be between 1 and {len(ports)} for {name}, not {port}"
                raise UsageError(message)  # noqa: TRY301 - the except clause closes the device.
            self.port = ports[port - 1]
            self.gid_index, self.gid = choose_gid(self._context, ports, self.port, gid_index)
            self._domain = _pyverbs.allocate_domain(self._context)
            self._release_actions.push(lambda: _pyverbs.close("ibv_dealloc_pd", self._domain))
        except BaseException as error:
            self._release_actions.run_after(error)
            raise
        self._handle = Handle("verbs.nic")  # The handle counts this NIC as an open object, for leak checks.

    @property
    def closed(self) -> bool:
        """Whether the device was closed."""
        return self._is_closed

    @property
    def context(self) -> object:
        """The ``Context`` object of pyverbs."""
        self._check_open()
        return self._context

    @property
    def domain(self) -> object:
        """The ``PD`` object of pyverbs."""
        self._check_open()
        return self._domain

    def on_close(self, close: Callable[[], None]) -> Callable[[], None]:
        """Register `close`, which runs before the device is closed. Return a function that removes it again."""
        self._check_open()
        return self._release_actions.push(close)

    def close(self) -> None:
        """Close everything that was made from the device, then the protection domain and the device.

        After a close that succeeded, another close does nothing.

        Raises
        ------
        ApiError
            Some objects could not be closed. The error of the first one is raised, with the other errors as notes. The
            caller may call this method again, to close these objects.
        """
        if self._is_closed:
            return
        self._release_actions.run()
        self._is_closed = True
        self._handle.release()

    def _check_open(self) -> None:
        if self._is_closed:
            resource = f"RDMA device {self.name}"
            raise ClosedResource(resource)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}{', closed' if self._is_closed else f', gid={self.gid}'})"
