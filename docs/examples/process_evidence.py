"""Evidence about this process and this kernel: loaded libraries, open devices, ELF notes, counters, the kernel log."""

from __future__ import annotations

import sys
from pathlib import Path

from gdrkit import cuda, evidence, host

tree = host.HostTree()
cuda.device_count()  # This call loads libcuda.
for library in evidence.libraries(tree):
    if library.soname and library.soname.startswith("libcuda"):
        print(library.soname, library.build_id, [note.owner for note in library.notes])
        assert evidence.describe_library(library.path).build_id == library.build_id

elf = evidence.read_elf(sys.executable)
print("build id of Python:", elf.build_id)
assert evidence.parse_elf(Path(sys.executable).read_bytes(), name="python") == elf

print(len(evidence.descriptor_targets()), "descriptors,", len(evidence.device_nodes()), "open devices")
print("counters:", host.port_counters(tree))
print("kernel log:", evidence.kernel_log(tree, records_max=10).unreadable or "readable")
print("reasons why RDMA evidence is missing:", evidence.kernel_evidence().rdma_missing)
