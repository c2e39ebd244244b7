"""A storage service over RDMA, and its client.

The server is the RDMA initiator. When a client reads a file, the server moves the bytes into the memory of the client
by RDMA WRITE. When a client writes a file, the server fetches the bytes from this memory by RDMA READ. The service is a
reference implementation: it runs on one node, without replication.
"""

from __future__ import annotations

__all__: list[str] = []
