#!/usr/bin/env bash
# guest.sh OUTPUT SCRIPT FOLDER...: the virtual machine runs this script as root. It creates OUTPUT/booted, runs SCRIPT
# with two rxe devices, and writes the exit code of SCRIPT to OUTPUT/code.
set -uo pipefail
output=$1 script=$2
shift 2
: >"$output/booted"
# virtme-ng mounts the files of the host without a cache, so every process would read each Python module through QEMU
# again. Each FOLDER is therefore mounted a second time, with a cache. Its files do not change during the run.
mkdir -p /run/lab/files /run/lab/output
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose lab /run/lab/files || exit
mount --bind "$output" /run/lab/output
for folder in "$@"; do
    mount --bind "/run/lab/files$folder" "$folder"
done
mount --bind /run/lab/output "$output"
# RDMA registrations lock memory. The guest runs nothing else, so it needs no limit.
ulimit -l unlimited
ip link set lo up
# An exporter of dma-bufs. It is the only graphics device of the guest. Cases find it by this name.
modprobe -q vgem && ln -s dri/card0 /dev/vgem
code=0
bash "$(dirname "${BASH_SOURCE[0]}")/rxe.sh" bash "$script" || code=$?
echo "$code" >"$output/code"
