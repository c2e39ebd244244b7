"""Evidence from the log of NCCL: which registered memory NCCL used, and by which network the ranks are connected.

NCCL has no function that tells whether an operation used a registration. Only its log tells this, if NCCL_DEBUG is
INFO and NCCL_DEBUG_SUBSYS contains REG and NET. The lines have the format of NCCL 2.28 and 2.32.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from gdrkit.nccl.communicator import ReducibleMemory

__all__ = ["NcclLog", "log_environment"]

# NCCL prints such a line when an operation uses registered memory: "rank 0 - IPC register buffer 0x7f20 size 64 ..."
# or "... - NET reuse buffer 0x7f20 size 1048576 ..." or "... - COLLNET reuse register userbuff 0x7f20 (handle ...".
_REGISTRATION_USE_LINE = re.compile(
    r"\brank \d+ - (?P<transport>IPC|NET|NVLS|COLLNET) (?:reuse register|register|reuse) (?:user)?buff(?:er)? "
    r"0x(?P<address>[0-9a-f]+)"
)
# A line about a channel is "Channel 00/0 : 0[0] -> 1[1] [send] via NET/IB/0/GDRDMA".
_CHANNEL_LINE = re.compile(r"\bChannel \d+/\d+ : .* via (?P<transport>\S+)")
# The line about the network is "Using network IB".
_NETWORK_LINE = re.compile(r"\bUsing network (?P<name>\S+)")


def log_environment(path: Path) -> dict[str, str]:
    """Return the environment variables that make NCCL write to `path` the log that :meth:`NcclLog.read` reads.

    NCCL reads the variables at its first call. Set them earlier, or in the environment of a child process.
    """
    return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,REG", "NCCL_DEBUG_FILE": str(path)}


@dataclass(frozen=True)
class NcclLog:
    """The evidence in the log of one process.

    Attributes
    ----------
    network : str
        Name of the network plug-in that NCCL chose: ``IB``, ``Socket`` or the name of an external plug-in; empty if the
        log does not name it. Ranks of one host may be connected without the plug-in.
    channels : mapping
        Number of channels by transport, such as ``P2P/CUMEM`` or ``NET/IB/0/GDRDMA``.
    registration_uses : tuple
        One pair (transport, device address) for each use of registered memory. Transports are ``IPC`` for other GPUs
        of the host, ``NET``, ``NVLS`` and ``COLLNET``.
    """

    network: str
    channels: Mapping[str, int]
    registration_uses: tuple[tuple[str, int], ...]

    @classmethod
    def read(cls, path: Path) -> NcclLog:
        """Read a log file."""
        return cls.parse(path.read_text(encoding="utf-8", errors="replace"))

    @classmethod
    def parse(cls, text: str) -> NcclLog:
        """Extract the evidence from the text of a log. Unknown lines are ignored."""
        network, channels, registration_uses = "", Counter[str](), []
        for line in text.splitlines():
            if match := _NETWORK_LINE.search(line):
                network = match["name"]
            elif match := _CHANNEL_LINE.search(line):
                channels[match["transport"]] += 1
            elif match := _REGISTRATION_USE_LINE.search(line):
                registration_uses.append((match["transport"], int(match["address"], 16)))
        return cls(network, dict(channels), tuple(registration_uses))

    def transports_using(self, memory: ReducibleMemory) -> frozenset[str]:
        """Return the transports that used a registration of `memory` or of a part of it; empty if none did."""
        return self.transports_using_range(memory.address, memory.length_bytes)

    def transports_using_range(self, address: int, length_bytes: int) -> frozenset[str]:
        """Return the transports that used a registration in the device addresses [address, address + length_bytes)."""
        end_address = address + length_bytes
        return frozenset(
            transport for transport, used_address in self.registration_uses if address <= used_address < end_address
        )
