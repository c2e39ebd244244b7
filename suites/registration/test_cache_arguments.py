"""Arguments of a region cache, and a signal that interrupts a thread during its wait for a registration."""

from __future__ import annotations

import signal
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from support.faults import faults
from support.reach import registering

from gdrkit.errors import Api, UsageError
from gdrkit.harness.needs import needs, software, verbs
from gdrkit.host import HostAllocator
from gdrkit.registration import RegionCache, RegistrationRoute, register
from gdrkit.units import KIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from support.reach import Space

    from gdrkit.verbs import Nic


class Stopped(BaseException):
    """The exception that the signal handler of a case raises, like KeyboardInterrupt of Python's own handler."""


@pytest.fixture
def _own_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@needs(verbs.nic())
def test_cache_uses_only_the_given_route(nic: Nic) -> None:
    wrong = RegistrationRoute.PEER_MEMORY
    with HostAllocator().allocate(64 * KIB) as memory, RegionCache([nic], route=wrong) as cache:
        with pytest.raises(UsageError):
            cache.lease(memory)
        assert cache.statistics().in_flight == 0


@needs(verbs.nic())
@pytest.mark.parametrize("limits", [{"regions_max": 0}, {"bytes_max": 0}, {"regions_max": -1}, {"bytes_max": -1}])
def test_cache_with_a_zero_limit_is_refused(nic: Nic, limits: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        RegionCache([nic], regions_max=limits.get("regions_max", 1), bytes_max=limits.get("bytes_max", 1))


def test_cache_of_one_region_is_accepted(space: Space, nic: Nic) -> None:
    with space.allocate(64 * KIB) as memory, RegionCache([nic], regions_max=1, bytes_max=1) as cache:
        cache.lease(memory).close()


def test_route_values_are_those_of_records() -> None:
    assert [route.value for route in RegistrationRoute] == ["dmabuf", "peer_memory", "host"]


def test_representation_names_the_nics_and_the_state(space: Space, nic: Nic) -> None:
    with space.allocate(64 * KIB) as memory:
        with register(memory, [nic]) as registration:
            assert repr(registration) == f"Registration({registration.route.value}, {nic.name})"
        assert repr(registration) == f"Registration({registration.route.value}, {nic.name}, closed)"
        with RegionCache([nic]) as cache:
            cache.lease(memory).close()
            assert repr(cache) == f"RegionCache({nic.name}, 1 regions)"
        assert repr(cache) == f"RegionCache({nic.name}, closed)"


@needs(software(Api.VERBS))
@pytest.mark.usefixtures("_own_handler")
@pytest.mark.parametrize("after", [False, True], ids=["while it is registered", "once it is registered"])
def test_interrupted_waiter_keeps_no_lease(space: Space, nic: Nic, *, after: bool) -> None:
    assert nic.supports_dmabuf()
    with space.allocate(64 * KIB) as memory, RegionCache([nic]) as cache:
        main = threading.get_ident()

        def stop(_number: int, _frame: FrameType | None) -> None:
            while after and owner.is_alive() and cache.statistics().in_flight:
                pass
            raise Stopped

        def stop_the_waiter() -> None:
            # The signal must arrive during the wait. Before it, there would be nothing to undo.
            while not (cache.statistics().waiting and sys._current_frames()[main].f_code.co_name == "wait"):  # noqa: SLF001
                assert owner.is_alive()
            signal.pthread_kill(main, signal.SIGUSR1)

        signal.signal(signal.SIGUSR1, stop)
        owner = threading.Thread(target=lambda: cache.lease(memory).close())
        stopper = threading.Thread(target=stop_the_waiter)
        with faults(Api.VERBS, f"{registering(space)} call=1 delay_us=1000000"):
            owner.start()
            while not cache.statistics().in_flight:
                assert owner.is_alive()
            stopper.start()
            with pytest.raises(Stopped):
                cache.lease(memory)
            owner.join(30)
            stopper.join(30)
        statistics = cache.statistics()
        assert (statistics.leases, statistics.waiting, statistics.in_flight) == (0, 0, 0)
        cache.lease(memory).close()
