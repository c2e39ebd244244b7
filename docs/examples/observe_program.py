"""Observe from outside which path the bytes of another program took."""

from __future__ import annotations

import os
import subprocess
import sys

from gdrkit import evidence, host, observe

# A program that sends 100,000 bytes to itself by TCP.
SENDER = """
import socket, time
listener = socket.create_server(("127.0.0.1", 0))
sender = socket.create_connection(listener.getsockname())
receiver, _ = listener.accept()
sender.sendall(bytes(100_000))
received_bytes = 0
while received_bytes < 100_000:
    received_bytes += len(receiver.recv(65536))
time.sleep(0.5)
"""

observation, wait_status = observe.run_observed([sys.executable, "-c", SENDER])
assert os.waitstatus_to_exitcode(wait_status) == 0
print(observe.describe_observation(observation))
assert observation.route("tcp") is not None
assert observe.Observation.from_json(observation.to_json()) == observation
assert observe.derive_routes(observation).routes == observation.routes
html_page = observe.render_page(observation)
print(len(html_page), "characters of HTML;", [process.program for process in observation.processes])

# Observe a process that already runs. Transfers before this call do not count.
with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
    child_observation = observe.observe_process(child.pid, duration_s=0.2)
    print(host.descendants(host.HostTree(), child.pid))
    descriptor_targets = evidence.descriptor_targets(str(child.pid))
    print("dma-bufs:", evidence.held_dmabufs(host.HostTree(), str(child.pid), descriptor_targets))
    child.kill()
print(child_observation.routes[0].route, child_observation.routes[0].outcome.value)

# An observation combines sources that can also be used alone: samples of processes and ports, GPU traffic counters, TCP
# sockets, and the RDMA objects of the kernel.
with observe.Observer() as observer:
    observer.sample(os.getpid())
    # The arguments are the command and its exit code, which is None because this program still runs.
    print([port.has_grown for port in observer.finish(["this program"], None).ports])
with host.GpuTrafficCounter() as counter:
    counter.start()
    print(counter.failure or counter.traffic())
# A 32-bit counter wraps from 0xFFFFFFFF to 0. So it grows by 0x200 from 0xFFFFFF00 to 0x100.
wrapping_counter = host.WrappingCounter()
for counter_value, now_s in ((0xFFFF_FF00, 0.00), (0x100, 0.02)):
    wrapping_counter.add(counter_value, now_s)
assert wrapping_counter.growth == 0x200
print(len(evidence.tcp_sockets()), "TCP sockets")
try:
    print(evidence.rdma_queue_pairs(), evidence.rdma_regions())
except OSError as error:
    print("RDMA netlink:", error.strerror)
