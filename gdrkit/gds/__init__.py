"""Transfers between files and device or host memory.

A transfer takes a direct path (cuFile) if a probe of the file has shown that the path works. Otherwise the copy engine
moves the bytes: into and out of device memory through pinned host memory, and of host memory without a copy.

Only ``_native.py`` imports the native engine.
"""

from __future__ import annotations

from gdrkit.gds.asynchronous import AsyncFile
from gdrkit.gds.buffer import HOST, TransferBuffer, describe_buffer
from gdrkit.gds.copying import CopyResult, CopyTotals, copy_file
from gdrkit.gds.cufile_driver import close_driver
from gdrkit.gds.cufile_path import probe_cufile
from gdrkit.gds.direct import DIRECT_PATH_PROBES, DirectPath, DirectPathResult, FallbackWarning
from gdrkit.gds.engine import Engine, EngineOptions, close_engines, engine_for
from gdrkit.gds.file import File
from gdrkit.gds.opening import Access, DirectPathMode
from gdrkit.gds.result import Route, TransferFailed, TransferResult
from gdrkit.gds.totals import RouteTotals, transfer_totals
from gdrkit.gds.transfer import Transfer
from gdrkit.gds.whole_files import read_files, transfer_ranges

DIRECT_PATH_PROBES.append(probe_cufile)

__all__ = [
    "HOST",
    "Access",
    "AsyncFile",
    "CopyResult",
    "CopyTotals",
    "DirectPath",
    "DirectPathMode",
    "DirectPathResult",
    "Engine",
    "EngineOptions",
    "FallbackWarning",
    "File",
    "Route",
    "RouteTotals",
    "Transfer",
    "TransferBuffer",
    "TransferFailed",
    "TransferResult",
    "close_driver",
    "close_engines",
    "copy_file",
    "describe_buffer",
    "engine_for",
    "read_files",
    "transfer_ranges",
    "transfer_totals",
]
