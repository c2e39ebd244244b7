#!/usr/bin/env bash
# What the virtual machine runs, as root: guest.sh OUTPUT SCRIPT. It says that it came up, runs SCRIPT with two rxe
# devices, and leaves the exit code.
set -uo pipefail
output=$1 script=$2
: >"$output/booted"
# A virtual machine is there for this alone, so nothing is in its way.
ulimit -l unlimited
ip link set lo up
code=0
bash "$(dirname "${BASH_SOURCE[0]}")/rxe.sh" bash "$script" || code=$?
echo "$code" >"$output/code"
