"""Regression cases for findings 1, 2, 4 and 5 of the GDR review (docs/findings.md).

The cases of findings 3 and 6 are in test_storage_review.py and test_usrbio_review.py.

A docstring says what the defect was. `nox -s review` restores each defect, and shows that its case then fails.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.faults import inject_faults
from support.ledger import read_call_counts
from support.memory_kinds import NEEDS_DMABUF, connect_peer_queue_pair
from support.sharing import receive_message_from_peer

from gdrkit.errors import Api, ApiError, Reason, RegistrationFailed
from gdrkit.harness.needs import cuda as cuda_needs
from gdrkit.harness.needs import needs, software
from gdrkit.registration import GdrManager, RegionCache, register
from gdrkit.registration.gdr_handle import GdrHandle, export_gdr, import_gdr
from gdrkit.registration.handle import ShareKind
from gdrkit.registration.share import import_dmabuf
from gdrkit.units import KIB
from gdrkit.verbs import Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdrkit.buffers import DmabufRange
    from gdrkit.cuda import Device
    from gdrkit.harness.evidence import Evidence
    from gdrkit.harness.peer import Peer
    from gdrkit.verbs import Nic

NEEDS_IPC = needs(cuda_needs.device(), cuda_needs.ipc)
# Rules of fault plans: every call of the function in the verbs twin (a library that emulates NICs) fails with the
# errno.
NO_NICS = "ibv_get_device_list call=* errno=ENOSYS"
NO_DMABUF = "ibv_reg_dmabuf_mr call=* errno=EOPNOTSUPP"


@NEEDS_DMABUF
@needs(software(Api.VERBS))
def test_lease_without_nic_fails_with_the_cause(device: Device) -> None:
    """Finding 1: the manager started without a region cache, and later calls used the missing cache."""
    with device.allocate(64 * KIB) as memory, inject_faults(Api.VERBS, NO_NICS), GdrManager() as manager:
        assert not manager.state.available
        with pytest.raises(RegistrationFailed) as error_info:
            manager.lease(memory)
        (cause,) = error_info.value.causes
        assert isinstance(cause, ApiError)
        assert cause.operation == "ibv_get_device_list"


# Program that exports an address as each kind of handle, and prints the errno of each error.
EXPORT_PROGRAM = """
import json
from gdrkit.errors import GdrkitError
from gdrkit.registration.handle import ShareKind
from gdrkit.registration.share import export_address
for kind in ShareKind:
    try:
        export_address(1 << 40, length_bytes=4096, device_index=0, kind=kind).close()
        print(json.dumps("success"))
    except GdrkitError as error:
        print(json.dumps(getattr(error, "errno", None)))
"""


def test_export_without_cuda_fails_with_enotsup() -> None:
    """Finding 2: without CUDA, an export returned a placeholder and reported success."""
    # Without LD_LIBRARY_PATH and LD_AUDIT, the process does not load the twins. With CUDA_VISIBLE_DEVICES=-1, a real
    # driver shows no device.
    environ = {name: value for name, value in os.environ.items() if name not in {"LD_LIBRARY_PATH", "LD_AUDIT"}}
    environ |= {"CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, "-c", EXPORT_PROGRAM]
    completed = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    results = [json.loads(line) for line in completed.stdout.splitlines()]
    assert "success" not in results, "an export without a driver succeeded"
    assert results == [errno.ENOTSUP] * len(ShareKind)


@pytest.mark.qualify
@NEEDS_IPC
def test_exported_handle_opens_in_another_process(device: Device, peer: Peer, seed: int) -> None:
    """Finding 2: an exported handle contained only metadata, and no process could open it."""
    with device.allocate(64 * KIB) as memory:
        # The first 64 bytes of a GDR handle are the IPC handle of CUDA.
        imported_memory = peer.device().open_ipc(export_gdr(memory)[:64], length_bytes=64 * KIB)
        imported_memory.write(seed=seed)
        imported_memory.check(seed=seed)
        imported_memory.close()


@NEEDS_IPC
def test_import_has_an_address_and_its_owners_bytes(device: Device, peer: Peer) -> None:
    """Finding 2: an import reported success and returned a null pointer."""
    peer_memory = peer.device().allocate(64 * KIB)
    peer_memory.write(seed=1)
    handle = GdrHandle(ipc=peer_memory.export_ipc(), length_bytes=64 * KIB, device_index=0)
    with import_gdr(device, handle.pack()) as memory:
        assert memory.address != 0, "the import succeeded with a null pointer"
        assert memory.read(length_bytes=4096) == peer_memory.contents(length_bytes=4096)
    peer_memory.close()


class MemoryWithoutAddress:
    """Device memory of another process. This process has only a dma-buf of it, so the memory has no address here."""

    kind, address, closed, owned = ShareKind.DMABUF, 0, False, False

    def __init__(self, dmabuf: DmabufRange) -> None:
        self.dmabuf = dmabuf
        self.length_bytes = dmabuf.length_bytes

    def export_dmabuf(self) -> DmabufRange:
        return self.dmabuf.dup()

    def before_release(self, action: Callable[[], None]) -> Callable[[], None]:
        del action  # This process does not release the memory, so it never runs the action.
        return lambda: None


@pytest.mark.qualify
@NEEDS_DMABUF
@needs(software(Api.VERBS))
def test_memory_without_address_is_not_registered_by_address(nic: Nic, peer: Peer) -> None:
    """Finding 4: if no dma-buf could be registered, the fallback registered a null pointer."""
    with (
        receive_message_from_peer(peer.device().allocate(64 * KIB), ShareKind.DMABUF) as message,
        import_dmabuf(message) as dmabuf,
        inject_faults(Api.VERBS, NO_DMABUF),
    ):
        calls_before = read_call_counts(Api.VERBS).get("ibv_reg_mr", 0)
        with pytest.raises(RegistrationFailed) as error_info:
            register(MemoryWithoutAddress(dmabuf), [nic])  # type: ignore[arg-type]
        assert read_call_counts(Api.VERBS).get("ibv_reg_mr", 0) == calls_before, (
            "ibv_reg_mr was called with a null pointer"
        )
    assert error_info.value.reason is Reason.NO_ROUTE
    assert [cause.reason for cause in error_info.value.causes] == [
        Reason.DMABUF_REGION_UNSUPPORTED,
        Reason.PEER_MEMORY_UNSUPPORTED,
    ]


@pytest.mark.qualify
@NEEDS_DMABUF
def test_old_key_after_a_free_is_refused(device: Device, nic: Nic, peer: Peer, seed: int, evidence: Evidence) -> None:
    """Finding 5: the cache kept the region of freed memory registered, so the rkey of the region still worked."""
    with RegionCache([nic]) as cache, connect_peer_queue_pair(nic, peer) as peer_pair:
        memory = device.allocate(256 * KIB)
        with cache.lease(memory) as lease:
            stale_range = lease.remote(nic, length_bytes=4 * KIB)
        memory.close()
        status = peer_pair.write(stale_range, seed=seed).status
        evidence["status"] = status.name
        assert status is Status.REM_ACCESS_ERR, f"a write with the key of freed memory ended with {status.name}"
        assert cache.statistics().regions == 0
