# ruff: noqa: ANN401, SLF001 - this file replaces private functions of gdrkit, which have no types here.
"""Defects that can be put back into memory registration, the region cache and `GdrManager`, one function each.

The hook site/sitecustomize.py calls each function with the imported module of gdrkit. docs/findings.md shows the
docstrings of the functions.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "accept_one_nic",
    "accept_unregistrable_gpu",
    "check_first_chunk_only",
    "deregister_leased",
    "evict_leased",
    "evict_most_recent",
    "free_before_deregistration",
    "identify_by_address",
    "ignore_frees",
    "leave_device_current",
    "never_deregister",
    "register_null_pointer",
    "return_no_cache",
    "return_no_nics",
]


def return_no_cache(manager_module: Any) -> None:
    """`GdrManager.cache` returns None instead of an error if there is no cache"""
    original_function = manager_module.GdrManager.cache
    manager_module.GdrManager.cache = lambda self, gpu_index: (
        original_function(self, gpu_index) if self.state.available else None
    )


def accept_unregistrable_gpu(manager_module: Any) -> None:
    """`GdrManager` starts with a GPU whose memory no NIC can register"""
    original_function = manager_module.GdrManager._probe

    def _probe(self: Any, device: Any, *, should_test: bool) -> Any:
        state = original_function(self, device, should_test=should_test)
        if not should_test:
            return state
        self._devices[device.index] = device
        route = manager_module.RegistrationRoute.DMABUF
        return manager_module.GpuState(
            index=state.index, uuid=state.uuid, pci_bus_id=state.pci_bus_id, route=route, obstacle=None
        )

    manager_module.GdrManager._probe = _probe


def return_no_nics(manager_module: Any) -> None:
    """an unavailable manager returns an empty list of NICs instead of an error"""
    manager_module.GdrManager.nics = property(lambda self: self._nics if self.state.available else ())


def register_null_pointer(policy_module: Any) -> None:
    """the fallback to peer memory does not check the pointer"""
    from gdrkit.verbs import _pyverbs
    from gdrkit.verbs.region import Region

    def _register_by_address(registration: Any, nics: Any, access: Any) -> None:
        memory = registration.memory
        for nic in nics:
            region = _pyverbs.register_address(
                nic.domain, address=memory.address, length_bytes=memory.length_bytes, access=int(access), is_device=True
            )
            registration._add_region(
                nic, Region(nic, region, length_bytes=memory.length_bytes, memory=None, buffer_export=None)
            )

    policy_module._REGISTER_FUNCTION_BY_ROUTE[policy_module.RegistrationRoute.PEER_MEMORY] = _register_by_address


def accept_one_nic(policy_module: Any) -> None:
    """a registration with one NIC counts as success"""
    from gdrkit.errors import ApiError, Unsupported

    def _register_by_dmabuf(registration: Any, nics: Any, access: Any) -> None:
        dmabuf_errors = [nic.dmabuf_error() for nic in nics]
        if all(dmabuf_errors):
            raise dmabuf_errors[0]
        dmabuf = registration.memory.export_dmabuf()
        registration._add_dmabuf(dmabuf)
        for nic in nics:
            try:
                registration._add_region(nic, nic.register_dmabuf(dmabuf, access=access))
            except Unsupported:
                raise
            except ApiError:
                if not registration.nics:
                    raise

    policy_module._REGISTER_FUNCTION_BY_ROUTE[policy_module.RegistrationRoute.DMABUF] = _register_by_dmabuf


def free_before_deregistration(memory_module: Any) -> None:
    """`CudaMemory.close` frees the memory and then deregisters it"""

    def close(self: Any) -> None:
        if self._is_closed:
            return
        with self.current():
            self._release()
        self._release_actions.run()
        self._is_closed = True
        if self._remove_from_owner is not None:
            self._remove_from_owner()
        self._handle.release()

    memory_module.CudaMemory.close = close


def ignore_frees(cache_module: Any) -> None:
    """the cache is not notified of a free"""

    def _watch(self: Any, memory: Any) -> None:
        # A lookup requires its memory to be listed here. This entry does nothing when the memory is freed.
        self._watched_memories.setdefault(memory, lambda: None)

    cache_module.RegionCache._watch = _watch


def deregister_leased(cache_module: Any) -> None:
    """`invalidate` also deregisters regions with open leases"""

    def invalidate(self: Any, address: int, *, length_bytes: int) -> int:
        with self._lock:
            entries = self._index.find_overlapping(address, address + length_bytes)
            invalidated_count = self._unlink_range(address, address + length_bytes)
        for entry in entries:
            entry.registration.close()
        return int(invalidated_count)

    cache_module.RegionCache.invalidate = invalidate


def never_deregister(cache_module: Any) -> None:
    """a region that is invalidated while in use leaves the cache and is never deregistered"""
    original_function = cache_module.RegionCache._clean_up_after_lease

    def _clean_up_after_lease(self: Any, entry: Any) -> None:
        if entry.is_linked or entry.lease_count:
            original_function(self, entry)
            return
        with self._lock:
            self._pending_deregistrations.entries.discard(entry)

    cache_module.RegionCache._clean_up_after_lease = _clean_up_after_lease


def evict_most_recent(entries_module: Any) -> None:
    """the cache evicts the most recently used region"""
    original_function = entries_module.EntryIndex.select_evictions

    def select_evictions(self: Any) -> Any:
        for entry in reversed(tuple(self.by_last_use)):
            self.by_last_use.move_to_end(entry)
        return original_function(self)

    entries_module.EntryIndex.select_evictions = select_evictions


def evict_leased(cache_module: Any) -> None:
    """the cache evicts regions that are in use"""

    def _evict(self: Any) -> None:
        while self._index.is_over_limit:
            self._unlink(next(iter(self._index.by_last_use)))
            self._eviction_count += 1
        self._is_over_limit = False

    cache_module.RegionCache._evict = _evict


def identify_by_address(pointer_module: Any) -> None:
    """a lookup identifies memory by its address and does not query the buffer id"""
    # The allocation key has one buffer id for each chunk of VMM (virtual memory management) memory, and only one for an
    # ordinary allocation. This defect affects only memory with one buffer id.
    original_function = pointer_module.make_existence_check
    pointer_module.make_existence_check = lambda allocation_key: (
        (lambda: True) if len(allocation_key) == 1 else original_function(allocation_key)
    )


def check_first_chunk_only(pointer_module: Any) -> None:
    """a lookup queries the buffer id of the first chunk only"""
    original_function = pointer_module.make_existence_check
    pointer_module.make_existence_check = lambda allocation_key: original_function(allocation_key[:1])


def leave_device_current(driver_module: Any) -> None:
    """a call changes the current device and does not restore it"""
    import contextlib

    @contextlib.contextmanager
    def push_context(handle: int) -> Any:
        driver_module.call("cuCtxPushCurrent", ctx=handle)
        yield

    driver_module.push_context = push_context
