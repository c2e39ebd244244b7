"""A thread that removes the shared memory of a client from the agent when the memory's symbolic link was removed.

Each iov or ring that a client publishes has a symbolic link in ``<mount>/3fs-virt/iovs``. As with 3FS itself, a program
can end the publication by removing the link, without a message to the agent.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from typing import TYPE_CHECKING

from gdrkit.children import join_threads
from gdrkit.host import read_removed_names, watch_removed_names
from gdrkit.usrbio.agent.agent_error import AgentError

if TYPE_CHECKING:
    from gdrkit.usrbio.agent.client import Client
    from gdrkit.usrbio.agent.mount import LinkFolder
    from gdrkit.usrbio.agent.service import Service

__all__ = ["RemovedLinkWatcher"]

# Longest wait of close() for the thread. The thread may wait for operations in flight.
_END_TIMEOUT_S = 60.0
_LOG = logging.getLogger(__name__)


class RemovedLinkWatcher:
    """A thread that watches the folder of the symbolic links until :meth:`close`.

    Parameters
    ----------
    links : LinkFolder
        The folder of the links.
    service : Service
        The service of the agent. The thread ends publications of its clients.
    """

    def __init__(self, links: LinkFolder, service: Service) -> None:
        self._service = service
        self._watch_fd = watch_removed_names(links.fd)
        self._wake_reader, self._wake_writer = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._watch_links, name="agent-links", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread.

        Raises
        ------
        BrokenResource
            ``TIMEOUT``: the thread still removes a publication. The caller may call this method again.
        """
        os.write(self._wake_writer, b"x")  # Any byte wakes the thread.
        join_threads([self._thread], timeout_s=_END_TIMEOUT_S)
        for fd in (self._watch_fd, self._wake_reader, self._wake_writer):
            os.close(fd)

    def _watch_links(self) -> None:
        poller = select.poll()
        for fd in (self._watch_fd, self._wake_reader):
            poller.register(fd, select.POLLIN)
        while self._wake_reader not in {fd for fd, _ in poller.poll()}:
            # None: the kernel has dropped some names, so the links of all publications are checked.
            names = read_removed_names(self._watch_fd)
            for client in tuple(self._service.clients.values()):
                _end_unlinked_publications(client, client.published_names() if names is None else names)


def _end_unlinked_publications(client: Client, names: list[str]) -> None:
    """End the publications in `names` that belong to the client and whose links are removed."""
    for name in names:
        try:
            client.remove_if_unlinked(name)
        except AgentError as error:
            _LOG.warning("the link %s was removed, but its publication does not end: %s", name, error)
