"""The metrics of this machine and of a cache of this process, as Prometheus reads them."""

from __future__ import annotations

import urllib.request

from gdrkit import cuda, gds, monitor, verbs
from gdrkit.registration import RegionCache

nics = verbs.open_active_nics()
for metric in monitor.machine_metrics():
    print(metric.name, metric.help, len(metric.values))
with (
    cuda.Device(0) as device,
    RegionCache(nics) as cache,
    monitor.watch("cache", cache.statistics, name="example"),
    monitor.serve_metrics("127.0.0.1", 0) as server,
):
    with device.allocate(1 << 20) as memory, cache.lease(memory):
        metrics_text = urllib.request.urlopen(server.address).read().decode()  # noqa: S310 - the address of this server.
    assert 'gdrkit_cache_registered_bytes{name="example"}' in metrics_text
    assert {metric.name for metric in monitor.process_metrics()} >= {"gdrkit_cache_hits", "gdrkit_transferred_bytes"}
print(gds.transfer_totals())
for nic in nics:
    nic.close()
