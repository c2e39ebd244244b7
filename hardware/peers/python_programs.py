"""The Python packages of PyPI that `nox -s peers` runs: NIXL and Mooncake, each by python_peer.py."""

from __future__ import annotations

from pathlib import Path

from hardware.peers.programs import BY_PROGRAM, StockProgram

__all__ = ["python_programs"]

# One read and one write of 1 MiB.
_MOVED_BYTES = 2 << 20
# Both processes together also fill and read their GPU memory five times.
_COPIED_BYTES = 7 << 20
# On one host UCX moves the bytes through shared memory. The UCX in NIXL's wheel also asks the kernel for a route to the
# GID of the peer, and the kernel has none.
_NIXL_SETTINGS = ("env", "UCX_TLS=rc_verbs,ud_verbs:aux,self", "UCX_IB_ROCE_REACHABILITY_MODE=all")
_GPU_VERBS_SETTINGS = ("env", "UCX_TLS=rc_verbs,ud_verbs:aux,cuda_copy,self", "UCX_IB_ROCE_REACHABILITY_MODE=all")
# UCX exchanges messages over TCP, and prints which transport moves the bytes of a write.
_GPU_IPC_SETTINGS = ("env", "UCX_TLS=cuda_ipc,cuda_copy,tcp", "UCX_PROTO_INFO=y")
_WRITES_BY_CUDA_IPC = r"zero-copy +\| cuda_ipc/cuda"


def python_programs(python: str) -> list[StockProgram]:
    """Return the runs of NIXL and Mooncake by the interpreter `python`, whose environment has the packages."""
    programs = []
    script = str(Path(__file__).with_name("python_peer.py"))
    for name, package, argument, settings, apis in (
        ("NIXL, backend UCX over rc_verbs, two processes", "nixl", "nixl", _NIXL_SETTINGS, ("verbs",)),
        ("NIXL, GPU memory over rc_verbs, two processes", "nixl", "nixl-gpu", _GPU_VERBS_SETTINGS, ("verbs", "cuda")),
        ("NIXL, GPU memory over cuda_ipc, two processes", "nixl", "nixl-gpu", _GPU_IPC_SETTINGS, ("cuda",)),
        ("Mooncake, protocol rdma", "mooncake-transfer-engine-non-cuda", "mooncake", (), ("verbs",)),
    ):
        client, server = ((*settings, python, script, argument, role, "{folder}") for role in ("initiator", "target"))
        is_verbs = apis[0] == "verbs"
        programs.append(
            StockProgram(
                name,
                package,
                client,
                server,
                data=BY_PROGRAM,
                moved_bytes_min=_MOVED_BYTES if is_verbs else _COPIED_BYTES,
                apis=apis,
                output="" if is_verbs else _WRITES_BY_CUDA_IPC,
            )
        )
    return programs
