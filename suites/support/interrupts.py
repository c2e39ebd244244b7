"""A class that runs a signal handler at one point of a call, for cases about interrupts such as Ctrl-C.

CPython runs signal handlers only between two bytecodes, after certain instructions. A case repeats a call with the
handler at the first of these points, at the second, and so on until the call ends without an interrupt.
"""

from __future__ import annotations

import contextlib
import opcode
import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

__all__ = ["Interrupter"]

# After these instructions the interpreter checks whether a signal has arrived, with Python 3.11 to 3.13. There are more
# points than checks: it does not check after a call that ran a Python function, but a point follows each such call.
_CHECKED_INSTRUCTION = re.compile(r"CALL(_KW|_FUNCTION_EX)?|(POP_)?JUMP_BACKWARD(_IF_\w+)?|RESUME")
# The argument of RESUME tells what it continues. If that is "yield from" or "await", the interpreter does not check.
_RESUME_MASK, _RESUME_YIELD_FROM = 3, 2


def _is_checked(instructions: bytes, offset: int) -> bool:
    """Return whether the interpreter checks for signals after the instruction at this offset."""
    name, argument = opcode.opname[instructions[offset]], instructions[offset + 1]
    if name == "RESUME" and argument & _RESUME_MASK >= _RESUME_YIELD_FROM:
        return False
    return _CHECKED_INSTRUCTION.fullmatch(name) is not None


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

    def _trace_call(self, frame: FrameType, event: str, _argument: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if not code.co_filename.startswith(self._path_prefixes):
            return None
        instructions = self._instructions.setdefault(code, code.co_code)
        # Whether CPython may run a signal handler before the next instruction.
        is_point = False

        def trace_instruction(frame: FrameType, event: str, _argument: object) -> Callable[..., Any]:
            nonlocal is_point
            if event == "opcode" and is_point and not self.interrupted_at:
                self._points_left -= 1
                if self._points_left == 0:
                    self.interrupted_at = f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}"
                    self._handler()
            # The interpreter does not check after an instruction that raised an exception.
            is_point = event != "exception" and _is_checked(instructions, frame.f_lasti)
            return trace_instruction

        # Python 3.13.0 ignores f_trace_opcodes of a frame without f_trace.
        frame.f_trace, frame.f_trace_lines = trace_instruction, False
        frame.f_trace_opcodes = True
        return trace_instruction(frame, event, None)  # The event of a call comes at the instruction RESUME.
