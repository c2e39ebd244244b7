#!/bin/sh
# The gate of a node for Slurm, as Prolog and as Epilog (slurm.conf). slurmd runs it as root on each node of a job. If it
# exits with another code than 0, Slurm drains the node. Jobs without GPUs pass at once.
#
# These variables can be set in the environment of slurmd:
#   GDRKIT           the command (default: /opt/gdrkit/bin/gdrkit)
#   GDRKIT_BUDGET_S  the gate ends within this number of seconds (default: 60). PrologEpilogTimeout must be larger.
#   GDRKIT_OPTIONS   further options of `gdrkit check`, such as `--profile dgx-h200`
set -u

gdrkit=${GDRKIT:-/opt/gdrkit/bin/gdrkit}
budget_s=${GDRKIT_BUDGET_S:-60}

[ -n "${SLURM_JOB_GPUS:-}" ] || exit 0

code=0
# The options are separate words on purpose.
# shellcheck disable=SC2086
line=$("$gdrkit" check --budget "$budget_s" ${GDRKIT_OPTIONS:-} 2>&1) || code=$?
# slurmd writes the output of the gate to its log, and syslog keeps the line for the administrator.
echo "$line"
logger -t gdrkit -- "job ${SLURM_JOB_ID:-?}: $line" 2>/dev/null || true
exit "$code"
