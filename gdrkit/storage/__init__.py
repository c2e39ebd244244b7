"""A storage service over RDMA, and its client.

Level 4. The server is the RDMA initiator: a file read is an RDMA WRITE into the memory of the client, a file write an
RDMA READ from it. One node, no replication: a reference.
"""

from __future__ import annotations

__all__: list[str] = []
