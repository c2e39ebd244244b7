"""RDMA by reliable connections: regions, queue pairs, completions, and the native initiator."""

from __future__ import annotations

import mmap

from gdrkit import pattern, verbs

LENGTH_BYTES = 65536

for info in verbs.list_nics():
    print(info.name, info.driver, [(port.number, port.state.name, port.link_layer.name) for port in info.ports])

nics = verbs.open_active_nics(count_max=1)
with nics[0] as nic, mmap.mmap(-1, LENGTH_BYTES) as target, nic.register_host(target) as region:
    print(nic.name, "registers dma-bufs:", nic.supports_dmabuf())

    # This process connects two queue pairs of one NIC. Two processes would send their endpoints to each other.
    with (
        nic.register_host(bytearray(pattern.payload(LENGTH_BYTES, seed=1))) as source,
        verbs.CompletionQueue(nic, depth=16, events=False) as completion_queue,
        nic.queue_pair(completion_queue) as sender,
        nic.queue_pair(completion_queue) as receiver,
    ):
        sender.connect(receiver.endpoint())
        receiver.connect(sender.endpoint())
        sender.post_write(source, region.remote(), work_id=7)
        completion = sender.wait(timeout_ms=10_000).expect(verbs.Status.SUCCESS)
        assert completion.work_id == 7
        pattern.check(target[:], seed=1)

        # A send needs a receive that the other side posted first.
        receiver.post_receive(region, work_id=8)
        sender.post_send(source, work_id=9, immediate=42)
        assert receiver.wait_received(timeout_ms=10_000).expect().immediate == 42
        sender.wait(timeout_ms=10_000).expect()

        # The NIC of the other side refuses a wrong key.
        target_range = region.remote()
        wrong_key_range = verbs.RemoteRange(
            address=target_range.address, rkey=target_range.rkey ^ 0xFFFF, length_bytes=16
        )
        sender.post_write(source, wrong_key_range, work_id=10, length_bytes=16)
        print("the status with a wrong key is", sender.wait(timeout_ms=10_000).status.header_name)

    # The initiator posts transfers from native code, without the GIL, and measures them.
    with (
        verbs.Initiator(nic.name, memory_bytes=LENGTH_BYTES) as initiator,
        nic.completion_queue() as completion_queue,
        nic.queue_pair(completion_queue) as responder,
    ):
        (endpoint,) = initiator.endpoints()
        initiator.connect([responder.endpoint()])
        responder.connect(endpoint)
        initiator.write(pattern.payload(LENGTH_BYTES, seed=2))
        burst = initiator.run(verbs.Direction.WRITE, region.remote(), length_bytes=LENGTH_BYTES, operations=4, depth=2)
        assert burst.moved_bytes == 4 * LENGTH_BYTES
        pattern.check(target[:], seed=2)
        latency_result = initiator.run_singly(verbs.Direction.READ, region.remote(), length_bytes=8, operations=3)
        assert len(latency_result.times_ns) == 3
