"""Headless Chromium, spoken to over two pipes by the DevTools protocol: the window, what the page complains of, a
picture, the findings of axe-core.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import select
import subprocess
import time
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Browser", "Page"]

TIMEOUT_S = 100.0
# As root, without a screen, and asking nobody on a network for anything.
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-extensions"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    *("--disable-dev-shm-usage", "--allow-file-access-from-files", "--remote-debugging-pipe"),
)
READ_END, WRITE_END = 3, 4
WIDE = """
[...document.querySelectorAll('body *')].filter(it => {
  const box = it.getBoundingClientRect();
  if (!box.width || it.closest('.scroll, .hidden, .skip, thead') || it.closest('pre')) return false;
  return box.right > innerWidth + 1 || box.left < -1;
}).slice(0, 5).map(it => it.tagName + '.' + it.getAttribute('class') + ': ' + it.textContent.trim().slice(0, 60))
"""
AXE = """
axe.run(document, {resultTypes: ['violations']}).then(found => JSON.stringify(found.violations.map(
  it => it.id + ': ' + it.help + ': ' + it.nodes.slice(0, 3).map(node => node.target.join(' ')).join(' | '))))
"""


class Browser:
    """One Chromium with a profile of its own; a context manager."""

    def __init__(self, program: str, folder: Path) -> None:
        commands, self._commands = os.pipe()
        self._events, events = os.pipe()
        command = [program, *OPTIONS, f"--user-data-dir={folder}", "about:blank"]
        # The two ends have the numbers that Chromium wants, in the child alone.
        shell = f'exec "$@" {READ_END}<&{commands} {WRITE_END}>&{events}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(commands, events),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (commands, events):
            os.close(end)
        self._left = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._commands, b'{"id": 0, "method": "Browser.close"}\0')
        for end in (self._commands, self._events):
            os.close(end)
        try:
            self._process.wait(TIMEOUT_S / 10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def call(self, method: str, session: str | None = None, **parameters: object) -> dict[str, Any]:
        """Ask, and wait for the answer; what comes before it is kept in ``events``."""
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        if "error" in answer:
            message_text = f"{method}: {answer['error']}"
            raise RuntimeError(message_text)
        result: dict[str, Any] = answer["result"]
        return result

    def until(self, method: str) -> None:
        """Wait for an event."""
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._next())

    def page(self, *, width: int, is_dark: bool) -> Page:
        """A new window."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Page(self, session, width=width, is_dark=is_dark)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._events], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._events, 1 << 20) if ready else b""
            if not data:
                message = "Chromium ended" if ready else f"Chromium said nothing for {TIMEOUT_S:g} s"
                raise RuntimeError(message)
            self._left += data
        whole, _, self._left = self._left.partition(b"\0")
        found: dict[str, Any] = json.loads(whole)
        return found


class Page:
    """One window of a width, light or dark."""

    def __init__(self, browser: Browser, session: str, *, width: int, is_dark: bool) -> None:
        self._browser = browser
        self._session = session
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")

    def open(self, path: Path) -> None:
        """Load a file and wait until it is there."""
        self._browser.events.clear()
        self._ask("Page.navigate", url=path.as_uri())
        self._browser.until("Page.loadEventFired")

    def complaints(self) -> list[str]:
        """What stands on its console, and what it threw."""
        kinds = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return [json.dumps(event["params"]) for event in self._browser.events if event.get("method") in kinds]

    def evaluate(self, expression: str) -> Any:  # noqa: ANN401 - whatever the page answers.
        """The value of an expression, also of one that is promised."""
        answer = self._ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def overflow(self) -> list[str]:
        """What is wider than the window, outside of what scrolls by itself."""
        width = self.evaluate("document.documentElement.scrollWidth - innerWidth")
        found = [str(it) for it in self.evaluate(WIDE)]
        return [f"the page is {width} pixels too wide", *found] if width > 0 else found

    def violations(self, axe: Path) -> list[str]:
        """What axe-core finds."""
        self.evaluate(axe.read_text(encoding="utf-8") + ";0")
        return [str(it) for it in json.loads(self.evaluate(AXE))]

    def press(self, key: str) -> None:
        """Press and release a key that has no letter."""
        for kind in ("rawKeyDown", "keyUp"):
            self._ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=9)

    def emulate_print(self) -> None:
        """Lay it out as on paper."""
        self._ask("Emulation.setEmulatedMedia", media="print")

    def printed_pages(self) -> int:
        """How many pages a printer would get."""
        data = base64.b64decode(self._ask("Page.printToPDF")["data"])
        return len(re.findall(rb"/Type /Page\b", data))

    def picture(self, path: Path) -> None:
        """The whole page as a PNG."""
        data = self._ask("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(data))

    def _ask(self, method: str, **parameters: object) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)
