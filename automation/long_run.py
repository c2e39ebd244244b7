"""The seeds, the environment variables and the cases of the nox session `long`, which runs the suites for hours."""

from __future__ import annotations

__all__ = ["CASES", "SEEDS", "VARIABLES"]

# Seeds of the software twins. The suites run once with each of them.
SEEDS = range(1, 11)
# Environment variables that make CASES run longer: their numbers are larger than the defaults.
VARIABLES = {
    "GDRKIT_EXAMPLES": "2000",
    "GDRKIT_FUZZ_S": "300",
    "GDRKIT_KILLS": "500",
    "GDRKIT_TIER_KILLS": "300",
    "GDRKIT_TWIN_KILLS_S": "600",
    "GDRKIT_PINGPONG_RUNS": "1000",
    "GDRKIT_KILLED_CLIENTS": "10000",
    "GDRKIT_HONEST_OPERATIONS": "100000",
}
# The cases that use these environment variables.
CASES = (
    "suites/property",
    "suites/storage/test_admission.py",
    "suites/storage/test_wire.py",
    "suites/usrbio/test_bad_input.py",
    "suites/usrbio/test_plain_protocol.py",
    "suites/inventory/test_importers.py",
    "suites/models/test_header.py",
    "suites/usrbio/test_killed_clients.py",
    "suites/usrbio/test_hostile_clients.py",
    "suites/fault/test_kills.py",
    "suites/rdma/test_kills.py",
    "suites/rdma/test_pingpong_runs.py",
    "suites/tiers/test_kills.py",
    "suites/tiers/test_power_cuts.py",
)
