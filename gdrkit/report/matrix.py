"""The three matrices of the report page: the states of the paths of each GPU, the balance of the NICs, and distances.

The first matrix shows for each GPU, like ``gdscheck -p``, the NICs and mounts that it reaches directly. For each other
NIC and mount, it shows the cause. The second matrix shows the bytes of each NIC while all GPUs and all NICs transferred
at the same time. The third matrix has the distances between devices, like ``nvidia-smi topo -m``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit import serialization
from gdrkit.errors import UsageError
from gdrkit.host import Distance
from gdrkit.registration import Balance
from gdrkit.report.drawing import select_drawn_state
from gdrkit.report.figure import format_three_digits
from gdrkit.report.routes import FAILED_CASE_PREFIX
from gdrkit.report.sweep import describes_hardware

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gdrkit.inventory import Facts, Topology
    from gdrkit.report.record import Record
    from gdrkit.report.routes import FileStatus, RouteStatus

__all__ = [
    "BalanceMatrix",
    "DistanceMatrix",
    "PathCause",
    "PathCell",
    "PathColumn",
    "PathMatrix",
    "balance_matrix",
    "distance_matrix",
    "path_matrix",
]

# The key in the evidence of a record whose value is a measured Balance.
_BALANCE_KEY = "balance"
_MEGABYTE, _GIGABYTE = 10**6, 10**9

# With more columns than this, a cell has only the symbol of its state, and the column headings are vertical.
_COLUMNS_WITH_WORDS_MAX = 5
_DISTANCE_TEXTS = {
    Distance.PIX: "at most one PCIe switch",
    Distance.PXB: "several PCIe switches",
    Distance.PHB: "a PCIe host bridge",
    Distance.NODE: "several host bridges of one NUMA node",
    Distance.SYS: "the link between NUMA nodes",
    Distance.UNKNOWN: "the distance is unknown",
}


@dataclass(frozen=True, slots=True)
class PathColumn:
    """A column of the path matrix: a NIC or a mount. ``kind`` is ``NIC`` or ``mount``."""

    name: str
    kind: str


@dataclass(frozen=True, slots=True)
class PathCell:
    """The state of the most important path between a GPU and a NIC or a mount.

    Attributes
    ----------
    state : str
        The state, as in the record: ``proven``, ``unproven``, ``fell_back`` or ``not_possible``.
    cause_number : int
        Number of the cause in :attr:`PathMatrix.causes`, from 1. It is 0 if the path is proven.
    case : str
        A case that tested the path. Empty if no case tested the path.
    """

    state: str
    cause_number: int
    case: str


@dataclass(frozen=True, slots=True)
class PathCause:
    """A reason why paths are not proven, and the number of pairs (a GPU and a NIC or mount) that have this reason."""

    number: int
    text: str
    pair_count: int


@dataclass(frozen=True, slots=True)
class PathMatrix:
    """The state of the paths of a host: a row for each GPU, and a column for each NIC and each mount.

    Each of ``rows`` has the name of a GPU, its model, and its cells. A cell is None if the pair has no path that was
    tested or attempted.
    """

    columns: tuple[PathColumn, ...]
    rows: tuple[tuple[str, str, tuple[PathCell | None, ...]], ...]
    causes: tuple[PathCause, ...]

    @property
    def has_words(self) -> bool:
        """Whether the cells have room for the names of the states."""
        return len(self.columns) <= _COLUMNS_WITH_WORDS_MAX

    @property
    def kinds(self) -> tuple[tuple[str, int], ...]:
        """The headings above the columns of NICs and of mounts, each with the number of its columns."""
        counts = {"NIC": 0, "mount": 0}
        for column in self.columns:
            counts[column.kind] += 1
        return tuple((f"{kind}s" if count > 1 else kind, count) for kind, count in counts.items() if count)


@dataclass(frozen=True, slots=True)
class BalanceMatrix:
    """The bytes that each NIC carried while all GPUs and all NICs transferred at the same time.

    Attributes
    ----------
    nics : tuple of str
        Names of the NICs.
    rows : tuple
        For each GPU: its name, and for each NIC the moved bytes as a text and the distance of the two devices. The
        distance is empty if it is unknown.
    totals : tuple
        For each quantity of a whole NIC: its name, and its value for each NIC as a text.
    slow_nics : frozenset of str
        Names of the NICs that carried less than 70 % of the share that is expected from the rate of their link.
    caption : str
        The duration of the measurement and the source of the shares.
    caveat : str
        Why the numbers say nothing about hardware. Empty if all APIs ran on hardware.
    case : str
        The case that measured the bytes.
    """

    nics: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    totals: tuple[tuple[str, tuple[str, ...]], ...]
    slow_nics: frozenset[str]
    caption: str
    caveat: str
    case: str


@dataclass(frozen=True, slots=True)
class DistanceMatrix:
    """The distances between the devices of a host, with the NUMA node and the PCIe link of each device.

    Each of ``rows`` has the name of a device, its distance to each device of ``names`` (empty for itself), its NUMA
    node, the CPUs of that node, and its PCIe link. ``legend`` explains the distances that occur. ``caveat`` is a
    warning for a virtual machine, else empty.
    """

    names: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...], str, str, str], ...]
    legend: tuple[tuple[str, str], ...]
    caveat: str


def path_matrix(facts: Facts, routes: Sequence[RouteStatus], files: Sequence[FileStatus]) -> PathMatrix | None:
    """Return the matrix of all paths of a host, or None if it has no pair of a GPU and a NIC or mount."""
    statuses_by_pair: dict[tuple[int, PathColumn], list[RouteStatus | FileStatus]] = {}
    for route_status in routes:
        nic_column = PathColumn(route_status.nic, "NIC")
        statuses_by_pair.setdefault((route_status.device_index, nic_column), []).append(route_status)
    for file_status in files:
        mount_column = PathColumn(file_status.mount, "mount")
        statuses_by_pair.setdefault((file_status.device_index, mount_column), []).append(file_status)
    if not statuses_by_pair:
        return None
    columns = tuple(
        sorted({column for _, column in statuses_by_pair}, key=lambda column: (column.kind != "NIC", column.name))
    )
    model_by_index = {device.index: device.name for device in facts.cuda.devices} if facts.cuda else {}
    pair_count_by_cause: dict[str, int] = {}
    rows = []
    for device_index in sorted({index for index, _ in statuses_by_pair}):
        cells: list[PathCell | None] = []
        for column in columns:
            pair_statuses = statuses_by_pair.get((device_index, column))
            cells.append(None if pair_statuses is None else _make_cell(pair_statuses, pair_count_by_cause))
        rows.append((f"GPU {device_index}", model_by_index.get(device_index, ""), tuple(cells)))
    causes = tuple(
        PathCause(number, text, count) for number, (text, count) in enumerate(pair_count_by_cause.items(), start=1)
    )
    return PathMatrix(columns, tuple(rows), causes)


def _make_cell(statuses: Sequence[RouteStatus | FileStatus], pair_count_by_cause: dict[str, int]) -> PathCell:
    """Return the cell of a pair, and count its cause in `pair_count_by_cause`.

    The number of a cause is its position in this mapping.
    """
    state = select_drawn_state(status.state for status in statuses)
    status = next(status for status in statuses if status.state is state)
    case = status.fallback_case or next(iter(status.cases), "")
    cause = status.cause.removesuffix(f" ({status.fallback_case})")
    if cause.startswith(FAILED_CASE_PREFIX):
        # All failed cases share one cause without their names. The cell has a link to its case.
        case, cause = cause.removeprefix(FAILED_CASE_PREFIX), "a case of this path failed"
    if cause:
        pair_count_by_cause[cause] = pair_count_by_cause.get(cause, 0) + 1
    cause_number = list(pair_count_by_cause).index(cause) + 1 if cause else 0
    return PathCell(state.value, cause_number, case)


def balance_matrix(facts: Facts, records: Iterable[Record], topology: Topology | None) -> BalanceMatrix | None:
    """Return the matrix of the last record that measured the balance, or None if no record did."""
    measured_balances = [(record, balance) for record in records if (balance := _read_balance(record)) is not None]
    if not measured_balances:
        return None
    record, balance = measured_balances[-1]
    devices = facts.cuda.devices if facts.cuda else ()
    gpu_name_by_address = {device.pci_bus_id.lower(): f"GPU {device.index}" for device in devices}
    device_name_by_address = (
        {topology_device.address.lower(): topology_device.name for topology_device in topology.places}
        if topology
        else {}
    )
    distances = topology.distances if topology else {}
    loads = balance.loads
    rows = tuple(
        (
            gpu_name_by_address.get(gpu_address.lower(), gpu_address),
            tuple(
                (
                    _format_byte_count(moved_bytes),
                    distances.get(device_name_by_address.get(gpu_address.lower(), ""), {}).get(load.nic, ""),
                )
                for moved_bytes, load in zip(bytes_by_nic, loads, strict=False)
            ),
        )
        for gpu_address, bytes_by_nic in zip(balance.gpus, balance.matrix, strict=False)
    )
    totals = (
        ("Counted by the port", tuple(_format_byte_count(load.counted_bytes) for load in loads)),
        ("Share of all bytes", tuple(f"{load.share_percent:.1f} %" for load in loads)),
        ("Share of the links", tuple(f"{load.expected_percent:.1f} %" for load in loads)),
        ("Link", tuple(f"{load.link_gbit_per_s:g} Gbit/s" if load.link_gbit_per_s else "unknown" for load in loads)),
    )
    source_text = (
        "port counters" if balance.is_counted else "initiators, because a port has no byte counters or counted nothing"
    )
    return BalanceMatrix(
        nics=tuple(load.nic for load in loads),
        rows=rows,
        totals=totals,
        slow_nics=frozenset(balance.slow_nics),
        caption=f"Moved bytes in both directions within {balance.duration_s:.1f} s; shares by the {source_text}",
        caveat=""
        if describes_hardware(record)
        else "Not every API ran on hardware, so the numbers do not describe this machine.",
        case=record.case,
    )


def _read_balance(record: Record) -> Balance | None:
    """Return the balance in the evidence of a record, or None if it has none in the form of this version of gdrkit."""
    try:
        return serialization.from_json_data(Balance, record.evidence[_BALANCE_KEY])
    except (KeyError, UsageError):
        return None


def _format_byte_count(byte_count: int | None) -> str:
    if byte_count is None:
        return "no counter"

    is_large = byte_count >= _GIGABYTE
    return f"{format_three_digits(byte_count / (_GIGABYTE if is_large else _MEGABYTE))} {'GB' if is_large else 'MB'}"


def distance_matrix(topology: Topology | None) -> DistanceMatrix | None:
    """Return the matrix of distances, or None without a topology or with a single device."""
    if topology is None or len(topology.places) < 2:  # noqa: PLR2004 - one device has no distance to another.
        return None
    names = tuple(device.name for device in topology.places)
    rows = tuple(
        (
            device.name,
            tuple("" if name == device.name else topology.distances[device.name][name] for name in names),
            "unknown" if device.numa_node is None else str(device.numa_node),
            topology.numa_cpus.get(str(device.numa_node), "unknown"),
            device.link or "unknown",
        )
        for device in topology.places
    )
    caveat = ""
    if topology.virtual_machine:
        caveat = f"This is a virtual machine ({topology.virtual_machine}): its PCI tree may differ from the hardware."
    return DistanceMatrix(names, rows, tuple(_make_legend(rows)), caveat)


def _make_legend(rows: Iterable[tuple[str, tuple[str, ...], str, str, str]]) -> Iterable[tuple[str, str]]:
    used_distances = {Distance[name] for _, distances, _, _, _ in rows for name in distances if name}
    return ((distance.name, _DISTANCE_TEXTS[distance]) for distance in sorted(used_distances))
