"""Tables of mutation testing: the modules that are mutated, and the cases that run against each of their files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CASES_BY_FILE", "FILES_BY_MODULE"]

# Each of these tuples has the arguments of pytest that choose the cases of one part of gdrkit.
# Cases without a server come first: they are fast, and a run stops at the first failure. The fuzzers are excluded,
# because each runs for many seconds.
_STORAGE = (
    "suites/storage/test_control_limits.py",
    "suites/storage/test_store.py",
    "suites/storage/test_requests.py",
    "suites/storage/test_files.py",
    "suites/storage",
    "-k",
    "not fuzzer",
)
_MIGRATION = (
    "suites/tiers/test_migration.py",
    "suites/tiers/test_concurrent_use.py",
    "suites/tiers/test_failing_devices.py",
    "suites/tiers/test_system_calls.py",
    "suites/tiers/test_move_errors.py",
    "suites/tiers/test_kills.py",
)
_AGENT = ("suites/usrbio/test_agent.py", "suites/usrbio/test_agent_deaths.py")
_MOUNT = (
    "suites/usrbio/test_mount_folder.py",
    *_AGENT,
    "suites/usrbio/test_bad_input.py",
    "suites/usrbio/test_bare_links.py",
    "-k",
    "not fuzzer",
)
_REGISTRATION = ("suites/registration", "suites/property/test_cache_machine.py")

# For each file, the arguments of pytest for the cases that test it. A run stops at the first failure, so only a mutant
# that survives takes the time of all these cases.
CASES_BY_FILE: Mapping[str, tuple[str, ...]] = {
    "gdrkit/storage/wire.py": ("suites/storage/test_wire.py", "suites/storage/test_files.py", "-k", "not fuzzer"),
    "gdrkit/verbs/wire.py": ("suites/contract/test_wire.py", "suites/rdma/test_first_light.py"),
    "gdrkit/harness/wire.py": ("suites/contract/test_wire.py", "suites/qualify/test_peer.py"),
    "gdrkit/storage/control.py": _STORAGE,
    "gdrkit/storage/store.py": _STORAGE,
    "gdrkit/storage/requests.py": _STORAGE,
    "gdrkit/storage/server.py": _STORAGE,
    "gdrkit/storage/listener.py": _STORAGE,
    "gdrkit/usrbio/agent/server.py": ("suites/usrbio/test_storage_server.py", *_AGENT),
    "gdrkit/usrbio/agent/connection.py": _AGENT,
    "gdrkit/usrbio/agent/mount.py": _MOUNT,
    "gdrkit/usrbio/agent/shared_memory.py": _MOUNT,
    "gdrkit/registration/cache.py": _REGISTRATION,
    "gdrkit/registration/policy.py": (*_REGISTRATION, "suites/fault/test_registration_errnos.py"),
    "gdrkit/tiers/policy.py": ("suites/tiers/test_policy.py",),
    "gdrkit/tiers/migration.py": _MIGRATION,
    "gdrkit/tiers/copying.py": _MIGRATION,
    "gdrkit/gds/copying.py": (
        "suites/gds/test_copy.py",
        "suites/gds/test_copy_files.py",
        "suites/gds/test_copy_system_calls.py",
        "suites/gds/test_unruly_files.py",
    ),
    "gdrkit/gds/new_file.py": (
        "suites/gds/test_copy.py",
        "suites/gds/test_copy_files.py",
        "suites/gds/test_copy_system_calls.py",
    ),
    "gdrkit/report/substrate.py": (
        "suites/inventory/test_evidence.py",
        "suites/qualify/test_outcome.py",
        "suites/qualify/test_harness.py",
        "suites/report/test_page.py",
    ),
    "gdrkit/qualify/outcome.py": ("suites/qualify/test_outcome.py", "suites/qualify/test_outcome_causes.py"),
}

# Files that were split off from a module are mutated as parts of the module. The key is the name of the module.
_PARTS: Mapping[str, tuple[str, ...]] = {
    "server": ("listener",),
    "copying": ("new_file",),
    "mount": ("shared_memory",),
}

# The files of each module: the files in CASES_BY_FILE whose name is the name of the module or of one of its parts.
# Files of several packages with the same name, such as wire.py, are one module.
FILES_BY_MODULE: Mapping[str, tuple[str, ...]] = {
    name: tuple(file for file in CASES_BY_FILE if Path(file).stem in {name, *_PARTS.get(name, ())})
    for name in (
        "wire",
        "control",
        "store",
        "requests",
        "server",
        "mount",
        "cache",
        "policy",
        "migration",
        "copying",
        "substrate",
        "outcome",
    )
}
