"""Enumerations of the constants of libibverbs.

Source: ``infiniband/verbs.h`` of rdma-core. The numbers are part of its ABI and never change.
"""

from __future__ import annotations

import enum

__all__ = ["Access", "CompletionOpcode", "LinkLayer", "PortState", "QueuePairState", "Status", "mtu_bytes", "mtu_code"]


class Access(enum.IntFlag):
    """The access rights of a memory region (``ibv_access_flags``)."""

    LOCAL_WRITE = 1
    REMOTE_WRITE = 1 << 1
    REMOTE_READ = 1 << 2
    REMOTE_ATOMIC = 1 << 3
    RELAXED_ORDERING = 1 << 20


class Status(enum.IntEnum):
    """The status of a work completion (``ibv_wc_status``)."""

    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    LOC_EEC_OP_ERR = 3
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
    MW_BIND_ERR = 6
    BAD_RESP_ERR = 7
    LOC_ACCESS_ERR = 8
    REM_INV_REQ_ERR = 9
    REM_ACCESS_ERR = 10
    REM_OP_ERR = 11
    RETRY_EXC_ERR = 12
    RNR_RETRY_EXC_ERR = 13
    LOC_RDD_VIOL_ERR = 14
    REM_INV_RD_REQ_ERR = 15
    REM_ABORT_ERR = 16
    INV_EECN_ERR = 17
    INV_EEC_STATE_ERR = 18
    FATAL_ERR = 19
    RESP_TIMEOUT_ERR = 20
    GENERAL_ERR = 21
    TM_ERR = 22
    TM_RNDV_INCOMPLETE = 23

    @property
    def header_name(self) -> str:
        """The name in the header, such as ``IBV_WC_REM_ACCESS_ERR``."""
        return f"IBV_WC_{self.name}"


class CompletionOpcode(enum.IntEnum):
    """The operation that a work completion reports (``ibv_wc_opcode``)."""

    SEND = 0
    RDMA_WRITE = 1
    RDMA_READ = 2
    RECV = 128
    RECV_RDMA_WITH_IMM = 129


class PortState(enum.IntEnum):
    """The state of a port (``ibv_port_state``)."""

    NOP = 0
    DOWN = 1
    INIT = 2
    ARMED = 3
    ACTIVE = 4
    ACTIVE_DEFER = 5


class LinkLayer(enum.IntEnum):
    """The link layer of a port (``IBV_LINK_LAYER_*``)."""

    UNSPECIFIED = 0
    INFINIBAND = 1
    ETHERNET = 2


class QueuePairState(enum.IntEnum):
    """The state of a queue pair (``ibv_qp_state``)."""

    RESET = 0
    INIT = 1
    RTR = 2
    RTS = 3
    SQD = 4
    SQE = 5
    ERR = 6


_MTU_BYTES_BY_CODE = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}


def mtu_bytes(code: int) -> int:
    """Return the size of an ``ibv_mtu`` in bytes."""
    return _MTU_BYTES_BY_CODE[code]


def mtu_code(length_bytes: int) -> int:
    """Return the ``ibv_mtu`` of 256, 512, 1024, 2048 or 4096 bytes."""
    return next(code for code, size_bytes in _MTU_BYTES_BY_CODE.items() if size_bytes == length_bytes)
