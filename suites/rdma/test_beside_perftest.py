"""gdrkit's native initiator and perftest transfer in turn by the same NIC: both must transfer all bytes.

The record has the ratio of their throughputs. The cases do not assert the ratio, because they would fail on a busy
machine.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import pytest
from rdma import perftest
from support.initiators import connect_initiator

from gdrkit import pattern
from gdrkit.harness.needs import host, needs, verbs
from gdrkit.host import HostTree, port_counters
from gdrkit.units import KIB
from gdrkit.verbs import Direction

if TYPE_CHECKING:
    from gdrkit.harness.evidence import Evidence
    from gdrkit.verbs import Nic

LENGTH_BYTES, OPERATIONS, DEPTH, LIST_LENGTH = 64 * KIB, 256, 64, 16
# Number of rounds with --benchmark-enable, and without it.
MEASURED_ROUNDS, UNMEASURED_ROUNDS = 40, 2
DIRECTIONS = [
    pytest.param(direction, id=direction.value, marks=needs(host.program(program, "-V")))
    for direction, program in perftest.PROGRAMS.items()
]
# Output of perftest 4.5 (6.06) on rxe.
PERFTEST_OUTPUT = """\
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


def read_sent_packets(nic: Nic) -> int | None:
    """Return the number of packets that the port has sent, or None if its driver does not count them."""
    return next(
        (
            port.sent_packets
            for port in port_counters(HostTree())
            if (port.device, port.port) == (nic.name, nic.port.number)
        ),
        None,
    )


@needs(verbs.nic())
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.timeout(1200)
def test_initiator_and_perftest_transfer_all_bytes(
    nic: Nic, seed: int, evidence: Evidence, request: pytest.FixtureRequest, direction: Direction
) -> None:
    rounds_count = MEASURED_ROUNDS if request.config.getoption("--benchmark-enable") else UNMEASURED_ROUNDS
    burst_options = {"length_bytes": LENGTH_BYTES, "operations": OPERATIONS, "depth": DEPTH, "list_length": LIST_LENGTH}
    data, zeros = pattern.payload(LENGTH_BYTES, seed=seed), bytes(LENGTH_BYTES)
    is_write = direction is Direction.WRITE
    # The first rate of each list is a warm-up and is not compared.
    initiator_gb_per_s: list[float] = []
    perftest_gb_per_s: list[float] = []
    memory = bytearray(LENGTH_BYTES)
    with (
        nic.register_host(memory) as region,
        connect_initiator(nic, memory_bytes=LENGTH_BYTES) as initiator,
    ):
        for _ in range(rounds_count + 1):
            initiator.write(data if is_write else zeros)
            memory[:] = zeros if is_write else data
            burst = initiator.run(direction, region.remote(), **burst_options)
            pattern.check(bytes(memory) if is_write else initiator.read(), seed=seed)
            initiator_gb_per_s.append(burst.moved_bytes / burst.elapsed_ns)
            packets_before = read_sent_packets(nic)
            perftest_result = perftest.run_perftest(
                nic,
                direction,
                length_bytes=LENGTH_BYTES,
                operations=OPERATIONS,
                depth=DEPTH,
                list_length=LIST_LENGTH,
                reads_max=initiator.reads_max,
            )
            packets_after = read_sent_packets(nic)
            assert (perftest_result.length_bytes, perftest_result.operations) == (LENGTH_BYTES, OPERATIONS)
            # The rate exceeds the mean rate over the lifetime of the process, unless it was parsed wrongly or printed
            # as 0.
            assert (
                perftest_result.bytes_per_s * perftest_result.process_lifetime_s > perftest_result.moved_bytes
                or not perftest_result.bytes_per_s
            )
            if packets_before is not None and packets_after is not None and nic.port.mtu_bytes:
                assert packets_after - packets_before >= perftest_result.moved_bytes // nic.port.mtu_bytes
            perftest_gb_per_s.append(perftest_result.bytes_per_s / 1e9)
    evidence["operations"] = {**burst_options, "rounds": rounds_count}
    evidence["in_turn_gb_per_s"] = {"initiator": initiator_gb_per_s, "perftest": perftest_gb_per_s}
    # perftest prints 0 if it cannot determine the frequency of the processor.
    valid_perftest_gb_per_s = [rate for rate in perftest_gb_per_s[1:] if rate]
    if valid_perftest_gb_per_s:
        evidence.number("rounds_count", len(valid_perftest_gb_per_s))
        initiator_median, perftest_median = (
            statistics.median(initiator_gb_per_s[1:]),
            statistics.median(valid_perftest_gb_per_s),
        )
        evidence.number("initiator_gb_per_s_median", initiator_median)
        evidence.number("perftest_gb_per_s_median", perftest_median)
        evidence.number("initiator_over_perftest_ratio", initiator_median / perftest_median)


def test_perftest_output_is_parsed() -> None:
    # This version of perftest writes MB/sec, but means MiB/s.
    result = perftest.parse_output(PERFTEST_OUTPUT)
    assert (result.length_bytes, result.operations, round(result.bytes_per_s)) == (65536, 512, 31845253)


@pytest.mark.parametrize(
    "output",
    [
        "",
        "Number of iterations must be a multiple of post list size\n",
        " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n Completion with error\n",
        " #bytes     #iterations    BW peak[?/sec]    BW average[?/sec]   MsgRate[Mpps]\n 1 2 3.0 4.0 5.0\n",
    ],
    ids=["nothing", "refused", "cut_off", "unknown_unit"],
)
def test_unknown_perftest_output_is_an_error(output: str) -> None:
    with pytest.raises(ValueError, match="perftest printed no result"):
        perftest.parse_output(output)
