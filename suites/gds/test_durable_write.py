"""A durable write calls fdatasync once, after all bytes. If fdatasync fails, the write fails."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest
from support.system_calls import SystemCall, run_with_intercepted_calls

from gdrkit import gds
from gdrkit.errors import ApiError
from gdrkit.units import MIB

if TYPE_CHECKING:
    from pathlib import Path

DATA = os.urandom(MIB)


def write_with_new_engine(path: Path, *, durable: bool) -> None:
    """Write a file with an engine that lives only during this call, so that its threads are observed, too."""
    gds.close_engines()
    try:
        with gds.File(path, "w", direct="never") as file:
            file.write_from(DATA, durable=durable)
    finally:
        gds.close_engines()


@pytest.mark.parametrize("durable", [False, True])
def test_durable_write_syncs_the_file_after_its_bytes(tmp_path: Path, durable: bool) -> None:  # noqa: FBT001
    path = tmp_path / "file"
    contents_at_sync: list[bytes] = []

    def record_contents(call: SystemCall) -> None:
        assert call.path == str(path)
        contents_at_sync.append(path.read_bytes())

    run_with_intercepted_calls(lambda: write_with_new_engine(path, durable=durable), "fdatasync", reply=record_contents)
    assert contents_at_sync == ([DATA] if durable else [])
    assert path.read_bytes() == DATA


def test_failed_fdatasync_fails_the_write(tmp_path: Path) -> None:
    with pytest.raises(ApiError) as error_info:
        run_with_intercepted_calls(
            lambda: write_with_new_engine(tmp_path / "file", durable=True), "fdatasync", reply=lambda _: -errno.EIO
        )
    assert (error_info.value.operation, error_info.value.errno) == ("fdatasync", errno.EIO)
