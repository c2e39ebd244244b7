"""Paths of the folders of gdrkit that are not Python packages: suites, machine profiles, report templates and schemas.

In a checkout these folders are next to the package. A wheel contains them as package data. All other modules get the
paths from here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["InstallPaths", "install_paths"]

_GIT_TIMEOUT_S = 10
# This pattern matches a folder of the system. Such a folder has the same name on other machines, so reports may
# contain it.
_SYSTEM_FOLDER_PATTERN = re.compile(r"/(usr|lib\w*)(/|$)")


@dataclass(frozen=True, slots=True)
class InstallPaths:
    """The folders that belong to gdrkit but are not Python packages.

    Attributes
    ----------
    root : Path
        The folder that contains ``suites``, ``hardware`` and ``reports``.
    is_checkout : bool
        Whether the root is a source tree, and not the data of an installed wheel.
    """

    root: Path
    is_checkout: bool

    @property
    def suites(self) -> Path:
        """The folder of the pytest suites."""
        return self.root / "suites"

    @property
    def profiles(self) -> Path:
        """The folder of the machine profiles, one TOML file each."""
        return self.root / "hardware" / "profiles"

    @property
    def templates(self) -> Path:
        """The folder of the report templates."""
        return self.root / "reports" / "templates"

    @property
    def schemas(self) -> Path:
        """The folder of the JSON schemas of records."""
        return self.root / "reports" / "schema"

    @property
    def runs(self) -> Path:
        """The default folder for the reports of runs."""
        return self.root / "reports" / "runs" if self.is_checkout else Path.cwd() / "gdrkit-report"

    def portable(self, text: str) -> str:
        """Return `text` with machine-specific folders replaced by placeholders that mean the same on other machines.

        The path of this checkout is removed. ``{python}`` stands for the virtual environment of this Python,
        ``{library_path}`` for another folder of LD_LIBRARY_PATH, ``{site}`` for another folder of ``sys.path``, and
        ``{home}`` for the home folder of the user. System folders are not replaced.
        """
        placeholder_by_folder = {str(self.root): ""} if self.is_checkout else {}
        placeholder_by_folder.setdefault(sys.prefix, "{python}/")
        for placeholder, folders in {
            "{library_path}/": os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep),
            "{site}/": sys.path,
            "{home}/": [os.path.expanduser("~")],  # noqa: PTH111 - Path.home() raises if the user has no home folder.
        }.items():
            for folder in folders:
                placeholder_by_folder.setdefault(folder.rstrip("/"), placeholder)
        # Folders can be nested: the folder of the software twins (libraries that emulate the hardware) is inside the
        # environment of this Python. The entries are in the order of the docstring, and the first match is used.
        for folder, placeholder in placeholder_by_folder.items():
            if folder.startswith("/") and not _SYSTEM_FOLDER_PATTERN.match(folder):
                text = text.replace(f"{folder}/", placeholder)
        return text

    def commit(self) -> str | None:
        """Return the commit of the checkout, or None if it is unknown.

        ``-dirty`` is added if tracked files were changed. The environment variable GDRKIT_COMMIT states the commit of
        a source tree that was copied without its git history.
        """
        if commit := os.environ.get("GDRKIT_COMMIT"):
            return commit
        if not self.is_checkout or not (self.root / ".git").exists():
            return None
        head_commit = _run_git(self.root, "rev-parse", "--verify", "--quiet", "HEAD")
        if not head_commit:
            return None
        return (
            f"{head_commit}-dirty"
            if _run_git(self.root, "status", "--porcelain", "--untracked-files=no")
            else head_commit
        )


@cache
def install_paths() -> InstallPaths:
    """Return the folders of this installation."""
    package_folder = Path(__file__).resolve().parent
    parent_folder = package_folder.parent
    if (parent_folder / "pyproject.toml").is_file() and (parent_folder / "suites").is_dir():
        return InstallPaths(root=parent_folder, is_checkout=True)
    return InstallPaths(root=package_folder / "_data", is_checkout=False)


def _run_git(root: Path, *arguments: str) -> str | None:
    """Run git in the folder `root`, and return its output, or None if git failed or is not installed."""
    try:
        completed = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False, timeout=_GIT_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return completed.stdout.strip() if completed.returncode == 0 else None
