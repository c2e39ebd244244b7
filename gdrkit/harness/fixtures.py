"""The pytest fixtures of the harness: facts, NICs, devices, peer processes, seed and evidence.

After the case and before the leak check, a fixture closes the objects that it has opened.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import UsageError
from gdrkit.harness.case import CASE_KEY, Case
from gdrkit.harness.peer import Peer
from gdrkit.harness.session import SESSION_KEY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gdrkit.cuda import Device
    from gdrkit.gaudi import Device as Gaudi
    from gdrkit.harness.evidence import Evidence
    from gdrkit.inventory import Facts
    from gdrkit.verbs import Nic

__all__ = [
    "PEER_POOL_KEY",
    "PeerPool",
    "device",
    "devices",
    "evidence",
    "facts",
    "gaudi",
    "nic",
    "nics",
    "peer",
    "peers",
    "seed",
]


class PeerPool:
    """A pool of peer processes. Each peer serves one case after another, and closes its objects after each case.

    Peers are reused, because the start of a peer takes long: it starts an interpreter and imports pyverbs.
    """

    def __init__(self) -> None:
        self._idle_peers: list[Peer] = []
        self._used_peers: list[Peer] = []
        self._started_count = 0

    def start_idle_peer(self) -> None:
        """Start one peer for a later :meth:`acquire`, and do not wait until it is ready."""
        self._idle_peers.append(self._start_peer())

    def acquire(self) -> Peer:
        """Return an idle peer, or a new one."""
        while self._idle_peers:
            peer = self._idle_peers.pop()
            if peer.alive:
                self._used_peers.append(peer)
                return peer
            peer.close()
        peer = self._start_peer()
        self._used_peers.append(peer)
        return peer

    def release(self, peer: Peer, case: Case) -> None:
        """Make the peer close the objects of the case, and put the peer back into the pool unless it has ended.

        Raises
        ------
        GdrkitError
            The peer could not close an object, or still has an open object.
        """
        self._used_peers.remove(peer)
        if not peer.alive:
            peer.close()
            return
        try:
            case.peer_libraries.append((peer.name, peer.reset()))
        except BaseException:
            peer.close()
            raise
        self._idle_peers.append(peer)

    def descriptors(self) -> frozenset[int]:
        """Return the descriptors of this process through which it communicates with the peers."""
        return frozenset().union(*(peer.descriptors() for peer in (*self._idle_peers, *self._used_peers)))

    def close(self) -> None:
        """End all peers."""
        for peer in (*self._idle_peers, *self._used_peers):
            peer.close()
        self._idle_peers, self._used_peers = [], []

    def _start_peer(self) -> Peer:
        name = f"peer{self._started_count}"
        self._started_count += 1
        return Peer(name)


# Key of the pool in the stash of the pytest configuration.
PEER_POOL_KEY: pytest.StashKey[PeerPool] = pytest.StashKey()


@pytest.fixture(scope="session")
def facts(request: pytest.FixtureRequest) -> Facts:
    """The facts about this machine."""
    return request.config.stash[SESSION_KEY].facts


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this case. Each case has its own seed, which depends only on the id of the case and on ``--seed``."""
    return request.config.stash[SESSION_KEY].case_seed(request.node.nodeid)


@pytest.fixture
def evidence(request: pytest.FixtureRequest) -> Evidence:
    """The evidence that the case records."""
    return _find_case(request).evidence


@pytest.fixture
def nic(request: pytest.FixtureRequest) -> Iterator[Nic]:
    """The first NIC with an active port, opened."""
    with _open_nics(request, count_max=1) as opened_nics:
        yield opened_nics[0]


@pytest.fixture
def nics(request: pytest.FixtureRequest) -> Iterator[tuple[Nic, ...]]:
    """All NICs with an active port, opened."""
    with _open_nics(request, count_max=None) as opened_nics:
        yield opened_nics


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """The first CUDA device."""
    _require_need(request, "cuda")
    from gdrkit import cuda

    with cuda.Device(0) as opened_device:
        yield opened_device


@pytest.fixture
def devices(request: pytest.FixtureRequest) -> Iterator[tuple[Device, ...]]:
    """All CUDA devices."""
    _require_need(request, "cuda")
    from gdrkit import cuda

    with contextlib.ExitStack() as stack:
        yield tuple(stack.enter_context(cuda.Device(index)) for index in range(cuda.device_count()))


@pytest.fixture
def gaudi(request: pytest.FixtureRequest) -> Iterator[Gaudi]:
    """The first Gaudi device, opened."""
    _require_need(request, "gaudi")
    from gdrkit.gaudi import Device

    with Device(0) as opened_device:
        yield opened_device


@pytest.fixture
def peers(request: pytest.FixtureRequest) -> Iterator[Callable[[], Peer]]:
    """A function that returns a further peer process at each call."""
    pool, case = request.config.stash[PEER_POOL_KEY], _find_case(request)
    acquired_peers: list[Peer] = []

    def acquire() -> Peer:
        acquired_peers.append(pool.acquire())
        return acquired_peers[-1]

    yield acquire
    with contextlib.ExitStack() as stack:
        for peer in acquired_peers:
            stack.callback(pool.release, peer, case)


@pytest.fixture
def peer(peers: Callable[[], Peer]) -> Peer:
    """A peer process."""
    return peers()


@contextlib.contextmanager
def _open_nics(request: pytest.FixtureRequest, *, count_max: int | None) -> Iterator[tuple[Nic, ...]]:
    _require_need(request, "verbs")
    from gdrkit import verbs

    case = _find_case(request)
    with contextlib.ExitStack() as stack:
        nics = verbs.open_active_nics(count_max=count_max)
        for nic in nics:
            stack.enter_context(nic)
            case.nic_names.append(nic.name)
        yield nics


def _require_need(request: pytest.FixtureRequest, api: str) -> None:
    """Raise :class:`~gdrkit.errors.UsageError` unless the case declares a need of `api`, such as ``cuda.device``."""
    if not any(need.name.startswith(f"{api}.") for need in _find_case(request).needs):
        message = f"{request.node.nodeid} uses the fixture {request.fixturename} and declares no need of {api}"
        raise UsageError(message, what_to_do=f"add @needs({api}.{'nic' if api == 'verbs' else 'device'}()) to the case")


def _find_case(request: pytest.FixtureRequest) -> Case:
    case: Case = request.node.stash[CASE_KEY]
    return case
