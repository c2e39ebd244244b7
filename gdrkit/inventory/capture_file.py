"""Reader and writer of capture files: JSON, optionally compressed by gzip.

The reader also accepts the output of lspci, a topology XML of NCCL, and a folder with a copy of parts of /sys or /proc.
"""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit import serialization
from gdrkit.errors import Reason, UsageError, errno_name
from gdrkit.inventory.capture import Capture
from gdrkit.inventory.importers import import_folder, import_lspci, import_nccl_topology

if TYPE_CHECKING:
    import os

__all__ = ["parse_capture", "read_capture", "write_capture"]

# With these limits, importing and replaying a file takes at most 256 MiB of memory. Python stores a text of n bytes in
# up to 4n bytes (one character above U+FFFF suffices), and has two copies of it during parsing. It stores a JSON
# value in up to 200 bytes. Real captures are far below the limits: for a host with 517 PCI functions, 3 MiB and 12,000
# tokens.
_FILE_BYTES_MAX = 16 << 20
_TOKENS_MAX = 300_000
_NESTING_MAX = 64
_GZIP_MAGIC = b"\x1f\x8b"
# Matches a JSON string, a bracket, a comma, or the quotation mark of a string that has no end. The quantifiers are
# possessive, so that no input makes the search backtrack.
_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{},"]', re.DOTALL)
_LSPCI_FIRST_LINE = re.compile(rb"\s*(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7] ")


def write_capture(path: str | os.PathLike[str], capture: Capture) -> None:
    """Write `capture` as JSON to `path`, compressed if the name ends in ``.gz``."""
    import gzip

    file_path = Path(path)
    data = (json.dumps(serialization.to_json_data(capture), indent=1, ensure_ascii=False) + "\n").encode(
        "utf-8", "backslashreplace"
    )
    file_path.parent.mkdir(parents=True, exist_ok=True)
    file_path.write_bytes(gzip.compress(data, mtime=0) if file_path.suffix == ".gz" else data)


def read_capture(path: str | os.PathLike[str]) -> Capture:
    """Read a capture: a file of :func:`write_capture`, a topology XML of NCCL, the output of lspci, or a folder.

    The folder has a copy of parts of /sys or /proc; see :mod:`gdrkit.inventory.importers`.

    Raises
    ------
    UsageError
        The path cannot be read, or has none of these formats (``MALFORMED``).
    """
    path = Path(path)
    if path.is_dir():
        capture = import_folder(path)
        capture.check()
        return capture
    try:
        if not path.is_file():
            message = f"{path} is neither a regular file nor a folder" if path.exists() else f"{path} does not exist"
            raise UsageError(message)
        with path.open("rb") as file:
            data = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        message = f"open {path}: {error.strerror} ({errno_name(error.errno)})"
        raise UsageError(message) from error
    return parse_capture(data, name=str(path))


def parse_capture(data: bytes, *, name: str = "capture") -> Capture:
    """Parse the contents of a capture file; see :func:`read_capture`. `name` is used in errors."""
    if len(data) > _FILE_BYTES_MAX:
        message = f"{name}: the file has more than {_FILE_BYTES_MAX} bytes"
        raise UsageError(message, reason=Reason.MALFORMED)
    data = _decompress(data, name) if data.startswith(_GZIP_MAGIC) else data
    first_byte = data.lstrip()[:1]
    if first_byte == b"<":
        capture = import_nccl_topology(data)
    elif _LSPCI_FIRST_LINE.match(data):
        capture = import_lspci(data)
    elif first_byte == b"{":
        capture = _parse_json(data, name)
    else:
        message = f"{name} is neither a capture, nor a topology XML of NCCL, nor the output of lspci"
        raise UsageError(message, reason=Reason.MALFORMED)
    capture.check()
    return capture


def _decompress(data: bytes, name: str) -> bytes:
    decompressor = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # 16: with the header of gzip
    try:
        decompressed_data = decompressor.decompress(data, _FILE_BYTES_MAX)
    except zlib.error as error:
        message = f"{name}: not gzip: {error}"
        raise UsageError(message, reason=Reason.MALFORMED) from error
    if decompressor.unconsumed_tail or not decompressor.eof:
        is_too_long = bool(decompressor.unconsumed_tail)
        problem = f"more than {_FILE_BYTES_MAX} bytes when decompressed" if is_too_long else "the gzip data is cut off"
        message = f"{name}: {problem}"
        raise UsageError(message, reason=Reason.MALFORMED)
    return decompressed_data


def _parse_json(data: bytes, name: str) -> Capture:
    try:
        # json.loads would also accept UTF-16, in which _check_tokens() would not find the tokens.
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"{name}: not JSON: {error}"
        raise UsageError(message, reason=Reason.MALFORMED) from error
    _check_tokens(text, name)
    json_value = serialization.parse_json(text, where=name)
    _check_strings(json_value, name)
    return serialization.from_json_data(Capture, json_value, where="capture")


def _check_tokens(text: str, name: str) -> None:
    """Raise an error if a JSON text has too many tokens, is nested too deeply, or has a string without an end.

    This is checked before parsing, because parsing such a text could take too much memory.
    """
    depth = 0
    for token_index, match in enumerate(_TOKEN.finditer(text)):
        symbol = match[0]
        if symbol in "[{":
            depth += 1
        elif symbol in "]}":
            depth -= 1
        problem = (
            f"more than {_TOKENS_MAX} strings, brackets and commas"
            if token_index >= _TOKENS_MAX
            else f"values nested more than {_NESTING_MAX} deep"
            if depth > _NESTING_MAX
            else f"not JSON: the string at character {match.start()} has no end"
            if symbol == '"'
            else None
        )
        if problem is not None:
            message = f"{name}: {problem}"
            raise UsageError(message, reason=Reason.MALFORMED)


def _check_strings(value: serialization.Json, name: str) -> None:
    """Raise an error if a string in `value` has a lone surrogate, which JSON can contain and UTF-8 cannot."""
    pending_values: list[serialization.Json] = [value]
    while pending_values:
        item = pending_values.pop()
        if isinstance(item, dict):
            pending_values += item.keys()
            pending_values += item.values()
        elif isinstance(item, list):
            pending_values += item
        elif isinstance(item, str) and not item.isascii():
            try:
                item.encode()
            except UnicodeEncodeError as error:
                message = f"{name}: a string contains a lone surrogate: {error.reason}"
                raise UsageError(message, reason=Reason.MALFORMED) from error
