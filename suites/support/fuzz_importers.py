"""Feeds an importer with whatever a fuzzer comes up with: ``fuzz_importers.py nccl|lspci|folder|capture --seconds 10``.

What is not refused must be readable to its end: facts, topology and doctor are made of it. atheris guides it by
coverage where it is installed for this Python (PyPI: ``atheris``); elsewhere right inputs are changed at random.
Either way a run ends with 0 and one line that says which it was and how many inputs it saw, or with what an input
raised besides its documented refusal.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gdrkit.errors import Reason, UsageError
from gdrkit.inventory import Capture, capture, capture_file, diagnose, parse_capture, read_capture, replayed, topology
from gdrkit.inventory.importers import folder, functions, lspci, nccl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["IMPORTERS", "RIGHT", "changed", "main"]

_XML = b"""<system version="1"><cpu numaid="0" arch="x86_64">
<pci busid="0000:1a:00.0" class="0x060400" vendor="0x1000" link_speed="32.0 GT/s PCIe" link_width="16">
<pci busid="0000:20:00.0" class="0x030200" vendor="0x10de" device="0x2330"><gpu dev="0" sm="90"/></pci>
<pci busid="0000:21:00.0" class="0x020700"><nic><net name="mlx5_0" port="1" gdr="1"/></nic></pci>
</pci></cpu><cpu numaid="1"><pci busid="0000:30:00.0" class="0x030200"/></cpu></system>"""
_TEXT = b"""0000:00:01.0 PCI bridge [0604]: Intel Corporation Device 352a (rev 30)
\tNUMA node: 0
\tIOMMU group: 4
\tBus: primary=00, secondary=01, subordinate=03, sec-latency=0
\t\t\tMaxPayload 512 bytes, MaxReadReq 512 bytes, RlxdOrd+
\t\tLnkCap:\tPort #1, Speed 32GT/s, Width x16
\t\tLnkSta:\tSpeed 16GT/s (downgraded), Width x8 (downgraded)
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir- UpstreamFwd+
\tKernel driver in use: pcieport

