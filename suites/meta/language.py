"""Checks of wording: replaced words, comments without a subject, "that of" in place of a noun, long test names.

Readers search for the terms of RDMA, CUDA and storage. GONE_WORDS lists words that earlier versions of this project
used in their place.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = [
    "CHECKED_PATHS",
    "GONE_WORDS",
    "TEST_NAME_CHARS_MAX",
    "find_chained_pronouns",
    "find_gone_words",
    "find_headless_openings",
    "find_long_test_names",
]

# The parts of the tree that the checks cover.
CHECKED_PATHS: tuple[str, ...] = (
    ".github",
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
    "automation",
    "docs",
    "gdrkit/README.md",
    "gdrkit/__init__.py",
    "gdrkit/__main__.py",
    "gdrkit/buffers.py",
    "gdrkit/children.py",
    "gdrkit/cli.py",
    "gdrkit/cli_files.py",
    "gdrkit/cli_inventory.py",
    "gdrkit/cli_report.py",
    "gdrkit/cli_serve.py",
    "gdrkit/cli_tiers.py",
    "gdrkit/cuda",
    "gdrkit/cufile",
    "gdrkit/errors.py",
    "gdrkit/evidence",
    "gdrkit/exit_code.py",
    "gdrkit/faultplan.py",
    "gdrkit/forks.py",
    "gdrkit/gaudi",
    "gdrkit/gds",
    "gdrkit/handles.py",
    "gdrkit/harness",
    "gdrkit/host",
    "gdrkit/install_paths.py",
    "gdrkit/inventory",
    "gdrkit/launch.py",
    "gdrkit/loader.py",
    "gdrkit/pattern.py",
    "gdrkit/qualify",
    "gdrkit/registration",
    "gdrkit/report",
    "gdrkit/safetensors",
    "gdrkit/scm_rights.py",
    "gdrkit/serialization.py",
    "gdrkit/storage",
    "gdrkit/text.py",
    "gdrkit/tiers",
    "gdrkit/units.py",
    "gdrkit/usrbio",
    "gdrkit/verbs",
    "gdrkit/verdict.py",
    "hardware",
    "native/README.md",
    "native/common",
    "native/engine",
    "native/storage",
    "native/tests",
    "native/twins",
    "native/usrbio",
    "native/verbs",
    "noxfile.py",
    "reports/README.md",
    "suites",
)

# The value of each word is the term, or the terms, that replace it.
GONE_WORDS: dict[str, str] = {
    "doorway": "listener",
    "doorways": "listeners",
    "departures": "pending deregistrations",
    "fellback": "FallbackWarning, DirectPathError",
    "haul": "coalesced copy",
    "hauls": "coalesced copies",
    "house": "project",
    "nobody": "the actor's name",
    "parcel": "handle message",
    "parcels": "handle messages",
    "prover": "direct-path probe",
    "provers": "direct-path probes",
    "pump": "worker",
    "pumps": "workers",
    "room": "package",
    "rooms": "packages",
    "seat": "project, package",
    "somebody": "the actor's name",
    "stranger": "untrusted peer",
    "strangers": "untrusted peers",
    "whoever": "the actor's name",
    "witness": "evidence",
}
# These phrases are correct although they contain a replaced word.
_LEGITIMATE_PHRASES = re.compile(r"\broom (for|left|in the)\b|\bno room\b|\broom_bytes\b|\"room\"", re.IGNORECASE)
# Patterns of replaced phrases. The value of each pattern is the correct form.
_GONE_PHRASES = {
    re.compile(r"\bgave (E[A-Z]{3,}\b|\{\w+\.status_name)"): "x failed: strerror (ERR)",
    re.compile(r"\bmemory nodes?\b", re.IGNORECASE): "NUMA node",
    re.compile(r"\blets? go of\b", re.IGNORECASE): "release",
}
# The parts of an identifier are words, too: RegionCache has the words Region and Cache.
_WORD_PATTERN = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# The build installs copies of files of native/usrbio in these folders, so the checks skip them.
_INSTALLED_FOLDERS = ("gdrkit/usrbio/examples/", "gdrkit/usrbio/include/")
_CHECKED_SUFFIXES = (".c", ".cpp", ".h", ".hpp", ".md", ".py", ".sh", ".toml", ".yml")
_COMMENT_START = re.compile(r"^\s*(#|//|\"\"\")")
_HEADLESS_OPENING = re.compile(
    r"^\s*(?:#|//|\"\"\")\s*(?:Who|What|Whoever|Of|Where|By which|For who)\b(?P<rest_of_line>.*)$"
)
_CHAINED_PRONOUN = re.compile(r"\b(?:that|those|the ones?) of\b", re.IGNORECASE)
_TEST_DEFINITION = re.compile(r"^\s*(?:async )?def (test_\w+)\(")
# Maximum number of characters in the name of a case.
TEST_NAME_CHARS_MAX = 60


def find_gone_words(root: Path) -> Iterator[str]:
    """Yield one line for each use of a word or phrase that the project no longer uses."""
    for location, line in _read_lines(root):
        checked_text = _LEGITIMATE_PHRASES.sub("", line)
        for word in _WORD_PATTERN.findall(checked_text):
            replacement = GONE_WORDS.get(word.lower())
            if replacement:
                yield f"{location} contains {word}; the term is: {replacement}"
        for phrase_pattern, replacement in _GONE_PHRASES.items():
            for match in phrase_pattern.finditer(checked_text):
                yield f"{location} contains {match[0]}; the form is: {replacement}"


def find_headless_openings(root: Path) -> Iterator[str]:
    """Yield one line for each comment or docstring that begins with a clause without a subject."""
    previous_line, previous_file = "", ""
    for location, line in _read_lines(root):
        file = location.rpartition(":")[0]
        is_continuation = file == previous_file and bool(_COMMENT_START.match(previous_line)) and '"""' not in line
        opening = _HEADLESS_OPENING.match(line)
        if opening and not is_continuation and "?" not in opening["rest_of_line"] and not file.endswith(".md"):
            yield f"{location} begins without a subject: {line.strip()}"
        previous_line, previous_file = line, file


