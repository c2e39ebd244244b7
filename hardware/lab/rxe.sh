#!/usr/bin/env bash
# rxe.sh COMMAND...: runs COMMAND with two Soft-RoCE devices and removes the devices afterwards. Each device is on its
# own dummy network interface. The interface has an IPv4 address, so that RoCE v2 works between two processes.
set -euo pipefail

interfaces=()
remove() {
    for interface in "${interfaces[@]}"; do
        ip link delete "$interface" # This also removes its rxe device.
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