01:00.0 3D controller: NVIDIA Corporation Device 2330 (rev a1)
\t\tATSCtl:\tEnable-, Smallest Translation Unit: 00
02:00.0 Infiniband controller: Mellanox Technologies MT2910 [15b3:1021]
\tCapabilities: <access denied>
"""
# Of a copied tree: a path or a link a line, and behind the first blank what is in it.
_TREE = b"""mlx5_0/ports/1/state 4: ACTIVE
mlx5_0/ports/1/phys_state 5: LinkUp
mlx5_0/ports/1/rate 400 Gb/sec (4X NDR)
mlx5_0/ports/1/link_layer InfiniBand
mlx5_0/ports/1/counters/link_downed 255
mlx5_0/fw_ver 28.41.1000
mlx5_0/device @../../../devices/pci0000:00/0000:00:01.0
mlx5_1/ports/1/state @../../../mlx5_0/ports/1/state
"""
_CAPTURE = json.dumps(
    {
        "schema_version": 1,
        "origin": "a case",
        "answers": {
            "texts": {"/sys/devices/pci0000:00/0000:00:01.0/vendor": "0x10de", "/proc/cmdline": "iommu=pt"},
            "binaries": {"/sys/devices/pci0000:00/0000:00:01.0/config": "AAAAAAAAEAA="},
            "folders": {"/sys/bus/pci/devices": ["0000:00:01.0"], "/sys": ["bus", "class"]},
            "links": {"/sys/bus/pci/devices/0000:00:01.0": "../../../devices/pci0000:00/0000:00:01.0"},
            "lines": {"/proc/cpuinfo|flags": ["flags : hypervisor"]},
            "refused": {"read": {"/proc/driver/nvidia/params": 13}},
        },
    }
).encode()
RIGHT = {"nccl": _XML, "lspci": _TEXT, "folder": _TREE, "capture": _CAPTURE}
_WORDS = (
    b"<pci busid=",
    b"</pci>",
    b"..",
    b"/",
    b"0000:1a:00.0",
    b"\tBus: primary=00, secondary=00,",
    b"@",
    b"[0302]",
    b'"',
)


def _judged(found: Capture) -> None:
    """Everything that is made of a capture."""
    machine = replayed(found)
    topology(machine).to_json()
    diagnose(machine).to_json()
    machine.facts.to_json()


def _bytes(data: bytes) -> Capture:
    return parse_capture(data)


def _folder(data: bytes) -> Capture:
    place = Path(tempfile.mkdtemp(prefix="gdrkit-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))  # noqa: S108, PTH112
    try:
        _write_tree(place / "tree", data)
        return read_capture(place / "tree")
    finally:
        shutil.rmtree(place)


def _write_tree(root: Path, data: bytes) -> None:
    (root / "mlx5_0" / "ports").mkdir(parents=True)
    for line in data.split(b"\n")[:40]:
        name, _, content = line.partition(b" ")
        parts = [part for part in name.split(b"/") if part not in (b"", b".", b"..")][:12]
        if not parts or any(len(part) > 200 or b"\0" in part for part in parts):
            continue
        path = os.path.join(os.fsencode(root), *parts)  # noqa: PTH118 - names of bytes.
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
            if content.startswith(b"@") and b"\0" not in content and len(content) > 1:
                os.symlink(content[1:4000], path)  # noqa: PTH211
            elif not os.path.lexists(path):
                Path(os.fsdecode(path)).write_bytes(content)
        except OSError:
            continue  # A file where a folder was to be, or the other way round: then it is not in this tree.


IMPORTERS: dict[str, Callable[[bytes], Capture]] = {
    "nccl": _bytes,
    "lspci": _bytes,
    "folder": _folder,
    "capture": _bytes,
}


def one_input(importer: str, data: bytes) -> None:
    """Import it; only its documented refusal may come, and what is not refused can be read."""
    try:
        found = IMPORTERS[importer](data)
    except UsageError as error:
        if error.reason is not Reason.MALFORMED:
            raise
        return
    _judged(found)


def changed(importer: str, chance: random.Random, count: int | None = None) -> Iterator[bytes]:
    """The right input, changed at random in up to six places; so many, or without end."""
    for _ in itertools.repeat(None) if count is None else range(count):
        data = bytearray(RIGHT[importer])
        for _change in range(chance.randint(1, 6)):
            at = chance.randrange(len(data) + 1)
            match chance.randrange(5):
                case 0:
                    data[at : at + 1] = chance.randbytes(1)
                case 1:
                    data[at:at] = chance.choice(_WORDS)
                case 2:
                    del data[at : at + chance.randint(1, 20)]
                case 3:
                    begin = chance.randrange(len(data) + 1)
                    data[at:at] = data[begin : begin + chance.randint(1, 120)]
                case _:
                    data[at : at + 1] = bytes([chance.choice(b"0123456789abcdef:.,x<>[]{}")])
        yield bytes(data)


def _by_atheris(importer: str, seconds: float, seed: int) -> NoReturn:
    atheris = importlib.import_module("atheris")
    for module in (nccl, lspci, folder, functions, capture, capture_file):
        for member in vars(module).values():
            if inspect.isfunction(member) and member.__module__ == module.__name__:
                atheris.instrument_func(member)
    with tempfile.TemporaryDirectory() as corpus:
        Path(corpus, "right").write_bytes(RIGHT[importer])
        options = [f"-max_total_time={max(1, round(seconds))}", f"-seed={seed}", "-max_len=4096", "-verbosity=0"]
        atheris.Setup([sys.argv[0], *options, corpus], lambda data: one_input(importer, data))
        # Ends the process: with 0 after that time, with 77 at the first input that raised.
        atheris.Fuzz()
    sys.exit(0)


def _by_chance(importer: str, seconds: float, seed: int) -> int:
    end, count = time.monotonic() + seconds, 0
    for data in changed(importer, random.Random(seed)):
        if time.monotonic() >= end:
            break
        one_input(importer, data)
        count += 1
    return count


def main() -> None:
    """Fuzz for so long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("importer", choices=IMPORTERS)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    # Half of the time each: what is changed at random stays near to what is right, atheris goes anywhere.
    has_atheris = importlib.util.find_spec("atheris") is not None
    share_s = options.seconds / 2 if has_atheris else options.seconds
    one_input(options.importer, RIGHT[options.importer])
    count = _by_chance(options.importer, share_s, options.seed)
    guided = f"and then atheris for {share_s:g} s" if has_atheris else "atheris is not installed for this Python"
    print(f"{count} changed inputs in {share_s:g} s; {guided}", flush=True)  # noqa: T201
    if has_atheris:
        _by_atheris(options.importer, share_s, options.seed)


if __name__ == "__main__":
    main()
