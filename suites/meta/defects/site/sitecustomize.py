"""Hook that puts a defect back into every Python process that starts with ``GDRKIT_DEFECT=<name>``.

This folder must be on PYTHONPATH. Peers and other child processes inherit both variables and have the defect, too. The
hook replaces only functions of gdrkit, directly after their module was executed and before another module imports them.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _PutBack(MetaPathFinder):
    def __init__(self, module: str, put_back: Callable[[Any], None]) -> None:
        self.module, self.put_back = module, put_back

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            self.put_back(module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


_name = os.environ.get("GDRKIT_DEFECT")
if _name:
    from meta.defects.defect import NativeUnit
    from meta.defects.table import DEFECTS

    _put_back = DEFECTS[_name].put_back
    # A defect of the C library is in its build.
    if not isinstance(_put_back, NativeUnit):
        sys.meta_path.insert(0, _PutBack(DEFECTS[_name].module, _put_back))
