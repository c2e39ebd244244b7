"""The lines in which NCCL and UCX name their transports, if the observed program writes its log to a file."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit.nccl import log_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["VARIABLES", "count_transport_lines", "find_log_files", "make_log_environment"]

# The variables that name the log files. NCCL and UCX replace %p by the process ID and %h by the host name.
VARIABLES = ("NCCL_DEBUG_FILE", "UCX_LOG_FILE")
# NCCL: "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", "Using network IB". UCX: "ep_cfg[0]: tag(tcp/lo rc_mlx5/mlx5_0:1)".
_TRANSPORT_LINE = re.compile(
    r"\b(?:Channel \d+/\d+ : .* via (?P<channel>\S+)|Using network (?P<network>\S+)"
    r"|ep_cfg\[\d+\]: (?P<lanes>\w+\([^)]*\)))"
)
_FILE_BYTES_MAX = 4 << 20


def make_log_environment(folder: Path) -> dict[str, str]:
    """Return the environment variables that make NCCL and UCX write their transports to files in `folder`."""
    return {
        **log_environment(folder / "nccl.%p.log"),
        "UCX_LOG_LEVEL": "info",
        "UCX_LOG_FILE": str(folder / "ucx.%p.log"),
    }


def find_log_files(environment: Mapping[str, str], process_id: int, working_folder: str) -> list[Path]:
    """Return the log files that a process with this environment writes."""
    return [
        Path(working_folder, environment[name].replace("%p", str(process_id)).replace("%h", socket.gethostname()))
        for name in VARIABLES
        if environment.get(name)
    ]


def count_transport_lines(path: Path) -> dict[str, int]:
    """Return the transports that the lines of a log name, with the number of lines; empty if there is no such file."""
    try:
        with path.open("rb") as file:
            text = file.read(_FILE_BYTES_MAX).decode("utf-8", "backslashreplace")
    except OSError:
        return {}
    count_by_line: dict[str, int] = {}
    for match in _TRANSPORT_LINE.finditer(text):
        if match["channel"]:
            line = f"NCCL: channels via {match['channel']}"
        elif match["network"]:
            line = f"NCCL: network {match['network']}"
        else:
            line = f"UCX: {match['lanes']}"
        count_by_line[line] = count_by_line.get(line, 0) + 1
    return count_by_line
