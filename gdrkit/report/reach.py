"""The measured reach of NICs and the balance of the NICs, as tables and as JSON.

The reach states whether the DMA of a NIC can access the memory of a GPU. The balance states the share of each NIC in
all bytes while all NICs move bytes at the same time.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from gdrkit import serialization
from gdrkit.verdict import RouteOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gdrkit.registration import Balance, Reach

__all__ = ["describe_balance", "describe_reach", "reach_as_json"]

_HEADINGS = ("GPU", "NIC", "peer", "path", "bytes correct", "state", "cause")


def describe_reach(results: Sequence[Reach], balance: Balance | None = None, *, caveat: str = "") -> str:
    """Return a table with a line for each measurement, and the tables of the balance.

    `caveat` says why the measurements prove nothing about hardware. It is empty if all APIs ran on hardware.
    """
    if not results:
        return "there is no pair of a GPU and a NIC with an active port"
    lines = [
        *_format_table([_HEADINGS, *(_make_row(result, caveat) for result in results)]),
        *_describe_unreached(results),
    ]
    return "\n".join(lines if balance is None else [*lines, "", describe_balance(balance)])


def describe_balance(balance: Balance) -> str:
    """Return a matrix of the moved bytes by GPU and NIC, and a table of the shares of the NICs."""
    nic_names = [load.nic for load in balance.loads]
    matrix_rows = [
        (gpu, *(f"{moved_bytes / 1e6:.0f}" for moved_bytes in row))
        for gpu, row in zip(balance.gpus, balance.matrix, strict=True)
    ]
    source_text = (
        "by the port counters"
        if balance.is_counted
        else "from the bytes that the initiators moved, because a port has no byte counters or counted nothing"
    )
    load_rows = [
        (
            load.nic,
            f"{load.link_gbit_per_s:g}" if load.link_gbit_per_s else "unknown",
            f"{load.share_percent:.1f}",
            f"{load.expected_percent:.1f}",
            "slow" if load.is_slow else "",
        )
        for load in balance.loads
    ]
    return "\n".join(
        [
            f"MB that all GPUs and all NICs moved at the same time, in {balance.duration_s:.1f} s",
            *_format_table([("GPU", *nic_names), *matrix_rows]),
            "",
            f"share of each NIC in all bytes, {source_text}",
            *_format_table([("NIC", "link Gbit/s", "share %", "expected %", ""), *load_rows]),
        ]
    )


def _format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, whose columns are as wide as their widest cells."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def reach_as_json(results: Sequence[Reach], balance: Balance | None = None, *, caveat: str = "") -> str:
    """Return the measurements as a JSON document that ends with a line feed; see :func:`describe_reach`."""
    rows = [
        {
            "gpu_uuid": result.gpu_uuid,
            "pci_bus_id": result.pci_bus_id,
            "nic": result.nic,
            "peer_nic": result.peer_nic,
            "path": result.path.value,
            "way": None if result.route is None else result.route.value,
            "moved_bytes": result.transfer_bytes if result.moved else 0,
            "nic_growth": serialization.to_json_data(result.nic_growth),
            "peer_growth": serialization.to_json_data(result.peer_growth),
            "state": _find_state(result, caveat).value,
            "cause": _find_cause(result, caveat),
        }
        for result in results
    ]
    document = {"reach": rows, "balance": serialization.to_json_data(balance)}
    return json.dumps(document, indent=2) + "\n"


def _find_state(result: Reach, caveat: str) -> RouteOutcome:
    # The counters of a software twin (a library that emulates the NICs) grow too, but prove nothing about hardware.
    return RouteOutcome.UNPROVEN if caveat and result.state is RouteOutcome.PROVEN else result.state


def _find_cause(result: Reach, caveat: str) -> str:
    return result.reason or result.cause or caveat


def _make_row(result: Reach, caveat: str) -> tuple[str, ...]:
    return (
        result.pci_bus_id,
        result.nic,
        result.peer_nic,
        result.path.value,
        "yes" if result.moved else "no",
        _find_state(result, caveat).value,
        _find_cause(result, caveat),
    )


def _describe_unreached(results: Sequence[Reach]) -> Iterator[str]:
    """Yield a line for each pair of a GPU and a NIC that does not reach the GPU."""
    reached_pairs = {(result.gpu_uuid, result.nic) for result in results if result.moved}
    unreached_pairs = {
        (result.pci_bus_id, result.nic): None
        for result in results
        if (result.gpu_uuid, result.nic) not in reached_pairs
    }
    for pci_bus_id, nic in unreached_pairs:
        yield f"NIC {nic} does not reach GPU {pci_bus_id}: gdrkit does not use it for this GPU"
