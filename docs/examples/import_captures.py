"""Examine a machine from files: the output of lspci, a topology file of NCCL, a copy of /proc and /sys."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from gdrkit.inventory import captured_machine, topology
from gdrkit.inventory.importers import import_folder, import_lspci, import_nccl_topology

LSPCI_OUTPUT = b"""\
0000:17:00.0 Infiniband controller [0207]: Mellanox Technologies MT2910 Family [ConnectX-7] [15b3:1021]
\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM not supported
\tLnkSta:\tSpeed 32GT/s, Width x16
"""
NCCL_TOPOLOGY = b"""\
<system version="1">
  <cpu numaid="0" affinity="ffff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:17:00.0" class="0x020700" link_speed="32.0 GT/s PCIe" link_width="16"/>
  </cpu>
</system>
"""

with TemporaryDirectory() as folder_name:
    folder = Path(folder_name)
    (folder / "proc" / "sys" / "kernel").mkdir(parents=True)
    (folder / "proc" / "sys" / "kernel" / "osrelease").write_text("6.1.0\n")
    (folder / "sys").mkdir()
    captures = (
        import_lspci(LSPCI_OUTPUT),
        import_nccl_topology(NCCL_TOPOLOGY),
        import_folder(folder),
    )
    for capture in captures:
        places = topology(captured_machine(capture)).places
        print(capture.origin, [place.address for place in places])
