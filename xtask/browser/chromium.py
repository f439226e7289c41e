"""Drives a headless Chromium over its debugging pipe. Needs Python's own library and `chromium`, nothing else."""

import base64
import json
import os
import pathlib
import select
import subprocess
import tempfile
import time

# Nothing but what is tested may reach for a network.
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--disable-dev-shm-usage", "--remote-debugging-pipe",
]
# Seconds in which an answer of the browser, or a state of a page, has to come.
PATIENCE = 60


class Chromium:
    """A browser with a fresh profile. Protocol: JSON messages that end in a zero byte, written to its descriptor 3, read from 4."""

    def __init__(self, binary):
        self.profile = tempfile.TemporaryDirectory(prefix="chromium", ignore_cleanup_errors=True)
        theirs_in, self.out = os.pipe()
        self.into, theirs_out = os.pipe()
        command = [binary, *FLAGS, f"--user-data-dir={self.profile.name}", "about:blank"]
        # The shell puts the two ends where Chromium looks for them.
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command], pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.number, self.rest, self.events = 0, b"", []

    def read(self, seconds):
        """Reads one message, or nothing when the time is over."""
        deadline = time.monotonic() + seconds
        while b"\0" not in self.rest:
            if not select.select([self.into], [], [], max(0, deadline - time.monotonic()))[0]:
                return None
            piece = os.read(self.into, 1 << 20)
            if not piece:
                raise AssertionError(f"chromium ended with status {self.process.wait()}")
            self.rest += piece
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)

    def send(self, method, session=None, **params):
        """Calls a method of the protocol and returns its result; events that come before it are kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while (answer := self.read(deadline - time.monotonic())) is not None:
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)
        raise AssertionError(f"{method}: no answer in {PATIENCE} s")

    def page(self):
        """Opens an empty tab."""
        return Page(self)

    def close(self):
        self.process.terminate()
        self.process.wait(PATIENCE)
        self.profile.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Page:
    """A tab, and what it asked for and complained of."""

    def __init__(self, browser):
        self.browser = browser
        target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ["Page", "Runtime", "Network", "Log"]:
            self.send(f"{domain}.enable")

    def send(self, method, **params):
        return self.browser.send(method, session=self.session, **params)

    def go(self, url):
        """Opens a URL and waits until it has loaded."""
        answer = self.send("Page.navigate", url=url)
        assert "errorText" not in answer, f"{url}: {answer['errorText']}"
        self.until("document.readyState === 'complete'")

    def value(self, expression):
        """Evaluates JavaScript in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def until(self, condition):
        """Waits until an expression holds."""
        deadline = time.monotonic() + PATIENCE
        while not self.value(condition):
            if time.monotonic() > deadline:
                raise AssertionError(f"not in {PATIENCE} s: {condition}; the page says: {self.value('document.body.innerText')[-400:]}")
            time.sleep(0.05)

    def look(self, scheme="light", width=1000, height=760):
        """Sets colour scheme and size."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)

    def picture(self, path, whole=False):
        """Takes a screenshot, of what lies below the window too where `whole` is set."""
        data = self.send("Page.captureScreenshot", captureBeyondViewport=whole, **({"clip": self.extent()} if whole else {}))["data"]
        pathlib.Path(path).write_bytes(base64.b64decode(data))

    def extent(self):
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        return {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}

    def pdf(self, path):
        """Prints to PDF and returns its bytes."""
        data = base64.b64decode(self.send("Page.printToPDF", paperWidth=8.27, paperHeight=11.69)["data"])
        pathlib.Path(path).write_bytes(data)
        return data

    def of(self, kind):
        """Parameters of the events of a kind so far."""
        self.value("0")
        return [e["params"] for e in self.browser.events if e.get("method") == kind and e.get("sessionId") == self.session]

    def requests(self):
        return [e["request"] for e in self.of("Network.requestWillBeSent")]

    def complaints(self):
        """Exceptions, and errors and warnings of the console."""
        bad = [e["exceptionDetails"]["text"] for e in self.of("Runtime.exceptionThrown")]
        bad += [str(e["args"]) for e in self.of("Runtime.consoleAPICalled") if e["type"] in ("error", "warning", "assert")]
        entries = [e["entry"] for e in self.of("Log.entryAdded")]
        return bad + [f"{e['text']} {e.get('url', '')}" for e in entries if e["level"] in ("error", "warning")]
