"""
An RDMA initiator that measures bursts and single operations against a passive peer.
"""

from collections.abc import Sequence


class Initiator:
    """
    Queue pairs and their local memory. connect(), run() and run_singly() release the GIL.
    """

    def __init__(self, device: str, *, memory_bytes: int, queue_pairs: int, depth_max: int) -> None: ...

    @property
    def endpoints(self) -> list: ...

    @property
    def reads_max(self) -> int: ...

    @property
    def address(self) -> int: ...

    def connect(self, peers: Sequence[dict], *, reads_max: int) -> None: ...

    def memory(self) -> memoryview:
        """
        Return a view of the memory. Delete the view before this object, because the view does not own the memory.
        """

    def run(self, *, to_peer: bool, remote_address: int, remote_key: int, length_bytes: int, slots: int, operations: int, depth: int, list_length: int, time_limit_s: float) -> dict: ...

    def run_singly(self, *, to_peer: bool, remote_address: int, remote_key: int, length_bytes: int, slots: int, operations: int, time_limit_s: float) -> dict: ...
