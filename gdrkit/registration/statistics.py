"""Statistics of a region cache, which :meth:`RegionCache.statistics` returns."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CacheStatistics"]


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """A snapshot of the counters of a cache.

    Attributes
    ----------
    hits, misses : int
        Number of calls of :meth:`RegionCache.lease` that found a valid entry, and number of calls that did not. A call
        that waits for the registration of another thread is a miss.
    registrations : int
        Number of allocations that were registered.
    evictions : int
        Number of entries that were removed because of the limits of the cache.
    invalidations : int
        Number of entries that were removed because they were invalidated, because their memory was freed, or because a
        lookup found that the address belongs to a newer allocation (CUDA reports another buffer id).
    regions : int
        Number of entries that a lookup can find.
    registered_bytes : int
        Size of all registered memory in bytes. It includes entries that were removed and are still leased or could not
        be deregistered.
    leases : int
        Number of open leases.
    in_flight : int
        Number of pending registrations.
    waiting : int
        Number of threads that wait for a pending registration.
    not_deregistered : int
        Number of removed entries that libibverbs failed to deregister. :meth:`RegionCache.close` tries again.
    """

    hits: int
    misses: int
    registrations: int
    evictions: int
    invalidations: int
    regions: int
    registered_bytes: int
    leases: int
    in_flight: int
    waiting: int
    not_deregistered: int