def find_chained_pronouns(root: Path) -> Iterator[str]:
    """Yield one line for each "that of", "those of" or "the one of", except in Markdown files and suites/meta/items."""
    for location, line in _read_lines(root):
        match = _CHAINED_PRONOUN.search(line)
        if match and ".md:" not in location and not location.startswith("suites/meta/items/"):
            yield f"{location} contains {match[0]!r}; repeat the noun: {line.strip()}"


def find_long_test_names(root: Path) -> Iterator[str]:
    """Yield one line for each case whose name is longer than TEST_NAME_CHARS_MAX characters."""
    for location, line in _read_lines(root):
        match = _TEST_DEFINITION.match(line)
        if match and len(match[1]) > TEST_NAME_CHARS_MAX:
            test_name = match[1]
            length_and_maximum = f"{len(test_name)} characters; the maximum is {TEST_NAME_CHARS_MAX}"
            yield f"{location}: the name {test_name} has {length_and_maximum}"


def _read_lines(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the location ``PATH:LINE`` and the text of every line, except in this file, which lists the words."""
    for checked_path in CHECKED_PATHS:
        file_or_folder = root / checked_path
        for path in sorted(file_or_folder.rglob("*")) if file_or_folder.is_dir() else [file_or_folder]:
            relative_path = path.relative_to(root).as_posix()
            if relative_path == "suites/meta/language.py" or relative_path.startswith(_INSTALLED_FOLDERS):
                continue
            if path.suffix in _CHECKED_SUFFIXES and path.is_file():
                for line_number, line in enumerate(path.read_text().splitlines(), start=1):
                    yield f"{relative_path}:{line_number}", line
