"""gdrkit.handles counts open handles, and ReleaseStack runs release actions once and in reverse order."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from gdrkit import handles
from gdrkit.handles import Handle, ReleaseStack, Resource


def test_live_counts_only_open_objects_by_kind() -> None:
    first_handle, second_handle = Handle("case.thing"), Handle("case.thing")
    assert handles.live()["case.thing"] == 2
    first_handle.release()
    first_handle.release()
    assert handles.live()["case.thing"] == 1
    second_handle.release()
    assert "case.thing" not in handles.live()


def test_dropped_object_warns_and_stays_counted() -> None:
    # A child process runs the program, because the dropped object stays counted until its process ends.
    program = """
import gc
from gdrkit import handles
handles.Handle("case.forgotten")
gc.collect()
print(handles.live())
"""
    child = subprocess.run([sys.executable, "-W", "always", "-c", program], capture_output=True, text=True, check=True)
    assert "case.forgotten was never closed" in child.stderr
    assert child.stdout.strip() == "{'case.forgotten': 1}"


def test_finalizer_inside_live_does_not_wait() -> None:
    # The garbage collector can run finalizers inside live(), so live() must hold no lock that a finalizer needs.
    program = """
import gc, os, warnings
from gdrkit import handles
from gdrkit.buffers import DmabufRange
from gdrkit.host import this_process
from gdrkit.registration.handle import ShareHandle, ShareKind
from gdrkit.registration.handle_message import HandleMessage

warnings.simplefilter("ignore")
open_handles = [handles.Handle(f"case.{number}") for number in range(5000)]
packed_handle = ShareHandle(
    kind=ShareKind.DMABUF,
    allocation_bytes=4096,
    offset_bytes=0,
    length_bytes=4096,
    address=4096,
    descriptor_count=1,
    device_uuid=bytes(range(16)),
    owner=this_process(),
).pack()
gc.disable()
for extra_allocations in range(40):
    # Each pass drops objects whose finalizers release handles. Their collection starts in live(), one allocation later
    # in each pass.
    for descriptor_owner in (
        DmabufRange(os.dup(0), offset_bytes=0, length_bytes=1, address=0),
        HandleMessage(packed_handle, [os.dup(0)]),
    ):
        cycle = [descriptor_owner]
        cycle.append(cycle)
    del descriptor_owner, cycle
    gc.set_threshold(gc.get_count()[0] + extra_allocations)
    gc.enable()
    handles.live()
    gc.disable()
gc.collect()
print(len(handles.live()))
"""
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=30)
    assert child.stdout.strip() == "5000", child.stderr


def test_handles_of_many_threads_are_counted() -> None:
    kinds = [f"case.thread{number}" for number in range(8)]
    open_handles: list[Handle] = []

    def open_and_release(kind: str) -> None:
        for _ in range(2000):
            handle = Handle(kind)
            assert handles.live()["case.shared"] == 1
            handle.release()
        open_handles.append(Handle(kind))

    shared_handle = Handle("case.shared")
    threads = [threading.Thread(target=open_and_release, args=(kind,)) for kind in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    live_counts = handles.live()
    assert {kind: live_counts.get(kind) for kind in kinds} == dict.fromkeys(kinds, 1)
    for handle in (*open_handles, shared_handle):
        handle.release()
    assert not set(handles.live()) & {*kinds, "case.shared"}


def test_live_works_in_a_child_forked_during_live() -> None:
    # The forked child has only the thread that called fork. If live() took a lock that another thread held at the fork,
    # the child would wait for ever.
    program = """
import os, signal, threading
from gdrkit import handles

open_handles = [handles.Handle(f"case.{number}") for number in range(20000)]
stop_event = threading.Event()

def call_live():
    while not stop_event.is_set():
        handles.live()

thread = threading.Thread(target=call_live, daemon=True)
thread.start()
for _ in range(20):
    child_pid = os.fork()
    if not child_pid:
        signal.alarm(10)
        handles.Handle("case.child").release()
        os._exit(0 if len(handles.live()) == 20000 else 1)
    assert os.waitpid(child_pid, 0)[1] == 0
stop_event.set()
thread.join()
for handle in open_handles:
    handle.release()
"""
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert child.returncode == 0, child.stderr


class ResourceClosedInItsRelease(Resource):
    """A resource whose release calls close(), as a signal handler could do during release. The first release fails."""

    def __init__(self) -> None:
        super().__init__("case.closed_in_release", name="resource of a case")
        self.release_count = 0

    def _release(self) -> None:
        self.release_count += 1
        self.close()
        if self.release_count == 1:
            message = "the driver refuses"
            raise OSError(message)


def test_close_during_the_release_releases_nothing_twice() -> None:
    resource = ResourceClosedInItsRelease()
    with pytest.raises(OSError, match="the driver refuses"):
        resource.close()
    assert (resource.closed, resource.release_count, handles.live()["case.closed_in_release"]) == (False, 1, 1)
    resource.close()
    assert (resource.closed, resource.release_count) == (True, 2)
    assert "case.closed_in_release" not in handles.live()


def test_actions_run_once_and_in_reverse_order() -> None:
    call_order: list[str] = []
    stack = ReleaseStack()
    for name in ("first", "second", "third"):
        stack.push(lambda name=name: call_order.append(name))  # type: ignore[misc]
    stack.run()
    stack.run()
    assert call_order == ["third", "second", "first"]


def test_removed_action_does_not_run() -> None:
    call_order: list[str] = []
    stack = ReleaseStack()
    remove_action = stack.push(lambda: call_order.append("no"))
    stack.push(lambda: call_order.append("yes"))
    remove_action()
    remove_action()
    stack.run()
    assert call_order == ["yes"]


def test_action_can_remove_another_action() -> None:
    call_order: list[str] = []
    stack = ReleaseStack()
    remove_action = stack.push(lambda: call_order.append("child"))
    stack.push(remove_action)
    stack.run()
    assert call_order == []
    assert len(stack) == 0


def test_failed_action_is_raised_after_the_others_and_retried() -> None:
    call_order: list[str] = []
    pending_errors = [ValueError("one"), KeyError("two")]
    stack = ReleaseStack()

    def raise_pending_error(name: str) -> None:
        call_order.append(name)
        if pending_errors:
            raise pending_errors.pop(0)

    for name in ("a", "b"):
        stack.push(lambda name=name: raise_pending_error(name))  # type: ignore[misc]
    stack.push(lambda: call_order.append("c"))
    with pytest.raises(ValueError, match="one") as error_info:
        stack.run()
    assert call_order == ["c", "b", "a"]
    assert any("two" in note for note in error_info.value.__notes__)
    assert len(stack) == 2
    stack.run()
    assert call_order == ["c", "b", "a", "b", "a"]
    assert len(stack) == 0


def test_run_after_adds_its_failure_as_a_note() -> None:
    stack = ReleaseStack()

    def fail() -> None:
        message = "cannot undo"
        raise ValueError(message)

    stack.push(fail)
    error = RuntimeError("first")
    stack.run_after(error)
    assert any("cannot undo" in note for note in error.__notes__)
