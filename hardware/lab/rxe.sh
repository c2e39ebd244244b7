#!/usr/bin/env bash
# rxe.sh COMMAND...: runs COMMAND with two Soft-RoCE devices, each on a network interface of its own that leads nowhere
# and has an IPv4 address, so that RoCE v2 works between two processes. Takes away what it added.
set -euo pipefail

interfaces=()
remove() {
    for interface in "${interfaces[@]}"; do
        ip link delete "$interface" # and with it its rxe device
    done
}
trap remove EXIT

modprobe rdma_rxe
for number in 0 1; do
    interface=rxelab$number
    ip link add "$interface" type dummy
    interfaces+=("$interface")
    ip address add "10.9.$number.1/24" dev "$interface"
    ip link set "$interface" up
    rdma link add "rxe$number" type rxe netdev "$interface"
done
"$@"
