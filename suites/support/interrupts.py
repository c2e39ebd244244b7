"""A class that runs a signal handler at one point of a call, for cases about interrupts such as Ctrl-C.

CPython runs signal handlers only between two bytecodes, after certain instructions. A case repeats a call with the
handler at the first of these points, at the second, and so on until the call ends without an interrupt.
"""

from __future__ import annotations

import contextlib
import opcode
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

__all__ = ["Interrupter"]

# After these instructions the interpreter checks whether a signal has arrived.
_CHECKED_INSTRUCTIONS = ("CALL", "RESUME", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")


def _raise_interrupt() -> None:
    raise KeyboardInterrupt


class Interrupter:
    """Runs a signal handler at one point of a call.

    Parameters
    ----------
    point : int
        Number of the point, from 1.
    folders : str
        Folders of the code that is interrupted. The context managers of contextlib are interrupted, too.
    handler : callable
        The handler. By default, it raises KeyboardInterrupt, as the handler of Ctrl-C does.

    Attributes
    ----------
    interrupted_at : str
        The point that was reached; empty if the call has fewer points.
    """

    def __init__(self, point: int, *folders: str, handler: Callable[[], None] = _raise_interrupt) -> None:
        self.interrupted_at = ""
        self._handler = handler
        self._points_left = point
        self._path_prefixes = (*folders, contextlib.__file__)
        self._instructions: dict[CodeType, bytes] = {}

    def call(self, function: Callable[[], object]) -> KeyboardInterrupt | None:
        """Call a function. Return the interrupt that it raised, or None.

        The interrupt keeps the frames of the call alive.
        """
        previous_trace = sys.gettrace()
        # Python 3.12 reports opcodes only if a frame has asked for them before settrace().
        sys._getframe().f_trace_opcodes = True  # noqa: SLF001 - CPython has no other way to this frame.
        sys.settrace(self._trace_call)
        try:
            function()
        except KeyboardInterrupt as error:
            return error
        finally:
            sys.settrace(previous_trace)
        return None

    def _trace_call(self, frame: FrameType, _event: str, _argument: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if not code.co_filename.startswith(self._path_prefixes):
            return None
        instructions = self._instructions.setdefault(code, code.co_code)
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        # Whether CPython may run a signal handler before the next instruction.
        is_point = False

        def trace_instruction(frame: FrameType, event: str, _argument: object) -> Callable[..., Any]:
            nonlocal is_point
            if event == "opcode":
                if is_point and not self.interrupted_at:
                    self._points_left -= 1
                    if self._points_left == 0:
                        self.interrupted_at = f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}"
                        self._handler()
                is_point = opcode.opname[instructions[frame.f_lasti]].startswith(_CHECKED_INSTRUCTIONS)
            return trace_instruction

        return trace_instruction
