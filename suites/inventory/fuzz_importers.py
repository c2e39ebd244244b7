"""Fuzz targets of the capture importers: ``python -m inventory.fuzz_importers nccl|lspci|folder|capture --seconds 10``.

An importer may refuse an input with its documented error (UsageError, Reason.MALFORMED). For every input that an
importer accepts, the facts, the topology and the diagnosis must be computed without an error.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from support import fuzz

from gdrkit.errors import Reason, UsageError
from gdrkit.inventory import (
    Capture,
    capture,
    capture_file,
    captured_machine,
    diagnose,
    parse_capture,
    read_capture,
    topology,
)
from gdrkit.inventory.importers import folder, functions, lspci, nccl

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TARGETS"]

_TOPOLOGY_XML = b"""<system version="1"><cpu numaid="0" arch="x86_64">
<pci busid="0000:1a:00.0" class="0x060400" vendor="0x1000" link_speed="32.0 GT/s PCIe" link_width="16">
<pci busid="0000:20:00.0" class="0x030200" vendor="0x10de" device="0x2330"><gpu dev="0" sm="90"/></pci>
<pci busid="0000:21:00.0" class="0x020700"><nic><net name="mlx5_0" port="1" gdr="1"/></nic></pci>
</pci></cpu><cpu numaid="1"><pci busid="0000:30:00.0" class="0x030200"/></cpu></system>"""
_LSPCI_OUTPUT = b"""0000:00:01.0 PCI bridge [0604]: Intel Corporation Device 352a (rev 30)
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
# A description of a copied folder of sysfs. Each line has a path, a space, and the contents of the file. For a link,
# "@" and the target follow the space.
_COPIED_TREE = b"""mlx5_0/ports/1/state 4: ACTIVE
mlx5_0/ports/1/phys_state 5: LinkUp
mlx5_0/ports/1/rate 400 Gb/sec (4X NDR)
mlx5_0/ports/1/link_layer InfiniBand
mlx5_0/ports/1/counters/link_downed 255
mlx5_0/fw_ver 28.41.1000
mlx5_0/device @../../../devices/pci0000:00/0000:00:01.0
mlx5_1/ports/1/state @../../../mlx5_0/ports/1/state
"""
_CAPTURE_JSON = json.dumps(
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
# Words that the fuzzer may insert into an input.
_TOKENS = (
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


def _import_and_examine(import_capture: Callable[[bytes], Capture], input_bytes: bytes) -> None:
    """Import the input, and compute facts, topology and diagnosis of the captured machine."""
    try:
        imported_capture = import_capture(input_bytes)
    except UsageError as error:
        if error.reason is not Reason.MALFORMED:
            raise
        return
    machine = captured_machine(imported_capture)
    topology(machine).to_json()
    diagnose(machine).to_json()
    machine.facts.to_json()


def _import_folder(tree_description: bytes) -> Capture:
    root = Path(tempfile.mkdtemp(prefix="gdrkit-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))  # noqa: S108, PTH112
    try:
        _write_tree(root / "tree", tree_description)
        return read_capture(root / "tree")
    finally:
        shutil.rmtree(root)


def _write_tree(root: Path, tree_description: bytes) -> None:
    """Write the files and links of a description with the format of _COPIED_TREE. Limit their number and depth."""
    (root / "mlx5_0" / "ports").mkdir(parents=True)
    for line in tree_description.split(b"\n")[:40]:
        relative_path, _, content = line.partition(b" ")
        names = [name for name in relative_path.split(b"/") if name not in (b"", b".", b"..")][:12]
        if not names or any(len(name) > 200 or b"\0" in name for name in names):
            continue
        path = os.path.join(os.fsencode(root), *names)  # noqa: PTH118 - the names are bytes.
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
            if content.startswith(b"@") and b"\0" not in content and len(content) > 1:
                os.symlink(content[1:4000], path)  # noqa: PTH211
            elif not os.path.lexists(path):
                Path(os.fsdecode(path)).write_bytes(content)
        except OSError:
            continue  # A parent of the path is a file, or the path is a folder. The tree lacks this path.


def _make_target(import_capture: Callable[[bytes], Capture], valid_input: bytes) -> fuzz.FuzzTarget:
    return fuzz.FuzzTarget(
        partial(_import_and_examine, import_capture),
        [valid_input],
        (nccl, lspci, folder, functions, capture, capture_file),
        change_count_range=(1, 6),
        alphabet=b"0123456789abcdef:.,x<>[]{}",
        tokens=_TOKENS,
        length_max_bytes=4096,
    )


TARGETS = {
    "nccl": _make_target(parse_capture, _TOPOLOGY_XML),
    "lspci": _make_target(parse_capture, _LSPCI_OUTPUT),
    "folder": _make_target(_import_folder, _COPIED_TREE),
    "capture": _make_target(parse_capture, _CAPTURE_JSON),
}

if __name__ == "__main__":
    fuzz.main(TARGETS)
