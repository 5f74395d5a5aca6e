"""A headless Chromium of the system, or of the variable CHROME, that tests drive by its DevTools
protocol, over a pipe."""

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_PATIENCE = 60.0  # seconds for an answer, however busy the machine
_COMPLAINTS = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
_COMPLAINTS += ("Page.javascriptDialogOpening",)
# The browser reads commands from file descriptor 3 and writes answers to 4.
_LAUNCHER = (
    "import fcntl, os, sys; "
    "r, w = (fcntl.fcntl(int(x), fcntl.F_DUPFD, 10) for x in sys.argv[1:3]); "
    "os.dup2(r, 3); os.dup2(w, 4); os.execvp(sys.argv[3], sys.argv[3:])"
)


def installed() -> str | None:
    """The browser's program, or None."""
    names = (os.environ["CHROME"],) if os.environ.get("CHROME") else _NAMES
    return next(filter(None, map(shutil.which, names)), None)


class Browser:
    """A browser with one page; `requests` has every address that the page asked for, `complaints`
    lines in the console, exceptions, and what policies forbade."""

    def __init__(self) -> None:
        program = installed()
        assert program is not None
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._commands = os.pipe()
        self._answers, theirs_out = os.pipe()
        options = [
            "--headless=new",
            "--remote-debugging-pipe",
            "--no-sandbox",  # tests run as root in containers, where the sandbox cannot start
            "--no-first-run",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            f"--user-data-dir={self._profile.name}",
        ]
        pipe = [str(theirs_in), str(theirs_out)]
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _LAUNCHER, *pipe, program, *options],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer, self._number, self._session = b"", 0, None
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(_PATIENCE)
        os.close(self._commands)
        os.close(self._answers)
        self._profile.cleanup()

    # ---------------------------------------------------------------------------------- protocol

    def call(self, method: str, **params: Any) -> Any:
        """One command of the protocol, and its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self._commands, content) :]
        while True:
            answer = self._next(method)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)

    def _next(self, waiting_for: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], _PATIENCE)
            assert ready, f"the browser gave no answer to {waiting_for}"
            content = os.read(self._answers, 1 << 20)
            assert content, f"the browser has ended, at {waiting_for}"
            self._buffer += content
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(event["params"]["request"]["url"])
        elif event.get("method") in _COMPLAINTS:
            self.complaints.append(str(event))

    # -------------------------------------------------------------------------------------- page

    def show(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """The size of the window, the system's theme, and whether fingers take a mouse's place."""
        scale = {"deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, **scale)
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, path: Path, ready: str = "document.body.dataset.ready") -> None:
        """Opens a file as a page, and waits until the expression is true."""
        self.requests.clear()
        self.complaints.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for(f"document.readyState === 'complete' && !!({ready})")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; promises are awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def assert_fits_and_loads_only(self, path: Path) -> None:
        """The page is as wide as the window, loads this file and inline pictures, and complains
        about nothing."""
        assert self.evaluate("document.documentElement.scrollWidth <= innerWidth")
        loaded = [x for x in self.requests if not x.startswith("data:image/png;")]
        assert loaded == [path.resolve().as_uri()] and not self.complaints

    def wait_for(self, expression: str) -> None:
        """Waits until the expression is true."""
        last = time.monotonic() + _PATIENCE
        while not self.evaluate(expression):
            assert time.monotonic() < last, f"never became true: {expression}"
            time.sleep(0.02)

    def settle(self) -> None:
        """Waits for two frames, after which all changes are drawn."""
        self.evaluate(
            "new Promise((then) => requestAnimationFrame(() => requestAnimationFrame("
            "() => setTimeout(then, 20))))"
        )

    def middle_of(self, selector: str) -> tuple[float, float]:
        """The middle of the first element of a CSS selector, in pixels of the window."""
        box = self.get(selector, "getBoundingClientRect().toJSON()")
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def mouse(self, kind: str, x: float, y: float, **options: Any) -> None:
        """One event of the mouse: "Moved", "Pressed", "Released" or "Wheel"."""
        kind = f"mouse{kind}"
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **options)

    def hover(self, selector: str) -> None:
        self.mouse("Moved", *self.middle_of(selector))
        self.settle()

    def click(self, selector: str, times: int = 1) -> None:
        """Clicks on an element, once or twice."""
        place = self.middle_of(selector)
        self.mouse("Moved", *place)
        for count in range(1, times + 1):
            for kind in ("Pressed", "Released"):
                self.mouse(kind, *place, button="left", clickCount=count)
        self.settle()

    def press(self, key: str, code: str = "", *, shift: bool = False) -> None:
        event = {"key": key, "code": code or key, "modifiers": 8 if shift else 0}
        event |= {"text": "\r", "windowsVirtualKeyCode": 13} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)
        self.settle()

    def get(self, selector: str, what: str) -> Any:
        """A property, or the result of a method, of the first element of a CSS selector."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).{what}")

    def text(self, selector: str) -> str:
        return self.get(selector, "textContent")

    def change(self, selector: str, value: str | int) -> None:
        """Gives an input another value, as if a user had."""
        self.get(selector, f"value = {json.dumps(value)}")
        for event in ("input", "change"):
            self.get(selector, f"dispatchEvent(new Event('{event}'))")
        self.settle()
