"""A hostile capture has a bounded cost: to import and replay it takes at most 256 MiB and a limited time.

Each case runs a command (`gdrkit doctor`, `gdrkit topology`, `gdrkit facts`) on the capture in a process of its own,
whose peak memory is compared with that of the same command on an empty capture.
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

GROWTH_MAX_BYTES = 256 << 20
# Limit of processor time. The elapsed time depends on what else the machine does.
TIME_MAX_S = 30
SMALLEST = {"schema_version": 1, "origin": "a case", "answers": {}}
# The program reports the exit code of the command. 1 means that the doctor found a cause.
PROGRAM = """
import re, sys, time
from gdrkit.cli import main
try:
    main(sys.argv[1:])
except SystemExit as ended:
    # getrusage would include the peak of the parent process.
    with open("/proc/self/status") as status:
        peak_kib = re.search(r"VmHWM:\\s*(\\d+) kB", status.read())[1]
    print("peak", peak_kib, time.process_time(), ended.code, file=sys.stderr)
"""


def peak_bytes(*arguments: str) -> tuple[int, int, str]:
    """Run a command and return its peak memory in bytes, its exit code and its standard error."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    *messages, last = done.stderr.splitlines()
    word, peak_kib, cpu_s, code = last.split()
    assert word == "peak", done.stderr
    assert float(cpu_s) <= TIME_MAX_S
    return int(peak_kib) << 10, int(code), "\n".join(messages)


@cache
def baseline_bytes(command: str) -> int:
    """Return the peak memory of a command on the smallest capture."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(json.dumps(SMALLEST))
        file.flush()
        return peak_bytes(command, "--replay", file.name)[0]


def with_answers(**answers: object) -> bytes:
    return json.dumps({**SMALLEST, "answers": answers}, ensure_ascii=False).encode()


def repeated(part: bytes, count: int) -> bytes:
    """Return a capture with a JSON list that repeats `part`."""
    return b'{"schema_version": 1, "origin": [' + (part + b",") * count + part + b'], "answers": {}}'


def names(count: int) -> list[str]:
    return [f"{number >> 8:06x}:{number & 255:02x}:00.0" for number in range(count)]


def functions(count: int, class_code: str = "0x030200") -> bytes:
    """Return a capture with `count` PCI functions of a class."""
    addresses = [f"0000:{number >> 8:02x}:{number >> 3 & 31:02x}.{number & 7}" for number in range(count)]
    texts = {
        f"/sys/bus/pci/devices/{address}/{name}": text
        for address in addresses
        for name, text in (("vendor", "0x10de"), ("device", "0x1"), ("class", class_code))
    }
    return with_answers(texts=texts, folders={"/sys/bus/pci/devices": addresses})


def xml(inside: bytes) -> bytes:
    return b'<system><cpu numaid="0">' + inside + b"</cpu></system>"


def lspci(count: int, line: str) -> bytes:
    """Return an output of lspci with one function and `count` lines about it."""
    return ("01:00.0 3D controller: NVIDIA Corporation Device 2330\n" + f"{line}\n" * count).encode()


def bridges(depth: int, leaves: int) -> bytes:
    """Return a topology XML with many functions below a chain of bridges."""
    opened = b"".join(b'<pci busid="0000:%02x:00.0" class="0x060400">' % bus for bus in range(depth))
    inside = b"".join(b'<pci busid="%04x:ff:%02x.0"/>' % divmod(number, 256) for number in range(leaves))
    return xml(opened + inside + b"</pci>" * depth)


FILES: dict[str, Callable[[], bytes]] = {
    "a million lists": lambda: gzip.compress(repeated(b"[]", 80_000_000 // 3), 1),
    "as many lists as allowed": lambda: repeated(b"[]", 149_000),
    "objects": lambda: repeated(b'{"a":1}', 2_000_000),
    "strings": lambda: repeated(b'"ab"', 3_000_000),
    "numbers": lambda: repeated(b"1e9", 4_000_000),
    "deep": lambda: b"[" * 5_000_000,
    "wide text": lambda: with_answers(texts={"/a": "\N{GRINNING FACE}" + "a" * 15_000_000}),
    "unterminated string": lambda: b'{"a": "' + b'\\"' * 7_000_000,
    "UTF-16": lambda: json.dumps(SMALLEST).encode("utf-16-le"),
    "lone surrogates": lambda: with_answers(texts={"/a": "x"}).replace(b"x", b"\\ud800" * 1_000_000),
    "a folder of many names": lambda: with_answers(folders={"/sys/bus/pci/devices": names(150_000)}),
    "links of long paths": lambda: with_answers(links={"/a": "/b" * 5_000_000, "/b": "/a" * 1000}),
    "functions": lambda: functions(20_000),
    "GPUs": lambda: functions(4000),
    "as many GPUs as allowed": lambda: functions(512),
    "functions that are not GPUs": lambda: functions(4000, class_code="0x010000"),
    "mounts": lambda: with_answers(
        texts={"/proc/self/mountinfo": "".join(f"{n} 1 8:{n} / /m{n} rw - ext4 /dev/sda rw\n" for n in range(200_000))}
    ),
    "RDMA devices": lambda: with_answers(folders={"/sys/class/infiniband": [f"mlx5_{n}" for n in range(150_000)]}),
    "elements": lambda: xml(b"<a/>" * 1_900_000),
    "nested elements": lambda: xml(b"<a>" * 190_000 + b"</a>" * 9000),
    "attributes": lambda: xml(b"<pci " + b" ".join(b'a%06x=""' % n for n in range(700_000)) + b"/>"),
    "XML in EBCDIC": lambda: (
        b'<?xml version="1.0" encoding="cp037"?>' + xml(b"<a/>" * 1_900_000).decode().encode("cp037")
    ),
    "bridges above functions": lambda: bridges(30, 4000),
    "lines of lspci": lambda: lspci(7_000_000, " "),
    "long lines of lspci": lambda: lspci(1, " Speed " + "1" * 15_000_000),
    "functions of lspci": lambda: b"".join(
        b"%04x:01:00.0 3D controller: NVIDIA\n\tMaxReadReq 512 bytes\n" % number for number in range(4000)
    ),
    "bytes": lambda: gzip.compress(b" " * (300 << 20), 1),
}


# Every command refuses a capture in the same way.
ACCEPTED = ("as many GPUs as allowed", "functions that are not GPUs", "mounts", "bridges above functions", "wide text")
CASES = [
    *((name, "doctor") for name in FILES),
    *((name, command) for name in ACCEPTED for command in ("topology", "facts")),
]


@pytest.mark.parametrize(("name", "command"), CASES)
def test_hostile_capture_has_bounded_cost(tmp_path: Path, name: str, command: str) -> None:
    baseline = baseline_bytes(command)
    file = tmp_path / "capture"
    file.write_bytes(FILES[name]())
    peak, code, messages = peak_bytes(command, "--replay", str(file))
    assert peak - baseline <= GROWTH_MAX_BYTES, f"{(peak - baseline) >> 20} MiB"
    # A refused capture causes one line.
    assert len(messages.splitlines()) == (1 if code == 2 else 0), messages[:1000]
    assert code in (0, 1, 2, 4)
