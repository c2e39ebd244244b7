"""`NcclLog` finds in the log of NCCL which registered memory NCCL used, and which network connects the ranks.

The log lines of the cases have the formats of NCCL 2.28.9 and 2.32.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from gdrkit import nccl

if TYPE_CHECKING:
    from pathlib import Path

LINE_PREFIX = "host:70:81 [0] NCCL INFO "
BUFFER_ADDRESS = 0x7F4A20000000


@dataclass
class MemoryRange:
    """A range of device addresses."""

    address: int
    length_bytes: int


@pytest.mark.parametrize(
    ("line_format", "transport"),
    [
        ("rank 0 - IPC register buffer 0x{:x} size 64 (baseAddr 0x1 size 9) to peer 1 regAddr 0x2 offsetOut 0", "IPC"),
        (
            "rank 0 - IPC register buffer 0x{:x} size 64 (baseAddr 0x1 totalSize 9 numSegments 1) to peer 1 regAddr",
            "IPC",
        ),
        ("rank 3 - IPC reuse buffer 0x{:x} size 64 (baseAddr 0x1 size 9) to peer 1 regAddr 0x2", "IPC"),
        ("rank 0 - NET register userbuff 0x{:x} (handle 0x55), buffSize 64", "NET"),
        ("rank 0 - NET reuse buffer 0x{:x} size 64 (baseAddr 0x1 size 9) handle 0x55", "NET"),
        ("rank 0 - COLLNET reuse register userbuff 0x{:x} (handle 0x55), buffSize 64, type send", "COLLNET"),
    ],
)
def test_use_of_registered_memory_is_found(line_format: str, transport: str) -> None:
    log = nccl.NcclLog.parse(LINE_PREFIX + line_format.format(BUFFER_ADDRESS))
    assert log.registration_uses == ((transport, BUFFER_ADDRESS),)
    # The use counts only for a range that contains the address of the buffer.
    assert log.transports_using(MemoryRange(BUFFER_ADDRESS, 1)) == {transport}
    assert log.transports_using(MemoryRange(BUFFER_ADDRESS - 64, 65)) == {transport}
    assert (
        log.transports_using(MemoryRange(BUFFER_ADDRESS - 64, 64))
        == log.transports_using(MemoryRange(BUFFER_ADDRESS + 1, 64))
        == frozenset()
    )


@pytest.mark.parametrize(
    "line",
    [
        "register comm 0x1 buffer 0x7f4a20000000 size 64",
        "Skipping registration for buffer 0x7f4a20000000 size 64 (LocalRegister=0, P2pUsesMemcpy=0)",
        "rank 0 - IPC registering buffer 0x7f4a20000000 size 64 (baseAddr 0x1 size 9) to peer 1",
        "rank 0 - IPC deregistered buffer 0x7f4a20000000 peer 1 ipc remote buffer 0x2",
        "rank 0 - COLLNET failed to register userbuff 0x7f4a20000000, buffSize 64, type send, GDR 0",
        "rank 0 - NET register userbuff (nil)",
    ],
)
def test_attempt_is_not_a_use(line: str) -> None:
    assert nccl.NcclLog.parse(LINE_PREFIX + line).registration_uses == ()


def test_network_and_channels_are_counted(tmp_path: Path) -> None:
    lines = [
        "Using network IB",
        "Channel 00/0 : 0[0] -> 1[1] [send] via NET/IB/0/GDRDMA",
        "Channel 01/0 : 0[0] -> 1[1] [send] via NET/IB/0/GDRDMA",
        "Channel 00/0 : 1[1] -> 0[0] [receive] via NET/IB/1",
        "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM",
        "a line of another version",
    ]
    path = tmp_path / "log"
    # The last line is not UTF-8. It is ignored.
    path.write_bytes("\n".join(LINE_PREFIX + line for line in lines).encode() + b"\nChannel \xff\n")
    log = nccl.NcclLog.read(path)
    assert log.network == "IB"
    assert log.channels == {"NET/IB/0/GDRDMA": 2, "NET/IB/1": 1, "P2P/CUMEM": 1}


def test_log_environment_has_the_subsystems(tmp_path: Path) -> None:
    environment = nccl.log_environment(tmp_path / "log")
    assert environment["NCCL_DEBUG"] == "INFO"
    assert {"REG", "NET", "INIT"} <= set(environment["NCCL_DEBUG_SUBSYS"].split(","))
    assert environment["NCCL_DEBUG_FILE"] == str(tmp_path / "log")
