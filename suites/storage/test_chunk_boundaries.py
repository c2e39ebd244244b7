"""A file is truncated near a chunk boundary and extended again: the new bytes are zeros, and all checksums match."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from gdrkit.harness.needs import needs, verbs
from gdrkit.units import KIB

if TYPE_CHECKING:
    from gdrkit.storage.client import StorageClient

# The store has one checksum for each chunk of this length.
CHUNK_BYTES = 4 * KIB
FILE_BYTES = 16 * CHUNK_BYTES


@needs(verbs.nic())
@pytest.mark.parametrize(
    "remaining_bytes", [0, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, FILE_BYTES - CHUNK_BYTES]
)
def test_file_that_shrinks_and_grows_again_reads_as_zeros(client: StorageClient, remaining_bytes: int) -> None:
    data = os.urandom(FILE_BYTES)
    with client.open("file", write=True, create=True) as file, client.register(bytearray(data)) as written_buffer:
        file.write(written_buffer, offset_bytes=0)
        file.truncate(remaining_bytes)
        file.truncate(FILE_BYTES)
        received_data = bytearray(FILE_BYTES)
        with client.register(received_data) as buffer:
            assert file.read(buffer, offset_bytes=0).length_bytes == FILE_BYTES
        assert received_data == data[:remaining_bytes] + bytes(FILE_BYTES - remaining_bytes)
        assert client.statistics()["corruptions"] == 0
