"""Import and replay of a hostile capture take a limited time, and at most 256 MiB more memory than an empty capture.

Each case runs a command (`gdrkit doctor`, `gdrkit topology`, `gdrkit facts`) on the capture in a new process, and
compares its peak memory with the peak memory of the same command on an empty capture.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
from functools import cache
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# A hostile capture may add at most this much to the peak memory of the same command on an empty capture.
GROWTH_MAX_BYTES = 256 << 20
# Limit of the processor time of a command. Elapsed time would depend on the load of the machine.
CPU_TIME_MAX_S = 30
EMPTY_CAPTURE = {"schema_version": 1, "origin": "a case", "answers": {}}
# This program runs a command of gdrkit, and prints peak memory, processor time and exit code to standard error.
MEASURED_PROGRAM = """
import re, sys, time
from gdrkit.cli import main
try:
    main(sys.argv[1:])
except SystemExit as exit_error:
    # getrusage would include the peak of the parent process.
    with open("/proc/self/status") as status:
        peak_kib = re.search(r"VmHWM:\\s*(\\d+) kB", status.read())[1]
    print("peak", peak_kib, time.process_time(), exit_error.code, file=sys.stderr)
"""


def measure_command(*arguments: str) -> tuple[int, int, str]:
    """Run a command, check its processor time, and return its peak memory in bytes, its exit code and its messages."""
    command = [sys.executable, "-c", MEASURED_PROGRAM, *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    *messages, last_line = process.stderr.splitlines()
    marker, peak_kib, cpu_s, exit_code = last_line.split()
    assert marker == "peak", process.stderr
    assert float(cpu_s) <= CPU_TIME_MAX_S
    return int(peak_kib) << 10, int(exit_code), "\n".join(messages)


@cache
def measure_baseline_peak(command: str) -> int:
    """Return the peak memory of a command on the empty capture, in bytes."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(json.dumps(EMPTY_CAPTURE))
        file.flush()
        return measure_command(command, "--replay", file.name)[0]


def make_capture_with_reads(**fields: object) -> bytes:
    """Return a capture whose recorded reads have these fields, for example `texts` or `links`."""
    return json.dumps({**EMPTY_CAPTURE, "answers": fields}, ensure_ascii=False).encode()


def make_capture_with_list(element: bytes, count: int) -> bytes:
    """Return a capture with a JSON list that contains `element` many times."""
    return b'{"schema_version": 1, "origin": [' + (element + b",") * count + element + b'], "answers": {}}'


def make_pci_addresses(count: int) -> list[str]:
    """Return `count` different PCI addresses."""
    return [f"{index >> 8:06x}:{index & 255:02x}:00.0" for index in range(count)]


def make_capture_with_functions(count: int, class_code: str = "0x030200") -> bytes:
    """Return a capture with `count` PCI functions of a class."""
    addresses = [f"0000:{index >> 8:02x}:{index >> 3 & 31:02x}.{index & 7}" for index in range(count)]
    texts = {
        f"/sys/bus/pci/devices/{address}/{name}": content
        for address in addresses
        for name, content in (("vendor", "0x10de"), ("device", "0x1"), ("class", class_code))
    }
    return make_capture_with_reads(texts=texts, folders={"/sys/bus/pci/devices": addresses})


def make_topology_xml(content: bytes) -> bytes:
    """Return a topology XML of NCCL with one CPU that has this content."""
    return b'<system><cpu numaid="0">' + content + b"</cpu></system>"


def make_lspci_output(count: int, line: str) -> bytes:
    """Return an output of lspci with one function and `count` lines about it."""
    return ("01:00.0 3D controller: NVIDIA Corporation Device 2330\n" + f"{line}\n" * count).encode()


def make_topology_with_bridges(bridges_count: int, leaves_count: int) -> bytes:
    """Return a topology XML with `leaves_count` functions below a chain of `bridges_count` bridges."""
    bridge_elements = b"".join(b'<pci busid="0000:%02x:00.0" class="0x060400">' % bus for bus in range(bridges_count))
    content = b"".join(b'<pci busid="%04x:ff:%02x.0"/>' % divmod(index, 256) for index in range(leaves_count))
    return make_topology_xml(bridge_elements + content + b"</pci>" * bridges_count)


