#!/usr/bin/env bash
# What the virtual machine runs, as root: guest.sh OUTPUT SCRIPT FOLDER... It says that it came up, runs SCRIPT with two
# rxe devices, and leaves the exit code.
set -uo pipefail
output=$1 script=$2
shift 2
: >"$output/booted"
# virtme-ng mounts the files of the host without a cache, so every process would read all that Python imports once more
# through QEMU. Nobody changes them meanwhile, so each FOLDER is mounted over itself with a cache.
mkdir -p /run/lab/files /run/lab/output
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose lab /run/lab/files || exit
mount --bind "$output" /run/lab/output
for folder in "$@"; do
    mount --bind "/run/lab/files$folder" "$folder"
done
mount --bind /run/lab/output "$output"
# A virtual machine is there for this alone, so nothing is in its way.
ulimit -l unlimited
ip link set lo up
code=0
bash "$(dirname "${BASH_SOURCE[0]}")/rxe.sh" bash "$script" || code=$?
echo "$code" >"$output/code"
