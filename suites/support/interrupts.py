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

# After these instructions, the interpreter of Python 3.11 to 3.13 checks whether a signal has arrived. Interrupter
# counts a point after each of these instructions. Also after CALL of a Python function, it counts a point when the
# function has returned. The interpreter does not check there, so these cases are stricter than necessary.
_INSTRUCTION_BEFORE_CHECK = re.compile(r"CALL(_KW|_FUNCTION_EX)?|(POP_)?JUMP_BACKWARD(_IF_\w+)?|RESUME")
# The two low bits of the argument of RESUME tell where the function continues: at its start (0), or after "yield" (1),
# "yield from" (2) or "await" (3). After the last two, the interpreter does not check.
_RESUME_MASK, _RESUME_YIELD_FROM = 3, 2


def _is_followed_by_check(bytecode: bytes, offset: int) -> bool:
    """Return whether the interpreter may check for signals after the instruction at this offset."""
    opcode_name, argument = opcode.opname[bytecode[offset]], bytecode[offset + 1]
    if opcode_name == "RESUME" and argument & _RESUME_MASK >= _RESUME_YIELD_FROM:
        return False
    return _INSTRUCTION_BEFORE_CHECK.fullmatch(opcode_name) is not None


def _raise_interrupt() -> None:
    raise KeyboardInterrupt


class Interrupter:
    """Runs a signal handler at one point of a call.

    Parameters
    ----------
    point : int
        Number of the point, counted from 1 in the order of execution.
    folders : str
        Folders of the code in which points are counted. Points in contextlib are counted, too.
    handler : callable
        The handler. By default, it raises KeyboardInterrupt, as the handler of Ctrl-C does.

    Attributes
    ----------
    interrupted_at : str
        File, line and function in which the handler ran; empty if the call has fewer than `point` points.
    """

    def __init__(self, point: int, *folders: str, handler: Callable[[], None] = _raise_interrupt) -> None:
        self.interrupted_at = ""
        self._handler = handler
        self._points_left = point
        self._path_prefixes = (*folders, contextlib.__file__)
        self._bytecodes: dict[CodeType, bytes] = {}

    def call(self, function: Callable[[], object]) -> KeyboardInterrupt | None:
        """Call `function`, and return the KeyboardInterrupt that it raised, or None.

        The traceback of the exception keeps the frames of the call alive.
        """
        previous_trace = sys.gettrace()
        # Python 3.12 reports opcodes only if a frame requests them by f_trace_opcodes before settrace().
        sys._getframe().f_trace_opcodes = True  # noqa: SLF001 - inspect.currentframe() may return None.
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
        bytecode = self._bytecodes.setdefault(code, code.co_code)
        may_run_handler = False

        def trace_instruction(frame: FrameType, event: str, _argument: object) -> Callable[..., Any]:
            nonlocal may_run_handler
            if event == "opcode" and may_run_handler and not self.interrupted_at:
                self._points_left -= 1
                if self._points_left == 0:
                    self.interrupted_at = f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}"
                    self._handler()
            # After an instruction that raised an exception, the interpreter does not check for signals.
            may_run_handler = event != "exception" and _is_followed_by_check(bytecode, frame.f_lasti)
            return trace_instruction

        # Python 3.13.0 ignores f_trace_opcodes of a frame without f_trace, so set both.
        frame.f_trace, frame.f_trace_lines = trace_instruction, False
        frame.f_trace_opcodes = True
        # The event "call" comes at the instruction RESUME, after which the interpreter may check for signals.
        return trace_instruction(frame, event, None)
