"""The tables that ``gdrkit tiers`` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gdrkit.cufile import RouteState
from gdrkit.tiers.configuration import DEFAULT_TIERS
from gdrkit.tiers.names import printable
from gdrkit.tiers.policy import MoveReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gdrkit.tiers.bench import Speed
    from gdrkit.tiers.finding import TierFinding
    from gdrkit.tiers.plan import PlannedMove
    from gdrkit.tiers.results import TierStatus
    from gdrkit.tiers.routes import TierRoute

__all__ = [
    "describe_outcome",
    "format_size",
    "make_findings_table",
    "make_moves_table",
    "make_speeds_table",
    "make_status_table",
    "print_table",
]

_STATE_STYLES = {
    RouteState.PROVEN: "green",
    RouteState.UNPROVEN: "yellow",
    RouteState.FELL_BACK: "yellow",
    RouteState.NOT_POSSIBLE: "dim",
}
_REASON_TEXTS = {
    MoveReason.HEAT: "its heat",
    MoveReason.PINNED: "pinned",
    MoveReason.NO_SPACE: "its tier is full",
}
# A width that exceeds every table, in characters.
_WIDTH_MAX = 10_000


def print_table(table: Table, stream: TextIO) -> None:
    """Print a table. If the stream is not a terminal, the table is as wide as its contents, so that nothing is cut."""
    console = Console(file=stream, highlight=False)
    if not console.is_terminal:
        console = Console(file=stream, highlight=False, width=_WIDTH_MAX)
        console = Console(file=stream, highlight=False, width=console.measure(table).maximum)
    console.print(table)


def describe_outcome(move: PlannedMove, why_not_moved: str) -> str:
    """Return a line about a file that was moved, or about the reason why it was not."""
    outcome = f"stays in {move.source}: {why_not_moved}" if why_not_moved else f"{move.source} -> {move.destination}"
    return f"{printable(move.name)}: {outcome}"


def format_size(size_bytes: int) -> str:
    """Return a size with a unit, rounded to three digits, or to an integer from 1000 to 1023."""
    size_in_unit = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_in_unit < 1024:  # noqa: PLR2004 - the step between the units.
            return f"{size_in_unit:.0f} {unit}" if size_in_unit >= 100 else f"{size_in_unit:.3g} {unit}"  # noqa: PLR2004
        size_in_unit /= 1024
    return f"{size_in_unit:.4g} TiB"


def make_status_table(tiers: Sequence[TierStatus]) -> Table:
    """Return the table of the tiers, fastest first."""
    table = _make_table(
        "tier", "directory", "for files with", "files", "used", "may use", "free on disk", "coming", "direct route"
    )
    # A file that is hot enough for the next faster tier belongs there, so the threshold of that tier is the upper bound
    # of this tier. The fastest tier has none.
    upper_bounds = [None, *(tier.accesses_min for tier in tiers)]
    for tier, upper_bound in zip(tiers, upper_bounds, strict=False):
        if tier.absent:
            table.add_row(tier.name, tier.directory, *[""] * 6, Text(f"absent: {tier.absent}", "bold red"))
            continue
        accesses_text = f">= {tier.accesses_min}" if upper_bound is None else f"{tier.accesses_min} - {upper_bound - 1}"
        table.add_row(
            tier.name,
            tier.directory,
            f"{accesses_text} accesses",
            str(tier.files),
            format_size(tier.allocated_bytes),
            format_size(tier.limit_bytes),
            format_size(tier.free_bytes),
            format_size(tier.coming_bytes) if tier.coming_bytes else "",
            _describe_route(tier.route),
        )
    return table


def make_moves_table(moves: Iterable[PlannedMove]) -> Table:
    """Return the table of the moves that would be made."""
    table = _make_table("file", "from", "to", "size", "why")
    for move in moves:
        name, size_text = Text(printable(move.name)), format_size(move.allocated_bytes)
        table.add_row(name, move.source, move.destination, size_text, _REASON_TEXTS[move.why])
    return table


def make_findings_table(findings: Iterable[TierFinding]) -> Table:
    """Return the table of the findings, with a column for repairs."""
    table = _make_table("finding", "file", "tier", "", "state")
    for finding in findings:
        style = "bold red" if finding.needs_action else "dim"
        state_text = Text("repaired", "green") if finding.mended else Text("unchanged", style)
        table.add_row(finding.kind.value, Text(printable(finding.name)), finding.tier, Text(finding.text), state_text)
    return table


def make_speeds_table(speeds: Iterable[Speed]) -> Table:
    """Return the table of the measured speeds, beside the stated speeds of the default tiers."""
    table = _make_table(
        "tier",
        "read GB/s",
        "stated",
        "write GB/s",
        "latency us",
        "stated",
        "p99 us",
        "to device GB/s",
        "direct route",
        "",
    )
    for speed in speeds:
        default_tier = DEFAULT_TIERS.get(speed.tier)
        table.add_row(
            speed.tier,
            f"{speed.read_gb_per_s:.2f}",
            f"{default_tier.rate_gb_per_s:g}" if default_tier else "",
            f"{speed.write_gb_per_s:.2f}",
            f"{speed.latency_us_median:.0f}",
            f"{default_tier.latency_us:g}" if default_tier else "",
            f"{speed.latency_us_p99:.0f}",
            "" if speed.device_read_gb_per_s is None else f"{speed.device_read_gb_per_s:.2f}",
            _describe_route(speed.route),
            "" if speed.past_cache else "rates of the page cache: this file system does not support O_DIRECT",
        )
    return table


def _describe_route(route: TierRoute) -> Text:
    route_text = f" by {route.route}" if route.route else ""
    cause_text = f": {route.why}" if route.why else ""
    return Text(f"{route.state.value}{route_text}{cause_text}", _STATE_STYLES[route.state])


def _make_table(*column_titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in column_titles:
        is_number = title in {"files", "used", "may use", "free on disk", "coming", "size", "stated"} or "/s" in title
        table.add_column(title, justify="right" if is_number or " us" in title else "left", overflow="fold")
    return table
