"""Importers, which make captures of NCCL's topology XML, of the text of lspci, and of a copied tree of sysfs.

An importer stores each value under the path that it has in sysfs, so that readers and rules do not know its origin. For
a value that the file does not state, the capture fails with ENODATA; it never reports such a value as absent. The
import of a topology XML needs defusedxml, which is loaded only for that.
"""

from __future__ import annotations

from gdrkit.inventory.importers.folder import import_folder
from gdrkit.inventory.importers.lspci import import_lspci
from gdrkit.inventory.importers.nccl import import_nccl_topology

__all__ = ["import_folder", "import_lspci", "import_nccl_topology"]
