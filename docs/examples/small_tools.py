"""The small tools that all packages share: errors, patterns, sizes, handles, descriptors, JSON, child processes."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import socket
import subprocess
import threading
from pathlib import Path

from gdrkit import (
    buffers,
    children,
    errors,
    exit_code,
    forks,
    handles,
    install_paths,
    loader,
    pattern,
    remedies,
    scm_rights,
    serialization,
    text,
    units,
)

# Each byte of a payload depends on its position and the seed.
payload = pattern.payload(4096, seed=7)
pattern.check(payload, seed=7)
assert pattern.find_mismatch(payload, payload[:100] + b"\0" + payload[101:]) == 100
try:
    pattern.check(bytes(4096), seed=7)
except errors.DataMismatch as error:
    print(error)

# Sizes and ranges.
assert units.align_up(5000, alignment_bytes=4096) == 8192
assert units.align_down(5000, alignment_bytes=4096) == 4096
print(units.format_bytes(3 * units.MIB))
try:
    buffers.check_range(offset_bytes=10, length_bytes=10, size_bytes=15)
except errors.UsageError as error:
    print(error, "->", exit_code.ExitCode.of(error).name)
print(errors.errno_name(errno.EOPNOTSUPP))

# A DmabufRange is a range of a dma-buf, and owns a duplicate of its descriptor. Here a memfd replaces the dma-buf.
memfd = os.memfd_create("exporter")
os.truncate(memfd, 8192)
with buffers.DmabufRange.from_fd(memfd, offset_bytes=4096) as dmabuf:
    assert dmabuf.length_bytes == 4096

# receive() takes descriptors from a socket. They are close-on-exec, and a truncated message is an error.
own_socket, peer_socket = socket.socketpair()
with own_socket, peer_socket:
    socket.send_fds(own_socket, [b"x"], [memfd])
    received_bytes, received_descriptors = scm_rights.receive(peer_socket, length_bytes=1, descriptors_max=1)
    assert (received_bytes, len(received_descriptors)) == (b"x", 1)
    scm_rights.close_all(received_descriptors)
os.close(memfd)


# Each Resource is counted in handles.live() until it is closed.
class ExampleResource(handles.Resource):
    """A resource whose release prints a line."""

    def __init__(self) -> None:
        super().__init__("example", name="the example")

    def _release(self) -> None:
        print("the example is released")


with ExampleResource():
    assert handles.live()["example"] == 1
assert "example" not in handles.live()
# handles.live() counts an object of another class if the object has a Handle.
handle = handles.Handle("counted")
handle.release()
# A ReleaseStack runs its actions in the reverse order of their addition.
release_stack = handles.ReleaseStack()
release_stack.push(lambda: print("released last"))
release_stack.push(lambda: print("released first"))
release_stack.run()


# A fork may copy a lock while another thread holds it. A ForkSafeLock is free in the child, and each registered object
# can reset itself there.
class Counter:
    """A counter that is 0 again in a forked child."""

    def __init__(self) -> None:
        self.count = 1
        self.lock = forks.ForkSafeLock()
        forks.register(self)

    def after_fork_in_child(self) -> None:
        """Reset the counter in the child."""
        self.count = 0


counter = Counter()
with counter.lock:
    assert counter.lock.locked()
# The child exits with its count, which is 0.
if os.fork() == 0:
    os._exit(counter.count)
assert os.wait()[1] == 0


# JSON with types: unknown fields and wrong types are refused.
@dataclasses.dataclass(frozen=True)
class Value:
    """A value with one field."""

    count: int


document = serialization.canonical(serialization.to_json_data(Value(3)))
assert serialization.from_json_data(Value, serialization.parse_json(document, where="example")) == Value(3)
print(serialization.digest(serialization.to_json_data(Value(3)))[:15])

# These functions make text from untrusted sources safe for a terminal and for a table.
print(text.escape_controls("bell\a"), text.single_line("two\nlines"), text.markdown_cell("a|b"))
print(text.format_count(1, "NIC"), text.format_count(0, "process", "processes"))

# The loader finds libraries and modules. Its errors say what is missing, and what to do.
print("libc:", loader.find_library("libc.so.6"))
print(list(loader.search_paths("libfoo.so", search_path=["/usr/lib"])))
try:
    loader.check_library("libmissing.so.1", operation="open the example")
except errors.SetupMissing as error:
    print(error.reason.value)
try:
    with loader.preserve_root_logger():
        loader.import_package("missing_package", extension="device", folder="/nonexistent", what_to_do="install it")
except errors.SetupMissing as error:
    print(error)
lazy_module = loader.LazyModule("gdrkit.gds._engine")
print("imported at its first use:", loader.import_native("gdrkit.gds._engine").__name__, lazy_module)
missing_error = loader.setup_missing(
    operation="dlopen", text="libx: not found", what_to_do="install x", default_errno=errno.ENOENT
)
assert isinstance(missing_error, errors.SetupMissing)
installed_paths = install_paths.install_paths()
assert Path(installed_paths.suites).is_dir()

# remedies returns the commands that install missing packages with the package manager of this machine.
print(remedies.package_manager(), remedies.system_install("g++"), remedies.pip_install("fuse"), sep="; ")
assert remedies.package_names("g++", manager="dnf") == ("gcc-c++",)

# These tools end a child process, and wait for threads, so that neither outlives its owner.
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
children.kill_child(child)
spawned_child = children.SpawnedChild()
spawned_child.start(["/bin/sleep", "60"], os.environ, output_path=os.devnull, error_output_path=os.devnull)
assert not spawned_child.end()
assert spawned_child.returncode == -signal.SIGKILL
thread = threading.Thread(target=lambda: None)
thread.start()
children.join_threads([thread], timeout_s=5)
