"""Checks of the style of all code, and a few static checks of the product's C++ code, for the session `lint`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from automation.builds import NATIVE_FOLDER
from automation.commands import ROOT, call
from automation.side_by_side import Part, call_side_by_side

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LINT_REQUIREMENTS", "check_cpp", "check_style"]

# The versions are fixed, because the rules of these programs differ between versions.
LINT_REQUIREMENTS = ("ruff==0.17.5", "clang-format==14.0.6", "clang-tidy==20.1.0")
# Folders below native/ whose sources clang-tidy checks.
_CPP_FOLDERS = ("engine", "storage", "usrbio/agent", "usrbio/client", "usrbio/ring", "verbs")
_CPP_OPTIONS = (
    "-std=c++20",
    f"-I{NATIVE_FOLDER}",
    f"-I{NATIVE_FOLDER / 'usrbio' / 'include'}",
    "-DHF3FS_ENABLE_GDR",
    '-DGDRKIT_VERSION=""',
    # Clang evaluates the constant initializer of the table of all file descriptors element by element, which takes more
    # steps than its default limit.
    "-fconstexpr-steps=2000000000",
)


def check_style(tools_bin: Path, *, fix: bool) -> list[int]:
    """Run ruff, clang-format and `bash -n`, and return their exit codes. With `fix`, the first two correct files."""
    folders, suffixes = (NATIVE_FOLDER, ROOT / "suites"), ("cpp", "hpp", "h")
    sources = sorted(str(path) for folder in folders for suffix in suffixes for path in folder.rglob(f"*.{suffix}"))
    format_options = ["-i"] if fix else ["--dry-run", "--Werror", "--ferror-limit=1"]
    codes = [
        call([str(tools_bin / "ruff"), "check", "--output-format=concise", *(["--fix"] if fix else [])]),
        call([str(tools_bin / "ruff"), "format", *([] if fix else ["--check"])]),
        call([str(tools_bin / "clang-format"), *format_options, *sources], printed_words_max=5),
    ]
    scripts = [ROOT / ".ci" / "run", *ROOT.glob("suites/support/*.sh"), *ROOT.glob("hardware/lab/*.sh")]
    return [*codes, *(call(["bash", "-n", str(path)]) for path in scripts)]


def check_cpp(tools_bin: Path) -> list[int]:
    """Run clang-tidy on the C++ code of the product, with the checks of `.clang-tidy`, and return its exit codes.

    For each folder, clang-tidy checks one generated file, which includes all sources of the folder. clang-tidy spends
    most of its time on the headers of the standard library, so one file takes a fifth of the time of separate files.
    """
    parts = []
    for name in _CPP_FOLDERS:
        # module.cpp is not checked: it includes nanobind, which takes longer than all other sources together.
        sources = sorted(path for path in (NATIVE_FOLDER / name).glob("*.cpp") if path.name != "module.cpp")
        unity_file = ROOT / "build" / "lint" / f"{name.replace('/', '_')}.cpp"
        unity_file.parent.mkdir(parents=True, exist_ok=True)
        unity_file.write_text("".join(f'#include "{path}"\n' for path in sources))
        config_option = f"--config-file={ROOT / '.clang-tidy'}"
        command = (str(tools_bin / "clang-tidy"), "--quiet", config_option, str(unity_file), "--", *_CPP_OPTIONS)
        parts.append(Part(f"clang-tidy native/{name}", command))
    return list(call_side_by_side(parts, jobs_max=os.cpu_count() or 1).values())
