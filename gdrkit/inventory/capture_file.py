"""Captures as files: JSON, compressed where the name ends so, and whatever the importers understand.

Level 4.
"""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit import plain
from gdrkit.errors import Reason, UsageError
from gdrkit.inventory.capture import Capture
from gdrkit.inventory.importers import import_folder, import_lspci, import_nccl_topology

if TYPE_CHECKING:
    import os

__all__ = ["parse_capture", "read_capture", "write_capture"]

_FILE_BYTES_MAX = 64 << 20
_UNPACKED_BYTES_MAX = 256 << 20
_GZIP = b"\x1f\x8b"
_HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")
_LSPCI = re.compile(rb"\s*(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7] ")


def write_capture(path: str | os.PathLike[str], capture: Capture) -> None:
    """Write it; compressed where the name ends in ``.gz``."""
    place = Path(path)
    import gzip

    data = (json.dumps(plain.to_plain(capture), indent=1, ensure_ascii=False) + "\n").encode(
        "utf-8", "backslashreplace"
    )
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(gzip.compress(data, mtime=0) if place.suffix == ".gz" else data)


def read_capture(path: str | os.PathLike[str]) -> Capture:
    """Read what :func:`write_capture` wrote, a topology of NCCL, the text of lspci, or a copied folder.

    Raises
    ------
    UsageError
        It cannot be read, or is none of these (``MALFORMED``).
    """
    place = Path(path)
    if place.is_dir():
        capture = import_folder(place)
        capture.check()
        return capture
    try:
        if not place.is_file():
            message = f"{place} is no file and no folder"
            raise UsageError(message)
        with place.open("rb") as file:
            data = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        message = f"{place}: {error.strerror}"
        raise UsageError(message) from error
    return parse_capture(data, name=str(place))


def parse_capture(data: bytes, *, name: str = "capture") -> Capture:
    """As :func:`read_capture`, of the bytes of a file."""
    if len(data) > _FILE_BYTES_MAX:
        message = f"{name}: more than {_FILE_BYTES_MAX} bytes"
        raise UsageError(message, reason=Reason.MALFORMED)
    data = _unpacked(data, name) if data.startswith(_GZIP) else data
    start = data.lstrip()[:1]
    if start == b"<":
        capture = import_nccl_topology(data)
    elif _LSPCI.match(data):
        capture = import_lspci(data)
    elif start == b"{":
        capture = _parse_json(data, name)
    else:
        message = f"{name}: neither a capture, nor a topology of NCCL, nor the text of lspci"
        raise UsageError(message, reason=Reason.MALFORMED)
    capture.check()
    return capture


def _unpacked(data: bytes, name: str) -> bytes:
    engine = zlib.decompressobj(wbits=31)
    try:
        found = engine.decompress(data, _UNPACKED_BYTES_MAX)
    except zlib.error as error:
        message = f"{name}: no gzip: {error}"
        raise UsageError(message, reason=Reason.MALFORMED) from error
    if engine.unconsumed_tail or not engine.eof:
        what = f"more than {_UNPACKED_BYTES_MAX} bytes when unpacked" if engine.unconsumed_tail else "cut off"
        message = f"{name}: {what}"
        raise UsageError(message, reason=Reason.MALFORMED)
    return found


def _parse_json(data: bytes, name: str) -> Capture:
    try:
        value = json.loads(data)
        if _HALF_CHARACTER.search(data):
            # JSON may hold half a character, which is no text and cannot be written again.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        message = f"{name}: no JSON: {error}"
        raise UsageError(message, reason=Reason.MALFORMED) from error
    return plain.from_plain(Capture, value, where="capture")
