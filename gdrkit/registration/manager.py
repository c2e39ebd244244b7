"""Manager of the GPUs, NICs and region caches of one process.

The manager chooses the NIC for each transfer. It is *available* if direct transfers are possible on this machine: a NIC
has registered the memory of a GPU, and a page was moved in both directions without a wrong byte. The state of an
unavailable manager contains the reasons, and every use of the manager raises an error with these reasons as causes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from gdrkit import cuda, forks, verbs
from gdrkit.errors import Api, ApiError, ClosedResource, GdrkitError, Reason, RegistrationFailed, UsageError
from gdrkit.handles import Handle, ReleaseStack
from gdrkit.registration.cache import RegionCache
from gdrkit.registration.placement import Placement
from gdrkit.registration.policy import RegistrationRoute, register
from gdrkit.units import GIB, GPU_RDMA_PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from gdrkit.host import HostTree
    from gdrkit.registration.lease import Lease
    from gdrkit.registration.reach import Reach

__all__ = ["GdrManager", "GdrObstacle", "GdrState", "GpuState"]


@dataclass(frozen=True, slots=True)
class GdrObstacle:
    """A reason why direct transfers are impossible, for one GPU or for all. It has the fields of the error."""

    api: Api
    message: str
    reason: Reason
    errno: int | None
    what_to_do: str

    @classmethod
    def of(cls, error: GdrkitError) -> Self:
        """Return the obstacle that an error describes."""
        api, error_number = (error.api, error.errno) if isinstance(error, ApiError) else (Api.NONE, None)
        return cls(api=api, message=error.message, reason=error.reason, errno=error_number, what_to_do=error.what_to_do)


@dataclass(frozen=True, slots=True)
class GpuState:
    """The state of one GPU.

    Attributes
    ----------
    index, uuid, pci_bus_id
        Number, UUID and PCI address of the GPU.
    route : RegistrationRoute or None
        The method by which the memory of the GPU is registered. None: no NIC reaches the memory, or the GPU was not
        tested.
    obstacle : GdrObstacle or None
        The reason why no NIC reaches the memory of the GPU. None: a NIC reaches it, or the GPU was not tested.
    nics : tuple of str
        Names of the NICs that reach the memory: bytes were written and read through them. Only these NICs are used.
    reach : tuple of Reach
        The measurements of all NICs. The ``cause`` of a measurement says why its NIC is left out.
    """

    index: int
    uuid: str
    pci_bus_id: str
    route: RegistrationRoute | None
    obstacle: GdrObstacle | None
    nics: tuple[str, ...] = ()
    reach: tuple[Reach, ...] = ()


@dataclass(frozen=True, slots=True)
class GdrState:
    """The state that a manager found when it was opened.

    Attributes
    ----------
    nics : tuple of str
        Names of the active NICs. :attr:`GpuState.nics` has the NICs that reach a GPU.
    gpus : tuple of GpuState
        States of all requested GPUs.
    obstacles : tuple of GdrObstacle
        Reasons why no transfer is possible at all. It is empty if a transfer is possible.
    """

    nics: tuple[str, ...]
    gpus: tuple[GpuState, ...]
    obstacles: tuple[GdrObstacle, ...]

    @property
    def available(self) -> bool:
        """Whether a NIC reaches the memory of at least one GPU: a page was written and read without a wrong byte."""
        return not self.obstacles


class GdrManager:
    """The devices, NICs and caches by which peers can access GPU memory. Use it as a context manager.

    In a forked child the manager is closed and releases nothing: the devices, NICs and caches belong to the parent.

    Parameters
    ----------
    gpu_indices : sequence of int or None
        Numbers of the GPUs to use. With None, all GPUs that the driver lists.
    nic_names : sequence of str or None
        Names of the NICs to use. With None, all NICs with an active port.
    tree : HostTree or None
        The host whose sysfs describes the topology. With None, this host.
    placement : Placement or None
        The object that chooses the NICs. With None, a new :class:`Placement` of `tree`.
    regions_max, bytes_max : int
        Limits of the cache of each GPU; see :class:`RegionCache`.

    Attributes
    ----------
    state : GdrState
        Whether transfers are possible, or why not. The constructor does not raise if hardware or software is missing:
        the state has the reason.
    placement : Placement
        The object that chooses the NICs.

    Raises
    ------
    UsageError
        NO_DEVICE: one of `nic_names` is not the name of a NIC. BAD_ARGUMENT: a GPU is available,
        and a limit of its cache is not above 0.
    """

    def __init__(
        self,
        *,
        gpu_indices: Sequence[int] | None = None,
        nic_names: Sequence[str] | None = None,
        tree: HostTree | None = None,
        placement: Placement | None = None,
        regions_max: int = 1024,
        bytes_max: int = 1024 * GIB,
    ) -> None:
        self.placement = Placement(tree) if placement is None else placement
        self._close_stack = ReleaseStack()  # It closes the NICs, devices and caches in the reverse order of opening.
        self._nics: tuple[verbs.Nic, ...] = ()
        self._devices: dict[int, cuda.Device] = {}  # The available GPUs, by GPU number.
        # The lock is reentrant, because a signal handler may call cache() while its thread has the lock.
        self._caches_lock = threading.RLock()
        # The caches. A key has the number of the GPU and the NICs with which the cache registers. When a NIC fails or
        # works again, the GPU gets another cache.
        self._caches: dict[tuple[int, tuple[verbs.Nic, ...]], RegionCache] = {}
        self._failures: tuple[GdrkitError, ...] = ()  # The reasons why the manager is unavailable.
        self._failure_by_gpu: dict[int, GdrkitError] = {}  # By GPU number: the reason why the GPU is unavailable.
        self._is_closed = False
        self._regions_max, self._bytes_max = regions_max, bytes_max
        try:
            self.state = self._open_all(gpu_indices, nic_names)
            if not self.state.available:
                self._close_stack.run()
        except BaseException as error:
            self._close_stack.run_after(error)
            raise
        self._handle = Handle("registration.manager")
        forks.register(self)

    @property
    def closed(self) -> bool:
        """Whether the manager was closed."""
        return self._is_closed

    @property
    def nics(self) -> tuple[verbs.Nic, ...]:
        """The open NICs."""
        self._require_available()
        return self._nics

    def device(self, gpu_index: int) -> cuda.Device:
        """Return a GPU that is available.

        Raises
        ------
        RegistrationFailed
            This GPU, or the whole manager, is unavailable. ``causes`` has the reasons.
        UsageError
            NO_DEVICE: the manager has no GPU with this number.
        """
        self._require_available()
        if gpu_index not in self._devices:
            gpu_state = next((gpu for gpu in self.state.gpus if gpu.index == gpu_index), None)
            if gpu_state is None or gpu_state.obstacle is None:
                message = f"the manager has no GPU {gpu_index}; it has {[gpu.index for gpu in self.state.gpus]}"
                raise UsageError(message, reason=Reason.NO_DEVICE)
            raise _make_unavailable_error(
                (self._failure_by_gpu[gpu_index],), f"memory of GPU {gpu_index} cannot be registered"
            )
        return self._devices[gpu_index]

    def cache(self, gpu_index: int) -> RegionCache:
        """Return the cache that registers the memory of one GPU with the NICs that reach this GPU now.

        Raises
        ------
        RegistrationFailed
            See :meth:`device`. Another cause is that no NIC reaches the GPU any more.
        """
        device = self.device(gpu_index)
        nics = self.placement.usable_nics(device, self._nics)
        with self._caches_lock:
            cache = self._caches.get((gpu_index, nics))
            return self._make_cache(gpu_index, nics) if cache is None else cache

    def _make_cache(self, gpu_index: int, nics: tuple[verbs.Nic, ...]) -> RegionCache:
        cache = RegionCache(nics, regions_max=self._regions_max, bytes_max=self._bytes_max)
        existing_cache = self._caches.setdefault((gpu_index, nics), cache)
        if existing_cache is not cache:  # A signal handler has made this cache meanwhile.
            cache.close()
            return existing_cache
        self._close_stack.push(cache.close)
        return cache

    def lease(self, memory: cuda.CudaMemory, *, offset_bytes: int = 0, length_bytes: int | None = None) -> Lease:
        """Return a lease from the cache of the memory's GPU; see :meth:`RegionCache.lease`."""
        cache = self.cache(memory.device.index)
        return cache.lease(memory, offset_bytes=offset_bytes, length_bytes=length_bytes)

    def nearest_nic(self, gpu_index: int) -> verbs.Nic:
        """Return the NIC for the next transfer of this GPU. The nearest NICs that reach the GPU take turns."""
        return self._choose_nic(gpu_index, self.cache(gpu_index).nics)

    def _choose_nic(self, gpu_index: int, nics: tuple[verbs.Nic, ...]) -> verbs.Nic:
        return self.placement.choose(self.device(gpu_index).pci_bus_id, nics)

    def remote(
        self, lease: Lease, *, gpu_index: int, offset_bytes: int = 0, length_bytes: int | None = None
    ) -> tuple[verbs.Nic, verbs.RemoteRange]:
        """Return a NIC near to the GPU, and the address and key by which a peer accesses a part of the leased range.

        The address and the key are valid for a peer that connects to this NIC.
        """
        nic = self._choose_nic(gpu_index, lease.nics)
        return nic, lease.remote(nic, offset_bytes=offset_bytes, length_bytes=length_bytes)

    def close(self, *, timeout_ms: float | None = 0) -> None:
        """Close the caches, then the devices, then the NICs. A second close does nothing.

        Parameters
        ----------
        timeout_ms : float or None
            Longest wait for the leases of each cache, in milliseconds; see :meth:`RegionCache.close`.

        Raises
        ------
        UsageError
            BUSY: a lease of a cache is still open. The caches that were closed before this cache stay closed. NICs and
            devices stay open.
        """
        if self._is_closed:
            return
        for cache in list(self._caches.values()):
            cache.close(timeout_ms=timeout_ms)
        self._close_stack.run()
        self._is_closed = True
        self._handle.release()

    def after_fork_in_child(self) -> None:
        """Mark the manager as closed in a forked child: caches, NICs and devices belong to the parent."""
        self._close_stack = ReleaseStack()
        self._is_closed = True

    def _open_all(self, gpu_indices: Sequence[int] | None, nic_names: Sequence[str] | None) -> GdrState:
        """Open the NICs and the GPUs, find out which NICs reach which GPUs, and return the state."""
        failures: list[GdrkitError] = []
        try:
            self._nics = self._open_nics(nic_names)
        except ApiError as error:
            failures.append(error.clone())
        devices: list[cuda.Device] = []
        try:
            gpu_count = cuda.device_count()
            for index in range(gpu_count) if gpu_indices is None else gpu_indices:
                devices.append(cuda.Device(index))
                self._close_stack.push(devices[-1].close)
        except ApiError as error:
            failures.append(error.clone())
        if not failures and not self._nics:
            failures.append(UsageError("no NIC has an active port", reason=Reason.NO_DEVICE))
        gpu_states = tuple(self._probe(device, should_test=not failures) for device in devices)
        if not failures and not self._devices:
            failures.append(
                RegistrationFailed(
                    "no NIC reaches the memory of a GPU",
                    causes=tuple(self._failure_by_gpu.values()),
                    reason=Reason.NO_ROUTE,
                    what_to_do="remove one of the causes; each cause has its advice",
                )
            )
        self._failures = tuple(failures)
        obstacles = tuple(GdrObstacle.of(error) for error in failures)
        return GdrState(nics=tuple(nic.name for nic in self._nics), gpus=gpu_states, obstacles=obstacles)

    def _open_nics(self, nic_names: Sequence[str] | None) -> tuple[verbs.Nic, ...]:
        nics = verbs.open_active_nics(nic_names)
        for nic in nics:
            self._close_stack.push(nic.close)
        return nics

    def _probe(self, device: cuda.Device, *, should_test: bool) -> GpuState:
        """Find out which NICs reach the device's memory, and return the state of the GPU.

        If `should_test` is false, nothing is tested, and the GPU stays unused.
        """
        route: RegistrationRoute | None = None
        obstacle: GdrObstacle | None = None
        nic_names: tuple[str, ...] = ()
        reach_results: tuple[Reach, ...] = ()
        if should_test:
            try:
                reach_results = self.placement.reach.get_results(device, self._nics)
                nics = self.placement.usable_nics(device, self._nics)
                # A cache registers with all these NICs by one method, so test that this is possible.
                with device.allocate(GPU_RDMA_PAGE_BYTES) as memory, register(memory, nics) as registration:
                    route, nic_names = registration.route, tuple(nic.name for nic in nics)
            except (ApiError, RegistrationFailed) as error:
                obstacle = GdrObstacle.of(error)
                self._failure_by_gpu[device.index] = error.clone()
            else:
                self._devices[device.index] = device
                self._make_cache(device.index, nics)
        return GpuState(
            index=device.index,
            uuid=device.uuid,
            pci_bus_id=device.pci_bus_id,
            route=route,
            obstacle=obstacle,
            nics=nic_names,
            reach=reach_results,
        )

    def _require_available(self) -> None:
        if self._is_closed:
            resource = "GDR manager"
            raise ClosedResource(resource)
        if not self.state.available:
            raise _make_unavailable_error(self._failures, "direct transfers are not available on this machine")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "available" if self.state.available else "unavailable"
        return f"GdrManager({state}, gpus={[gpu.index for gpu in self.state.gpus]}, nics={list(self.state.nics)})"


def _make_unavailable_error(causes: tuple[GdrkitError, ...], message: str) -> RegistrationFailed:
    return RegistrationFailed(message, causes=causes, reason=causes[0].reason, what_to_do=causes[0].what_to_do)
