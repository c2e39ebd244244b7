"""Puts a defect back into every Python process that is started with it: ``GDRKIT_DEFECT=<name>`` and this folder on
PYTHONPATH.

Peers and other children get the defect too, since they inherit both. Only functions of gdrkit are replaced, right after
their module was read and before anybody else can have them.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from meta.defects.defect import Defect


class _PutBack(MetaPathFinder):
    def __init__(self, defect: Defect) -> None:
        self.defect = defect

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.defect.module:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            self.defect.put_back(module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


_name = os.environ.get("GDRKIT_DEFECT")
if _name:
    from meta.defects.table import DEFECTS

    sys.meta_path.insert(0, _PutBack(DEFECTS[_name]))
