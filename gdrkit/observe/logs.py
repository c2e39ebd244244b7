"""Find the log files of NCCL and UCX, and count the lines that name a transport.

The libraries write log files if the observed program runs with the variables of :func:`make_log_environment`.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit.nccl import log_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LOG_FILE_VARIABLES", "count_transport_lines", "find_log_files", "make_log_environment"]

# The variables that name the log files. NCCL and UCX replace %p by the process ID and %h by the host name.
LOG_FILE_VARIABLES = ("NCCL_DEBUG_FILE", "UCX_LOG_FILE")
# NCCL: "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", "Using network IB". UCX: "ep_cfg[0]: tag(tcp/lo rc_mlx5/mlx5_0:1)".
_TRANSPORT_LINE = re.compile(
    r"\b(?:Channel \d+/\d+ : .* via (?P<channel_transport>\S+)|Using network (?P<network>\S+)"
    r"|ep_cfg\[\d+\]: (?P<lanes>\w+\([^)]*\)))"
)
# count_transport_lines() reads at most the first 4 MiB of a log.
_READ_BYTES_MAX = 4 << 20


def make_log_environment(folder: Path) -> dict[str, str]:
    """Return the environment variables that make NCCL and UCX write logs with their transports into `folder`."""
    return {
        **log_environment(folder / "nccl.%p.log"),
        "UCX_LOG_LEVEL": "info",
        "UCX_LOG_FILE": str(folder / "ucx.%p.log"),
    }


def find_log_files(environment: Mapping[str, str], process_id: int, working_folder: str) -> list[Path]:
    """Return the paths of the log files that NCCL and UCX write in the process with this ID, environment and folder."""
    return [
        Path(working_folder, environment[name].replace("%p", str(process_id)).replace("%h", socket.gethostname()))
        for name in LOG_FILE_VARIABLES
        if environment.get(name)
    ]


def count_transport_lines(path: Path) -> dict[str, int]:
    """Return how many lines of a log name each transport; empty if the log cannot be read."""
    try:
        with path.open("rb") as file:
            text = file.read(_READ_BYTES_MAX).decode("utf-8", "backslashreplace")
    except OSError:
        return {}
    line_count_by_transport: dict[str, int] = {}
    for match in _TRANSPORT_LINE.finditer(text):
        if match["channel_transport"]:
            transport_text = f"NCCL: channels via {match['channel_transport']}"
        elif match["network"]:
            transport_text = f"NCCL: network {match['network']}"
        else:
            transport_text = f"UCX: {match['lanes']}"
        line_count_by_transport[transport_text] = line_count_by_transport.get(transport_text, 0) + 1
    return line_count_by_transport
