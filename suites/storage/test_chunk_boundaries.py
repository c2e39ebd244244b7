"""Checksums of chunks when the end of the file is at or near the end of a chunk."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from gdrkit.harness.needs import needs, verbs
from gdrkit.units import KIB

if TYPE_CHECKING:
    from gdrkit.storage.client import StorageClient

CHUNK_BYTES = 4 * KIB
FILE_BYTES = 16 * CHUNK_BYTES


@needs(verbs.nic())
@pytest.mark.parametrize("kept_bytes", [0, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, FILE_BYTES - CHUNK_BYTES])
def test_file_that_shrinks_and_grows_again_reads_as_zeros(client: StorageClient, kept_bytes: int) -> None:
    data = os.urandom(FILE_BYTES)
    with client.open("file", write=True, create=True) as file, client.register(bytearray(data)) as written:
        file.write(written, offset_bytes=0)
        file.truncate(kept_bytes)
        file.truncate(FILE_BYTES)
        target = bytearray(FILE_BYTES)
        with client.register(target) as buffer:
            assert file.read(buffer, offset_bytes=0).length_bytes == FILE_BYTES
        assert target == data[:kept_bytes] + bytes(FILE_BYTES - kept_bytes)
        assert client.statistics()["corruptions"] == 0
