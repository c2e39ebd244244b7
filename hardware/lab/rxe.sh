#!/usr/bin/env bash
# rxe.sh COMMAND...: runs COMMAND with two Soft-RoCE devices and removes the devices afterwards. Their network interfaces
# are the two ends of a veth pair, and each has an IPv4 address, because RoCE v2 needs it.
#
# Linux delivers a packet between two addresses of one machine through `lo`, where rxe does not receive it. So the local
# table of routes does not contain the two addresses. A packet to the other device is routed to the veth pair, and only a
# packet that arrives on an interface is looked up in the table in which the address of that interface is local.
set -euo pipefail

remove() {
    ip rule delete iif rxelab0 lookup 2900 2>/dev/null || true
    ip rule delete iif rxelab1 lookup 2901 2>/dev/null || true
    ip link delete rxelab0 # This also removes the other end, the rxe devices and all routes.
}

modprobe rdma_rxe
ip link add rxelab0 type veth peer name rxelab1
trap remove EXIT
for number in 0 1; do
    interface=rxelab$number address=10.9.$number.1
    ip address add "$address/32" dev "$interface"
    ip link set "$interface" up
    ip route delete local "$address" dev "$interface" table local
    ip route add local "$address" dev "$interface" table "290$number"
    ip rule add iif "$interface" lookup "290$number"
done
for number in 0 1; do
    interface=rxelab$number peer=rxelab$((1 - number)) address=10.9.$number.1
    hardware_address=$(cat "/sys/class/net/$interface/address")
    # The peer reaches the address through the veth pair. The device itself uses the second route and the second
    # neighbour: rxe keeps a packet for its own hardware address inside the device.
    ip route add "$address/32" dev "$peer" metric 1
    ip route add "$address/32" dev "$interface" metric 2
    ip neighbour add "$address" lladdr "$hardware_address" dev "$peer" nud permanent
    ip neighbour add "$address" lladdr "$hardware_address" dev "$interface" nud permanent
    rdma link add "rxe$number" type rxe netdev "$interface"
done
"$@"
