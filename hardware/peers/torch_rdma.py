"""Send a file between the CUDA tensors of two processes by RDMA: ``torch_rdma.py [--length-bytes N]``.

The first process reads the file into a CUDA tensor of torch with gdrkit.gds. The second process registers its own CUDA
tensor with a NIC. The first process writes its tensor into the tensor of the second process by RDMA, and the second
process compares every byte with the file. This program needs torch, gdrkit and pyverbs, and runs on a real GPU as well
as on the software twins.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gdrkit import cuda, gds, verbs
from gdrkit.registration import register

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_DEVICE = 0
_WRITE_TIMEOUT_MS = 30_000


def receive(connection: Connection, path: str, length_bytes: int) -> None:
    """Offer a tensor to the sender, wait until the sender has written it, and check it.

    Messages over the pipe: the receiver sends its endpoint and the range of its tensor; the sender sends its endpoint;
    the receiver sends "connected"; the sender sends "written"; the receiver sends the route of its registration and the
    number of wrong bytes.
    """
    tensor = torch.empty(length_bytes, dtype=torch.uint8, device=f"cuda:{_DEVICE}")
    # The fill value is copied from host memory, because torch fills device memory by a kernel, which a twin cannot run.
    tensor.copy_(torch.full((length_bytes,), 0xA5, dtype=torch.uint8))
    torch.cuda.synchronize()
    with (
        cuda.Device(_DEVICE) as device,
        verbs.open_active_nics(count_max=1)[0] as nic,
        cuda.wrap(tensor, device=device) as memory,
        register(memory, [nic]) as registration,
        verbs.CompletionQueue(nic, depth=16, events=False) as completion_queue,
        nic.queue_pair(completion_queue) as queue_pair,
    ):
        connection.send((queue_pair.endpoint(), registration.remote(nic)))
        queue_pair.connect(connection.recv())
        connection.send("connected")
        connection.recv()  # "written"
        expected_tensor = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)
        connection.send((registration.route.value, int((tensor.cpu() != expected_tensor).sum())))


def send(path: Path, length_bytes: int) -> None:
    """Read the file into a tensor, write it into the tensor of the receiver, and print the result."""
    spawn_context = multiprocessing.get_context("spawn")
    connection, child_connection = spawn_context.Pipe()
    receiver = spawn_context.Process(target=receive, args=(child_connection, str(path), length_bytes), daemon=True)
    receiver.start()
    child_connection.close()
    tensor = torch.empty(length_bytes, dtype=torch.uint8, device=f"cuda:{_DEVICE}")
    with gds.File(path, direct="never") as file:
        read_result = file.read_into(tensor)
    with (
        cuda.Device(_DEVICE) as device,
        verbs.open_active_nics(count_max=1)[0] as nic,
        cuda.wrap(tensor, device=device) as memory,
        register(memory, [nic]) as registration,
        verbs.CompletionQueue(nic, depth=16, events=False) as completion_queue,
        nic.queue_pair(completion_queue) as queue_pair,
    ):
        endpoint, remote_range = connection.recv()
        queue_pair.connect(endpoint)
        connection.send(queue_pair.endpoint())
        connection.recv()  # "connected"
        queue_pair.post_write(registration.region(nic), remote_range, work_id=1)
        queue_pair.wait(timeout_ms=_WRITE_TIMEOUT_MS).expect(verbs.Status.SUCCESS)
        connection.send("written")
        registration_route, wrong_byte_count = connection.recv()
    receiver.join()
    gds.close_engines()
    if read_result.bytes != length_bytes or wrong_byte_count:
        message = f"{read_result.bytes} of {length_bytes} bytes were read, and {wrong_byte_count} bytes arrived wrong"
        raise SystemExit(message)
    device_name = torch.cuda.get_device_name(_DEVICE)
    print(  # noqa: T201 - the output of a program.
        f"{device_name}: {length_bytes} bytes: file -> tensor by {read_result.route.value}, "
        f"tensor -> tensor by RDMA ({registration_route}): right"
    )


def main() -> None:
    """Run both processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length-bytes", type=int, default=(8 << 20) + 12345, help="size of the file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "data")
        path.write_bytes(os.urandom(options.length_bytes))
        send(path, options.length_bytes)


if __name__ == "__main__":
    main()
