"""Importers, which make captures of NCCL's topology XML, of the output of lspci, and of a copied tree of sysfs.

An importer stores each value under its path in sysfs, so that readers and rules do not depend on the origin of a
capture. If the imported file does not contain a value, a read of the value fails with ENODATA ("unknown") and not with
ENOENT ("does not exist"). Only the import of a topology XML loads defusedxml.
"""

from __future__ import annotations

from gdrkit.inventory.importers.folder import import_folder
from gdrkit.inventory.importers.lspci import import_lspci
from gdrkit.inventory.importers.nccl import import_nccl_topology

__all__ = ["import_folder", "import_lspci", "import_nccl_topology"]
