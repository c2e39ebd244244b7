"""A storage service over RDMA, and its client.

The server is the RDMA initiator: it reads a file by an RDMA WRITE into the memory of the client, and writes a file by
an RDMA READ from it. The service runs on one node without replication, as a reference.
"""

from __future__ import annotations

__all__: list[str] = []
