"""Parts of the nox session `wheels`: separate debug symbols, the size limit of a wheel, and the options of the session.

The session itself checks that programs run with the wheels.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from automation import release
from automation.commands import ROOT
from gdrkit.harness.needs import host, needs

LIBRARY = ROOT / "gdrkit" / "usrbio" / "lib" / "libhf3fs_api_shared.so"


def read_sections(path: Path) -> str:
    """Return the section headers of a library as readelf prints them."""
    return subprocess.run(["readelf", "-SW", str(path)], capture_output=True, text=True, check=True).stdout


@needs(host.program("objcopy"))
def test_debug_symbols_are_split_by_build_id(tmp_path: Path) -> None:
    stripped_library = tmp_path / "wheel" / "lib" / LIBRARY.name
    stripped_library.parent.mkdir(parents=True)
    shutil.copy(LIBRARY, stripped_library)
    (stripped_library.parent / "not_elf.py").write_text("x = 1\n")
    notes_output = subprocess.run(["readelf", "-n", str(LIBRARY)], capture_output=True, text=True, check=True).stdout
    build_id = notes_output.split("Build ID: ")[1].split()[0]
    debug_folder = release.split_debug(tmp_path / "wheel", tmp_path / "debug", release.ARCHITECTURES["x86_64"])
    assert debug_folder is not None
    assert [path.relative_to(debug_folder) for path in debug_folder.rglob("*.debug")] == [
        Path(build_id[:2], f"{build_id[2:]}.debug")
    ]
    assert ".debug_info" in read_sections(next(debug_folder.rglob("*.debug")))
    assert ".debug_info" not in read_sections(stripped_library)
    # A record identifies the library by its build id, so the note with the build id must remain.
    assert "note.gnu.build-id" in read_sections(stripped_library)
    assert stripped_library.stat().st_size < LIBRARY.stat().st_size / 2


def test_large_wheel_ends_the_session(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / f"{name}-0.1.0-py3-none-any.whl" for name in ("small", "large")]
    for path, size_bytes in zip(paths, (release.WHEEL_BYTES_MAX, release.WHEEL_BYTES_MAX + 1), strict=True):
        path.write_bytes(bytes(size_bytes))
    with pytest.raises(SystemExit) as exit_info:
        release.print_table([release.Wheel(path, None) for path in paths])
    assert exit_info.value.code == 3
    output = capsys.readouterr().out
    assert "small 0.1.0" in output
    assert output.endswith("larger than 6 MB: large-0.1.0-py3-none-any.whl\n")


@pytest.mark.parametrize("arguments", [["--arch", "riscv64"], ["--arch"], ["x86_64"]])
def test_unknown_options_of_wheels_are_refused(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "nox", "-f", str(ROOT / "noxfile.py"), "-s", "wheels", "--", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "usage: nox -s wheels -- [--arch x86_64|aarch64]" in result.stdout
