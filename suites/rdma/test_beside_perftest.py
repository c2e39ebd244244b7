"""The native initiator and perftest on the same NIC, in turn: both transfer the same bytes.

The record has the ratio of their throughputs. The cases do not check it, because a busy machine would fail.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import pytest
from rdma import perftest
from support.passive import initiating

from gdrkit import evidence, pattern
from gdrkit.harness.needs import host, needs, verbs
from gdrkit.host import HostTree
from gdrkit.units import KIB
from gdrkit.verbs import Direction

if TYPE_CHECKING:
    from gdrkit.harness.evidence import Evidence
    from gdrkit.verbs import Nic

LENGTH_BYTES, OPERATIONS, DEPTH, LIST_LENGTH = 64 * KIB, 256, 64, 16
# The numbers of rounds with --benchmark-enable and without.
ROUNDS, FEW_ROUNDS = 40, 2
DRIVEN = [
    pytest.param(direction, id=direction.value, marks=needs(host.program(program, "-V")))
    for direction, program in perftest.PROGRAMS.items()
]
# Output of perftest 4.5 (6.06) on rxe.
PRINTED = """\
---------------------------------------------------------------------------------------
Post List requested - CQ moderation will be the size of the post list
---------------------------------------------------------------------------------------
                    RDMA_Write Post List BW Test
 Dual-port       : OFF		Device         : rxe0
 TX depth        : 64
 Mtu             : 1024[B]
---------------------------------------------------------------------------------------
 local address: LID 0000 QPN 0x0014 PSN 0xda2f4d RKey 0x000431 VAddr 0x005618a5a55000
 GID: 00:00:00:00:00:00:00:00:00:00:255:255:10:09:00:01
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 65536      512              47.72              30.37  		   0.000486
---------------------------------------------------------------------------------------
"""


def sent_packets(nic: Nic) -> int | None:
    """Return the packets that the port has sent, or None if its driver has no counter."""
    return next(
        (
            port.sent_packets
            for port in evidence.counters(HostTree())
            if (port.device, port.port) == (nic.name, nic.port.number)
        ),
        None,
    )


@needs(verbs.nic())
@pytest.mark.parametrize("direction", DRIVEN)
@pytest.mark.timeout(1200)
def test_initiator_and_perftest_transfer_all_bytes(
    nic: Nic, seed: int, evidence: Evidence, request: pytest.FixtureRequest, direction: Direction
) -> None:
    rounds = ROUNDS if request.config.getoption("--benchmark-enable") else FEW_ROUNDS
    shape = {"length_bytes": LENGTH_BYTES, "operations": OPERATIONS, "depth": DEPTH, "list_length": LIST_LENGTH}
    data, other = pattern.payload(LENGTH_BYTES, seed=seed), bytes(LENGTH_BYTES)
    is_write = direction is Direction.WRITE
    ours: list[float] = []
    theirs: list[float] = []
    memory = bytearray(LENGTH_BYTES)
    with (
        nic.register_host(memory) as region,
        initiating(nic, memory_bytes=LENGTH_BYTES) as initiator,
    ):
        # The first round of each is not compared.
        for _ in range(rounds + 1):
            initiator.write(data if is_write else other)
            memory[:] = other if is_write else data
            burst = initiator.run(direction, region.remote(), **shape)
            pattern.check(bytes(memory) if is_write else initiator.read(), seed=seed)
            ours.append(burst.moved_bytes / burst.elapsed_ns)
            before = sent_packets(nic)
            measured = perftest.measure(nic, direction, reads_max=initiator.reads_max, **shape)
            after = sent_packets(nic)
            assert (measured.length_bytes, measured.operations) == (LENGTH_BYTES, OPERATIONS)
            # A misread number would mean more bytes than the process can have transferred in its lifetime.
            assert measured.bytes_per_s * measured.process_s > measured.moved_bytes or not measured.bytes_per_s
            if before is not None and after is not None and nic.port.mtu_bytes:
                assert after - before >= measured.moved_bytes // nic.port.mtu_bytes
            theirs.append(measured.bytes_per_s / 1e9)
    evidence["operations"] = {**shape, "rounds": rounds}
    evidence["in_turn_gb_per_s"] = {"initiator": ours, "perftest": theirs}
    # perftest prints 0 if it cannot determine the frequency of the processor.
    perftest_rates = [rate for rate in theirs[1:] if rate]
    if perftest_rates:
        evidence.number("rounds_count", len(perftest_rates))
        initiator_median, perftest_median = statistics.median(ours[1:]), statistics.median(perftest_rates)
        evidence.number("initiator_gb_per_s_median", initiator_median)
        evidence.number("perftest_gb_per_s_median", perftest_median)
        evidence.number("initiator_over_perftest_ratio", initiator_median / perftest_median)


def test_perftest_output_is_parsed() -> None:
    # The unit MB of perftest is MiB.
    parsed = perftest.parse(PRINTED)
    assert (parsed.length_bytes, parsed.operations, round(parsed.bytes_per_s)) == (65536, 512, 31845253)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Number of iterations must be a multiple of post list size\n",
        " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n Completion with error\n",
        " #bytes     #iterations    BW peak[?/sec]    BW average[?/sec]   MsgRate[Mpps]\n 1 2 3.0 4.0 5.0\n",
    ],
    ids=["nothing", "refused", "cut_off", "unknown_unit"],
)
def test_unknown_perftest_output_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="perftest printed no result"):
        perftest.parse(text)
