"""Hook that injects a defect into every Python process that starts with ``GDRKIT_DEFECT=<name>``.

Python imports ``sitecustomize`` when it starts, if this folder is on PYTHONPATH. Peer processes inherit PYTHONPATH and
``GDRKIT_DEFECT``, so they have the defect, too. The hook replaces functions of a gdrkit module directly after the
module was executed, before another module can import them.
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


class _DefectInjector(MetaPathFinder):
    """An import hook that calls `inject` with the module `module_name` directly after its code was executed."""

    def __init__(self, module_name: str, inject: Callable[[Any], None]) -> None:
        self.module_name, self.inject = module_name, inject

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module_name:
            return None
        other_finders = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in other_finders)), None)
        if spec is None or spec.loader is None:
            return None
        execute_module = spec.loader.exec_module

        def execute_and_inject(module: ModuleType) -> None:
            execute_module(module)
            self.inject(module)

        spec.loader.exec_module = execute_and_inject  # type: ignore[method-assign]
        return spec


_defect_name = os.environ.get("GDRKIT_DEFECT")
if _defect_name:
    from meta.defects.defect import NativeDefect
    from meta.defects.table import DEFECTS

    _injection = DEFECTS[_defect_name].injection
    # A defect of the C library needs no hook: the process loads a library that was compiled with the defect.
    if not isinstance(_injection, NativeDefect):
        sys.meta_path.insert(0, _DefectInjector(DEFECTS[_defect_name].module_or_file, _injection))
