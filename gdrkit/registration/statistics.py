"""What a region cache has counted.

Level 3, pure.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CacheStatistics"]


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """A cache at one moment.

    Attributes
    ----------
    hits, misses : int
        Lookups that found a valid entry, and those that did not. A lookup that waits for the registration of another
        thread is a miss.
    registrations : int
        How often memory was registered.
    evictions : int
        Entries taken out for the limits.
    invalidations : int
        Entries taken out because they were invalidated, because their memory was freed or because a lookup saw another
        buffer id.
    regions : int
        Entries that a lookup may find.
    registered_bytes : int
        What is registered now, also what is out of the cache and still leased, or could not be deregistered.
    leases : int
        Leases that were not closed.
    in_flight : int
        Registrations under way.
    waiting : int
        Threads that wait for one of those.
    not_deregistered : int
        Entries that are out of the cache and that libibverbs refused to deregister; :meth:`RegionCache.close` tries
        again.
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
