"""What others saved of a machine, as a capture: NCCL's topology, the text of lspci, a copied tree of sysfs.

Level 4. An importer writes down what the file says at the place where sysfs has it, so that readers and rules do not
know where it came from. What a file does not say stays unsaid: a capture answers ENODATA there, and not "none".
A topology needs defusedxml, which is imported when there is one to read.
"""

from __future__ import annotations

from gdrkit.inventory.importers.folder import import_folder
from gdrkit.inventory.importers.lspci import import_lspci
from gdrkit.inventory.importers.nccl import import_nccl_topology

__all__ = ["import_folder", "import_lspci", "import_nccl_topology"]
