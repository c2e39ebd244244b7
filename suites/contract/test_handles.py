"""What is open is counted, and what must go first goes first."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gdrkit import handles
from gdrkit.handles import Handle, ReleaseStack


def test_live_counts_by_kind_and_leaves_out_what_is_gone() -> None:
    first, second = Handle("case.thing"), Handle("case.thing")
    assert handles.live()["case.thing"] == 2
    first.release()
    first.release()
    assert handles.live()["case.thing"] == 1
    second.release()
    assert "case.thing" not in handles.live()


def test_a_forgotten_object_is_said_and_stays_counted() -> None:
    # In a process of its own, since it stays counted there.
    code = """
import gc
from gdrkit import handles
handles.Handle("case.forgotten")
gc.collect()
print(handles.live())
"""
    done = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=True)
    assert "case.forgotten was never closed" in done.stderr
    assert done.stdout.strip() == "{'case.forgotten': 1}"


def test_actions_run_last_added_first_and_once() -> None:
    order: list[str] = []
    stack = ReleaseStack()
    for name in ("first", "second", "third"):
        stack.push(lambda name=name: order.append(name))  # type: ignore[misc]
    stack.run()
    stack.run()
    assert order == ["third", "second", "first"]


def test_an_action_that_was_taken_back_does_not_run() -> None:
    order: list[str] = []
    stack = ReleaseStack()
    take_back = stack.push(lambda: order.append("no"))
    stack.push(lambda: order.append("yes"))
    take_back()
    take_back()
    stack.run()
    assert order == ["yes"]


def test_an_action_may_take_another_one_back() -> None:
    order: list[str] = []
    stack = ReleaseStack()
    take_back = stack.push(lambda: order.append("child"))
    stack.push(take_back)
    stack.run()
    assert order == []
    assert len(stack) == 0


def test_a_failure_is_raised_after_the_others_ran_and_is_tried_again() -> None:
    order: list[str] = []
    failing = [ValueError("one"), KeyError("two")]
    stack = ReleaseStack()

    def refuse(name: str) -> None:
        order.append(name)
        if failing:
            raise failing.pop(0)

    for name in ("a", "b"):
        stack.push(lambda name=name: refuse(name))  # type: ignore[misc]
    stack.push(lambda: order.append("c"))
    with pytest.raises(ValueError, match="one") as caught:
        stack.run()
    assert order == ["c", "b", "a"]
    assert any("two" in note for note in caught.value.__notes__)
    assert len(stack) == 2
    stack.run()
    assert order == ["c", "b", "a", "b", "a"]
    assert len(stack) == 0


def test_undoing_adds_its_failure_to_the_error_that_is_on_its_way() -> None:
    stack = ReleaseStack()

    def refuse() -> None:
        message = "cannot undo"
        raise ValueError(message)

    stack.push(refuse)
    error = RuntimeError("first")
    stack.run_after(error)
    assert any("cannot undo" in note for note in error.__notes__)
