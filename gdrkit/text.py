"""Text from elsewhere, made fit to be shown.

Level 0. A host name, a path or the message of a library may hold anything: control characters move the cursor of a
terminal or recolour it, and those that set the direction of writing show one word as another. Both are shown as
escapes.
"""

from __future__ import annotations

import re
import unicodedata

__all__ = ["cell", "first_line", "harmless"]

_KEPT = frozenset("\n\t")
# Controls, formats (which set the direction of writing), surrogates, and the two line ends that are no controls.
_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def harmless(text: str) -> str:
    r"""`text` with what would act on a terminal or a reader as ``\x1b`` or ``\u202e``; new lines and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_shown, text))


def first_line(text: str) -> str:
    """Everything in one line, harmless."""
    return harmless(" ".join(text.split()))


def cell(text: object) -> str:
    """Into one cell of a Markdown table: no new line, no bar, no tag."""
    flat = first_line(str(text))
    for sign, shown in (("&", "&amp;"), ("|", "\\|"), ("`", "&#96;")):
        flat = flat.replace(sign, shown)
    # What no tag can begin with stays as it is, so that "GPU 0 <- NIC mlx5_0" can be read without a renderer.
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", flat)


def _shown(sign: str) -> str:
    if sign in _KEPT or unicodedata.category(sign) not in _CATEGORIES:
        return sign
    number = ord(sign)
    if number > 0xFFFF:  # noqa: PLR2004 - beyond what four digits hold.
        return f"\\U{number:08x}"
    return f"\\x{number:02x}" if number <= 0xFF else f"\\u{number:04x}"  # noqa: PLR2004 - what two digits hold.
