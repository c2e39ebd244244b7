"""Arguments of a region cache, and a signal that interrupts a thread during its wait for a registration."""

from __future__ import annotations

import signal
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from support.faults import inject_faults
from support.memory_kinds import find_registration_function

from gdrkit.errors import Api, UsageError
from gdrkit.harness.needs import needs, software, verbs
from gdrkit.host import HostAllocator
from gdrkit.registration import RegionCache, RegistrationRoute, register
from gdrkit.units import KIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import FrameType

    from support.memory_kinds import AnyAllocator

    from gdrkit.verbs import Nic


class SignalReceived(BaseException):
    """The exception that the signal handler of a case raises, like KeyboardInterrupt for SIGINT."""


@pytest.fixture
def _restore_signal_handler() -> Iterator[None]:
    handler_before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, handler_before)


@needs(verbs.nic())
def test_cache_uses_only_the_given_route(nic: Nic) -> None:
    wrong_route = RegistrationRoute.PEER_MEMORY
    with HostAllocator().allocate(64 * KIB) as memory, RegionCache([nic], route=wrong_route) as cache:
        with pytest.raises(UsageError):
            cache.lease(memory)
        assert cache.statistics().in_flight == 0


@needs(verbs.nic())
@pytest.mark.parametrize("limits", [{"regions_max": 0}, {"bytes_max": 0}, {"regions_max": -1}, {"bytes_max": -1}])
def test_cache_with_a_zero_limit_is_refused(nic: Nic, limits: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        RegionCache([nic], regions_max=limits.get("regions_max", 1), bytes_max=limits.get("bytes_max", 1))


def test_cache_of_one_region_is_accepted(allocator: AnyAllocator, nic: Nic) -> None:
    with allocator.allocate(64 * KIB) as memory, RegionCache([nic], regions_max=1, bytes_max=1) as cache:
        cache.lease(memory).close()


def test_route_values_are_those_of_records() -> None:
    assert [route.value for route in RegistrationRoute] == ["dmabuf", "peer_memory", "host"]


def test_representation_names_the_nics_and_the_state(allocator: AnyAllocator, nic: Nic) -> None:
    with allocator.allocate(64 * KIB) as memory:
        with register(memory, [nic]) as registration:
            assert repr(registration) == f"Registration({registration.route.value}, {nic.name})"
        assert repr(registration) == f"Registration({registration.route.value}, {nic.name}, closed)"
        with RegionCache([nic]) as cache:
            cache.lease(memory).close()
            assert repr(cache) == f"RegionCache({nic.name}, 1 region)"
        assert repr(cache) == f"RegionCache({nic.name}, closed)"


@needs(software(Api.VERBS))
@pytest.mark.usefixtures("_restore_signal_handler")
@pytest.mark.parametrize("raises_after_registration", [False, True], ids=["during registration", "after registration"])
def test_interrupted_waiter_keeps_no_lease(
    allocator: AnyAllocator, nic: Nic, tmp_path: Path, *, raises_after_registration: bool
) -> None:
    """One thread registers. The main thread waits for this registration, until a third thread interrupts it."""
    # This call probes the NIC now, so the fault rule below counts only registrations.
    assert nic.supports_dmabuf()
    # The fault rule below holds the registration while this file exists.
    hold_file = tmp_path / "held"
    hold_file.touch()
    with allocator.allocate(64 * KIB) as memory, RegionCache([nic]) as cache:
        main_thread_id = threading.get_ident()

        def raise_in_the_waiter(_number: int, _frame: FrameType | None) -> None:
            # If `raises_after_registration` is true, the handler raises only after the registration is complete.
            if raises_after_registration:
                hold_file.unlink()
            while raises_after_registration and registering_thread.is_alive() and cache.statistics().in_flight:
                pass
            raise SignalReceived

        def interrupt_the_waiter() -> None:
            # The signal must arrive while the main thread is in Condition.wait(). A waiter that is interrupted earlier
            # has nothing to undo.
            while not (cache.statistics().waiting and sys._current_frames()[main_thread_id].f_code.co_name == "wait"):  # noqa: SLF001
                assert registering_thread.is_alive()
            signal.pthread_kill(main_thread_id, signal.SIGUSR1)

        signal.signal(signal.SIGUSR1, raise_in_the_waiter)
        registering_thread = threading.Thread(target=lambda: cache.lease(memory).close())
        interrupting_thread = threading.Thread(target=interrupt_the_waiter)
        with inject_faults(Api.VERBS, f"{find_registration_function(allocator)} call=1 hold={hold_file}"):
            registering_thread.start()
            while not cache.statistics().in_flight:
                assert registering_thread.is_alive()
            interrupting_thread.start()
            with pytest.raises(SignalReceived):
                cache.lease(memory)
            hold_file.unlink(missing_ok=True)
            registering_thread.join(30)
            interrupting_thread.join(30)
        statistics = cache.statistics()
        assert (statistics.leases, statistics.waiting, statistics.in_flight) == (0, 0, 0)
        cache.lease(memory).close()
