"""The Python packages of PyPI that `nox -s peers` runs: NIXL and Mooncake, each by python_peer.py."""

from __future__ import annotations

from pathlib import Path

from hardware.peers.programs import CHECKED_BY_PROGRAM, StockProgram

__all__ = ["list_python_programs"]

# One read and one write of 1 MiB.
_MOVED_BYTES_MIN = 2 << 20
# UCX_TLS excludes shared memory. Otherwise, UCX would move bytes between two processes of one host by shared memory. By
# default, UCX asks the kernel whether it has a route to the GID of the peer. The kernel has no route to a twin, so the
# mode `all` turns this check off.
_NIXL_SETTINGS = ("env", "UCX_TLS=rc_verbs,ud_verbs:aux,self", "UCX_IB_ROCE_REACHABILITY_MODE=all")


def list_python_programs(python: str) -> list[StockProgram]:
    """Return the runs of NIXL and Mooncake by the interpreter `python`, whose environment has the packages."""
    programs = []
    script = str(Path(__file__).with_name("python_peer.py"))
    for name, package, peer_package, settings in (
        ("NIXL, backend UCX over rc_verbs, two processes", "nixl", "nixl", _NIXL_SETTINGS),
        ("Mooncake, protocol rdma", "mooncake-transfer-engine-non-cuda", "mooncake", ()),
    ):
        client, server = (
            (*settings, python, script, peer_package, role, "{folder}") for role in ("initiator", "target")
        )
        programs.append(
            StockProgram(name, package, client, server, data_check=CHECKED_BY_PROGRAM, moved_bytes_min=_MOVED_BYTES_MIN)
        )
    return programs
