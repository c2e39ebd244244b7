"""Measure which NICs reach which GPUs by moving bytes, and read the counters of the ports."""

from __future__ import annotations

from gdrkit import cuda, host, verbs
from gdrkit.registration import (
    ConnectedPair,
    ReachTable,
    measure_balance,
    measure_devices,
    measure_reach,
    register,
    unproven_reason,
)

tree = host.HostTree()
print("results are stored in", host.state_folder())
nics = verbs.open_active_nics()
with cuda.Device(0) as device:
    # In each pair, the first NIC accesses the memory of the GPU, and the second posts the requests. Here one NIC does
    # both. Each result has the state of the route, and how much the counters of both ports grew.
    for result in measure_reach(device, [(nic, nic) for nic in nics], tree=tree):
        print(result.nic, "moved" if result.moved else "moved nothing", result.state.value, result.reason)
    results = measure_devices([device], [(nic, nic) for nic in nics], tree=tree, counters_timeout_s=0.0)
    assert [result.nic for result in results] == [nic.name for nic in nics]

    # The table measures only what was not measured before, and stores the results for other programs.
    table = ReachTable(tree)
    assert all(result.moved for result in table.get_results(device, nics))

    # ConnectedPair connects two queue pairs and moves bytes. The port counters are read before and after.
    nic_name = nics[0].name
    counters_before = host.read_port_counters(tree, nic_name, 1)
    with (
        device.allocate(4096) as memory,
        register(memory, nics) as registration,
        ConnectedPair(nics[0], length_bytes=4096) as pair,
    ):
        pair.fill(seed=7)
        pair.write(registration.remote(nics[0])).expect()
        pair.read(registration.remote(nics[0])).expect()
    # The port sent and received 8192 bytes: 4096 of the write, and 4096 of the read.
    counter_growth = host.port_growth(counters_before, host.read_port_counters(tree, nic_name, 1))
    print(
        "port counted",
        counter_growth.sent_bytes,
        "bytes:",
        unproven_reason(results[0].path, 8192, counter_growth) or "proven",
    )
    print(len(host.port_counters(tree)), "ports")

    # measure_balance() transfers between all NICs and GPUs at the same time, and shows how much each NIC carries.
    for load in measure_balance([device], nics, duration_s=0.2).loads:
        print(load.nic, f"{load.share_percent:.0f} % of {load.expected_percent:.0f} %", "slow" if load.is_slow else "")
for nic in nics:
    nic.close()
