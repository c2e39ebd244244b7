"""The build backend of this distribution: setuptools, except that it refuses an environment with the package of 3FS.

This distribution and the package of 3FS have the same modules, so pip would silently overwrite the files of one of the
two.
"""

from __future__ import annotations

import sysconfig
from importlib.metadata import DistributionFinder, MetadataPathFinder

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_wheel",
]

_HF3FS_DISTRIBUTION = "hf3fs_py_usrbio"


def build_wheel(
    wheel_directory: str, config_settings: dict[str, str] | None = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel. See PEP 517."""
    _raise_if_3fs_is_installed()
    return str(build_meta.build_wheel(wheel_directory, config_settings, metadata_directory))


def _raise_if_3fs_is_installed() -> None:
    """Raise RuntimeError if the package of 3FS is installed in this environment."""
    # pip runs this backend with a sys.path of its own. sysconfig still names the folders of the environment.
    folders = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    context = DistributionFinder.Context(name=_HF3FS_DISTRIBUTION, path=folders)
    for distribution in MetadataPathFinder.find_distributions(context):
        message = (
            f"{_HF3FS_DISTRIBUTION} {distribution.version} of 3FS is installed in {distribution.locate_file('')}, and "
            "gdrkit-hf3fs has the same modules. To use 3FS, do not install gdrkit-hf3fs. To use gdrkit, uninstall the "
            f"package of 3FS: pip uninstall {_HF3FS_DISTRIBUTION}"
        )
        raise RuntimeError(message)