HOSTILE_CAPTURES: dict[str, Callable[[], bytes]] = {
    # The length is 80 MB before compression.
    "millions of lists": lambda: gzip.compress(make_capture_with_list(b"[]", 80_000_000 // 3), 1),
    "as many lists as allowed": lambda: make_capture_with_list(b"[]", 149_000),
    "objects": lambda: make_capture_with_list(b'{"a":1}', 2_000_000),
    "strings": lambda: make_capture_with_list(b'"ab"', 3_000_000),
    "numbers": lambda: make_capture_with_list(b"1e9", 4_000_000),
    "deep": lambda: b"[" * 5_000_000,
    "wide text": lambda: make_capture_with_reads(texts={"/a": "\N{GRINNING FACE}" + "a" * 15_000_000}),
    "unterminated string": lambda: b'{"a": "' + b'\\"' * 7_000_000,
    "UTF-16": lambda: json.dumps(EMPTY_CAPTURE).encode("utf-16-le"),
    "lone surrogates": lambda: make_capture_with_reads(texts={"/a": "x"}).replace(b"x", b"\\ud800" * 1_000_000),
    "a folder of many names": lambda: make_capture_with_reads(
        folders={"/sys/bus/pci/devices": make_pci_addresses(150_000)}
    ),
    "links of long paths": lambda: make_capture_with_reads(links={"/a": "/b" * 5_000_000, "/b": "/a" * 1000}),
    "functions": lambda: make_capture_with_functions(20_000),
    "GPUs": lambda: make_capture_with_functions(4000),
    "as many GPUs as allowed": lambda: make_capture_with_functions(512),
    "functions that are not GPUs": lambda: make_capture_with_functions(4000, class_code="0x010000"),
    "mounts": lambda: make_capture_with_reads(
        texts={
            "/proc/self/mountinfo": "".join(
                f"{index} 1 8:{index} / /m{index} rw - ext4 /dev/sda rw\n" for index in range(200_000)
            )
        }
    ),
    "RDMA devices": lambda: make_capture_with_reads(
        folders={"/sys/class/infiniband": [f"mlx5_{index}" for index in range(150_000)]}
    ),
    "elements": lambda: make_topology_xml(b"<a/>" * 1_900_000),
    "nested elements": lambda: make_topology_xml(b"<a>" * 190_000 + b"</a>" * 9000),
    "attributes": lambda: make_topology_xml(
        b"<pci " + b" ".join(b'a%06x=""' % index for index in range(700_000)) + b"/>"
    ),
    "XML in EBCDIC": lambda: (
        b'<?xml version="1.0" encoding="cp037"?>' + make_topology_xml(b"<a/>" * 1_900_000).decode().encode("cp037")
    ),
    "bridges above functions": lambda: make_topology_with_bridges(30, 4000),
    "lines of lspci": lambda: make_lspci_output(7_000_000, " "),
    "long lines of lspci": lambda: make_lspci_output(1, " Speed " + "1" * 15_000_000),
    "functions of lspci": lambda: b"".join(
        b"%04x:01:00.0 3D controller: NVIDIA\n\tMaxReadReq 512 bytes\n" % index for index in range(4000)
    ),
    "bytes": lambda: gzip.compress(b" " * (300 << 20), 1),
}


# Captures that gdrkit accepts. The cases run all commands on them. Every command refuses the other captures in the same
# way, so the cases run only one command on them.
ACCEPTED_CAPTURES = (
    "as many GPUs as allowed",
    "functions that are not GPUs",
    "mounts",
    "bridges above functions",
    "wide text",
)
CASES = [
    *((capture_name, "doctor") for capture_name in HOSTILE_CAPTURES),
    *((capture_name, command) for capture_name in ACCEPTED_CAPTURES for command in ("topology", "facts")),
]


@pytest.mark.parametrize(("capture_name", "command"), CASES)
def test_hostile_capture_has_bounded_cost(tmp_path: Path, capture_name: str, command: str) -> None:
    baseline_bytes = measure_baseline_peak(command)
    capture_path = tmp_path / "capture"
    capture_path.write_bytes(HOSTILE_CAPTURES[capture_name]())
    peak_bytes, exit_code, messages = measure_command(command, "--replay", str(capture_path))
    assert peak_bytes - baseline_bytes <= GROWTH_MAX_BYTES, f"{(peak_bytes - baseline_bytes) >> 20} MiB"
    # A command that refuses a capture exits with code 2 and prints one line.
    assert len(messages.splitlines()) == (1 if exit_code == 2 else 0), messages[:1000]
    assert exit_code in (0, 1, 2, 4)
