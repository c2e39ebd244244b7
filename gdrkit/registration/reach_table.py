"""The measured reach of NICs, kept in this process and in a file that all programs of the user read.

The reach states whether the DMA of a NIC can access the memory of a GPU (:mod:`gdrkit.registration.reach`).

The file is ``reach`` in the state folder of gdrkit. By default this folder is in /dev/shm, so it is empty after a boot.
Each line is one :class:`~gdrkit.registration.reach.Reach`, as words ``key=value``. The usrbio client library reads the
file too (native/usrbio/client/reach_file.cpp).
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from gdrkit.errors import GdrkitError
from gdrkit.forks import ForkSafeLock
from gdrkit.host import HostTree, PortGrowth, PrivateFolder, state_folder
from gdrkit.registration.policy import RegistrationRoute
from gdrkit.registration.reach import Reach, TransferPath, measure_reach
from gdrkit.verdict import RouteOutcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gdrkit.cuda import PrimaryContext
    from gdrkit.verbs import Nic

__all__ = ["ReachTable"]

_LOG = logging.getLogger("gdrkit.registration")
_FILE_NAME, _HEADER = "reach", "gdrkit-reach 1"
# Times after which a NIC is measured again, in seconds: if the NIC reached the GPU, and if it did not.
_VALID_S, _RETRY_AFTER_S = 3600.0, 30.0
_CAUSE_CHARACTERS_MAX = 300
# The usrbio client library reads at most this much of the file (native/usrbio/client/reach_file.cpp).
_FILE_BYTES_MAX = 64 << 10

_Key = tuple[str, str]  # UUID of the GPU, and GID of the NIC.


class ReachTable:
    """The reach of the NICs of a host, measured when a caller first needs it.

    A NIC that reached a GPU is measured again after an hour. A NIC that did not reach it is measured again after
    `retry_after_s`.

    Parameters
    ----------
    tree : HostTree or None
        The host whose sysfs has the port counters. With None, this host.
    retry_after_s : float
        Time after which a NIC that did not reach a GPU is measured again, in seconds.
    """

    def __init__(self, tree: HostTree | None = None, *, retry_after_s: float = _RETRY_AFTER_S) -> None:
        self._tree = HostTree() if tree is None else tree
        self._retry_after_s = retry_after_s
        self._result_by_key: dict[_Key, Reach] = {}
        self._has_read_file = False
        # The lock is reentrant, because a signal handler may use the table while its thread has the lock.
        self._lock = ForkSafeLock(reentrant=True)

    def get_results(self, device: PrimaryContext, nics: Sequence[Nic]) -> tuple[Reach, ...]:
        """Return the result for each NIC, in the order of `nics`. Measure the NICs whose result is missing or too old.

        Raises
        ------
        ApiError
            Memory of the GPU could not be allocated for a measurement.
        """
        with self._lock:
            if not self._has_read_file:
                for key, stored_result in _read_file().items():
                    self._result_by_key.setdefault(key, stored_result)
                self._has_read_file = True
            # A signal handler may call forget() from here on. So this dict keeps the results that are returned.
            result_by_nic = {
                nic: result for nic in nics if (result := self._find_current((device.uuid, nic.gid))) is not None
            }
            if any(nic not in result_by_nic for nic in nics):
                self._measure(device, nics, result_by_nic)
            return tuple(result_by_nic[nic] for nic in nics)

    def store(self, results: Iterable[Reach]) -> None:
        """Store the results of measurements: for each GPU and NIC, the result that proves most."""
        best_results: dict[_Key, Reach] = {}
        for result in results:
            key = (result.gpu_uuid, result.nic_gid)
            if key not in best_results or _rank_proof(result) > _rank_proof(best_results[key]):
                best_results[key] = result
        with self._lock:
            self._result_by_key |= best_results
            _write_file(best_results.values())

    def forget(self, gpu_uuid: str, nics: Sequence[Nic]) -> None:
        """Drop the results of a GPU and these NICs, because a transfer between them failed."""
        keys = {(gpu_uuid, nic.gid) for nic in nics}
        with self._lock:
            for key in keys:
                self._result_by_key.pop(key, None)
            _write_file((), forgotten_keys=keys)

    def _find_current(self, key: _Key) -> Reach | None:
        """Return the result of this key, or None if there is no result or the result is too old."""
        result = self._result_by_key.get(key)
        if result is None:
            return None
        if result.route is None and result.failure is None:
            # The result is from the file: another process could not register the memory. The file does not contain the
            # errors, and this process needs them as causes of its own error. So it tries again, which takes little
            # time.
            return None
        age_s = time.time() - result.measured_s
        return result if 0 <= age_s < (_VALID_S if result.moved else self._retry_after_s) else None

    def _measure(self, device: PrimaryContext, nics: Sequence[Nic], result_by_nic: dict[Nic, Reach]) -> None:
        """Measure in loopback the NICs that are missing in `result_by_nic`, and add their results.

        If a NIC fails in loopback, measure it again with a working NIC as its peer.
        """
        nics_to_measure = [nic for nic in nics if nic not in result_by_nic]
        results = dict(
            zip(
                nics_to_measure,
                measure_reach(device, [(nic, nic) for nic in nics_to_measure], tree=self._tree),
                strict=True,
            )
        )
        result_by_nic |= results
        working_nic = next((nic for nic in nics if result_by_nic[nic].moved), None)
        # Some NICs have no loopback, but another NIC can access the memory through them.
        nics_without_loopback = [
            nic for nic, result in results.items() if not result.moved and result.route is not None
        ]
        if working_nic is not None and nics_without_loopback:
            pairs = [(nic, working_nic) for nic in nics_without_loopback]
            for nic, result in zip(nics_without_loopback, measure_reach(device, pairs, tree=self._tree), strict=True):
                results[nic] = result if result.moved else results[nic]
        for nic, result in results.items():
            self._log_change(device, nic, result)
            self._result_by_key[device.uuid, nic.gid] = result
        result_by_nic |= results
        _write_file(results.values())

    def _log_change(self, device: PrimaryContext, nic: Nic, result: Reach) -> None:
        previous_result = self._result_by_key.get((device.uuid, nic.gid))
        if not result.moved:
            _LOG.warning("NIC %s is left out for GPU %s: %s", nic.name, device.pci_bus_id, result.cause)
        elif previous_result is not None and not previous_result.moved:
            _LOG.warning("NIC %s reaches GPU %s again and is used", nic.name, device.pci_bus_id)


def _rank_proof(result: Reach) -> tuple[bool, bool, bool]:
    """Return a sort key, which is larger for a result that proves more."""
    return result.moved, result.state is RouteOutcome.PROVEN, result.path is TransferPath.WIRE


def _read_file() -> dict[_Key, Reach]:
    """Return the results in the file. A file that is missing, unreadable or malformed has none."""
    try:
        with PrivateFolder.below(state_folder(), create=False) as folder:
            lines = folder.read_text(_FILE_NAME).splitlines()
    except (OSError, ValueError, GdrkitError):
        return {}
    if lines[:1] != [_HEADER]:
        return {}
    results = (_parse_line(line) for line in lines[1:])
    return {(result.gpu_uuid, result.nic_gid): result for result in results if result is not None}


def _write_file(results: Iterable[Reach], *, forgotten_keys: Iterable[_Key] = ()) -> None:
    """Merge results into the file. This process does not depend on the file, so errors are only logged."""
    merged_results = _read_file() | {(result.gpu_uuid, result.nic_gid): result for result in results}
    for key in forgotten_keys:
        merged_results.pop(key, None)
    file_text = _HEADER + "\n"
    # If the file is full, the oldest results are left out.
    for result in sorted(merged_results.values(), key=lambda result: result.measured_s, reverse=True):
        line = _format_line(result) + "\n"
        if len(file_text) + len(line) > _FILE_BYTES_MAX:
            break
        file_text += line
    try:
        with PrivateFolder.below(state_folder()) as folder:
            folder.write_text(_FILE_NAME, file_text)
    except (OSError, GdrkitError) as error:
        _LOG.info("the reach of NICs was not stored: %s", error)


def _format_line(result: Reach) -> str:
    values_by_key = {
        "gpu": result.gpu_uuid,
        "pci": result.pci_bus_id,
        "nic": result.nic,
        "gid": result.nic_gid,
        "peer": result.peer_nic,
        "path": result.path.value,
        "route": "" if result.route is None else result.route.value,
        "moved": "yes" if result.moved else "no",
        "bytes": result.transfer_bytes,
        "nic_growth": _format_growth(result.nic_growth),
        "peer_growth": _format_growth(result.peer_growth),
        "measured_s": result.measured_s,
        "cause": quote(result.cause[:_CAUSE_CHARACTERS_MAX]),
    }
    return " ".join(f"{key}={value}" for key, value in values_by_key.items())


def _format_growth(growth: PortGrowth | None) -> str:
    return "" if growth is None else f"{growth.sent_bytes},{growth.received_bytes}"


def _parse_line(line: str) -> Reach | None:
    """Return the result that a line describes, or None if it is malformed."""
    values_by_key = dict(word.partition("=")[::2] for word in line.split(" "))
    try:
        return Reach(
            gpu_uuid=values_by_key["gpu"],
            pci_bus_id=values_by_key["pci"],
            nic=values_by_key["nic"],
            nic_gid=values_by_key["gid"],
            peer_nic=values_by_key["peer"],
            path=TransferPath(values_by_key["path"]),
            route=RegistrationRoute(values_by_key["route"]) if values_by_key["route"] else None,
            moved={"yes": True, "no": False}[values_by_key["moved"]],
            cause=unquote(values_by_key["cause"]),
            transfer_bytes=int(values_by_key["bytes"]),
            nic_growth=_parse_growth(values_by_key["nic_growth"]),
            peer_growth=_parse_growth(values_by_key["peer_growth"]),
            measured_s=float(values_by_key["measured_s"]),
        )
    except (KeyError, ValueError):
        return None


def _parse_growth(text: str) -> PortGrowth | None:
    if not text:
        return None
    sent_bytes, received_bytes = (None if count == "None" else int(count) for count in text.split(","))
    return PortGrowth(sent_bytes, received_bytes)
