"""Formatting of text for terminals and reports: counts with their nouns, and escapes for untrusted text.

Untrusted text, such as a host name or a message of a library, may contain any character. Control characters can move
the cursor of a terminal or change its colours. Characters that set the direction of writing can make one word look like
another. :func:`escape_controls`, and the functions that use it, replace both kinds of characters by visible escapes.
"""

from __future__ import annotations

import re
import unicodedata

__all__ = ["escape_controls", "format_count", "markdown_cell", "shorten_identifier", "single_line"]

_UNESCAPED_CHARACTERS = frozenset("\n\t")
# The Unicode categories of controls (Cc), formats (Cf, which include the direction characters), surrogates (Cs), line
# separators (Zl) and paragraph separators (Zp).
_ESCAPED_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def escape_controls(text: str) -> str:
    r"""Return `text` with control and direction characters replaced by escapes such as ``\x1b`` or ``\u202e``.

    New lines and tabs are kept.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_escape, text))


def format_count(count: int, noun: str, plural: str | None = None) -> str:
    """Return the count with its noun: ``1 NIC``, ``2 NICs``. Without `plural`, an s is added to the noun."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def single_line(text: str) -> str:
    """Return the text as one line: each run of white space becomes one blank, and control characters become escapes."""
    return escape_controls(" ".join(text.split()))


def markdown_cell(text: object) -> str:
    """Return the text as one cell of a Markdown table: one line, with bars, backquotes and HTML tags escaped."""
    line = single_line(str(text))
    for character, escape in (("&", "&amp;"), ("|", "\\|"), ("`", "&#96;")):
        line = line.replace(character, escape)
    # A "<" that cannot begin a tag is kept, so that "GPU 0 <- NIC mlx5_0" is readable without a renderer.
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", line)


def _escape(character: str) -> str:
    if character in _UNESCAPED_CHARACTERS or unicodedata.category(character) not in _ESCAPED_CATEGORIES:
        return character
    code_point = ord(character)
    if code_point > 0xFFFF:  # noqa: PLR2004 - the largest number with four hexadecimal digits.
        return f"\\U{code_point:08x}"
    return f"\\x{code_point:02x}" if code_point <= 0xFF else f"\\u{code_point:04x}"  # noqa: PLR2004 - the largest number with two.


def shorten_identifier(identifier: str) -> str:
    """Return the first 12 digits of a digest (without ``sha256:``) or commit, and its suffix, such as ``-dirty``."""
    digits, dash, suffix = identifier.removeprefix("sha256:").partition("-")
    return digits[:12] + dash + suffix
