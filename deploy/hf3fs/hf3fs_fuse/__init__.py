"""The package hf3fs_fuse of gdrkit-hf3fs: the names of the package hf3fs_fuse of 3FS, implemented by gdrkit.

This is not the package of 3FS. It serves programs that import ``hf3fs_fuse.io``, such as SGLang, on a mount of
``gdrkit agent``.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

__all__: list[str] = []


def _raise_if_3fs_is_installed() -> None:
    """Raise ImportError if the native module of 3FS is installed beside this package."""
    expected_path = Path(__file__).resolve().parents[1] / "hf3fs_py_usrbio.py"
    spec = find_spec("hf3fs_py_usrbio")
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != expected_path:
        actual_path = None if spec is None else spec.origin
        message = (
            f"gdrkit-hf3fs and the package of 3FS are both installed: hf3fs_py_usrbio is {actual_path}, not "
            f"{expected_path}. Run pip uninstall gdrkit-hf3fs, then install the package of 3FS again"
        )
        raise ImportError(message)


_raise_if_3fs_is_installed()
