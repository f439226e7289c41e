#!/usr/bin/env python3
"""Opens the chat page of `anemoe serve` and a page of `anemoe report` in a headless Chromium.

    python3 xtask/browser/pages.py --anemoe target/release/anemoe --bundle small.anemoe --out pictures

Chat: a question is answered in a stream; "New chat" during an answer forgets all of it. Report: opened without a network, printed, without script.
Both: no request elsewhere, no complaint in the console, nothing wider than a phone. Pictures in light, dark and on 380 pixels go to
--out. With --clients, the official clients (benches/openai_client.py, anthropic_client.py) ask the same server; with --no-browser, they alone do. Fails
at the first thing that is wrong.
"""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys
import threading

from chromium import Chromium

PHONE = 380
# Bytes of an answer that reach the chat page in a second: some 20 tokens.
SLOW = 5000
HERE = pathlib.Path(__file__).resolve().parent


class Server:
    """A running `anemoe serve`, ended when the block ends."""

    def __init__(self, anemoe, bundle):
        command = [anemoe, "serve", bundle, "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.said = []
        for line in self.process.stdout:
            self.said.append(line)
            if found := re.search(r"http://[0-9.]+:\d+", line):
                self.origin = found[0]
                break
        else:
            raise AssertionError(f"serve ended: {self.said} {self.process.stderr.read()}")
        # A pipe that nobody reads would stop the server when it is full.
        for pipe in (self.process.stdout, self.process.stderr):
            threading.Thread(target=pipe.read, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def type_question(page, text):
    """Types a question and presses Enter, as a person does."""
    page.value("document.getElementById('question').focus()")
    page.send("Input.insertText", text=text)
    for kind in ["keyDown", "keyUp"]:
        page.send("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r" if kind == "keyDown" else "")


def press(page, name):
    page.value(f"document.getElementById({json.dumps(name)}).click()")


def asked(page):
    """The messages of each request for an answer."""
    bodies = [r.get("postData") for r in page.requests() if r["url"].endswith("/v1/chat/completions")]
    return [json.loads(body)["messages"] for body in bodies]


def answer(page):
    return page.value("[...document.querySelectorAll('.assistant')].at(-1)?.textContent ?? ''")


IDLE = "document.getElementById('send').textContent === 'Send'"
# Some of an answer is there, and it goes on.
ANSWERING = "document.getElementById('send').textContent === 'Stop' && [...document.querySelectorAll('.assistant')].at(-1).textContent.length > 3"


def fits(page, what):
    width = page.value("document.documentElement.scrollWidth")
    assert width <= PHONE, f"{what} is {width} pixels wide on a screen of {PHONE}"


def check_chat(browser, origin, out):
    page = browser.page()
    page.look()
    page.go(origin + "/")
    page.until("document.getElementById('model').value !== ''")
    # The same answer each time, and slow enough to press buttons meanwhile.
    page.value("document.getElementById('temperature').value = '0'")
    page.send("Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=SLOW, uploadThroughput=-1)
    type_question(page, "def main():")
    page.until(ANSWERING)
    early = len(answer(page))
    page.until(f"[...document.querySelectorAll('.assistant')].at(-1).textContent.length > {early}")
    press(page, "send")  # "Stop": the rest of the answer says nothing more.
    page.until(IDLE)
    assert asked(page) == [[{"role": "user", "content": "def main():"}]], asked(page)
    type_question(page, "class Tree:")
    page.until(ANSWERING)
    follow = asked(page)[-1]
    assert [m["role"] for m in follow] == ["user", "assistant", "user"], follow
    for scheme in ["light", "dark"]:
        page.look(scheme)
        page.picture(out / f"chat-{scheme}.png")
    page.look(width=PHONE)
    page.picture(out / "chat-phone.png")
    fits(page, "the chat page")
    page.look()
    # The old answer is still coming.
    page.until(ANSWERING)
    press(page, "reset")
    page.until(IDLE)
    assert page.value("document.getElementById('log').children.length") == 0, "New chat leaves something of the old one"
    type_question(page, "import os")
    page.until(ANSWERING)
    assert asked(page)[-1] == [{"role": "user", "content": "import os"}], f"New chat sends something of the old one: {asked(page)[-1]}"
    press(page, "send")
    page.until(IDLE)
    elsewhere = [r["url"] for r in page.requests() if not r["url"].startswith((origin + "/", "data:", "blob:", "about:"))]
    assert not elsewhere, f"the chat page asks elsewhere: {elsewhere}"
    assert not page.complaints(), f"the chat page complains: {page.complaints()}"


def check_report(browser, file, out):
    page = browser.page()
    page.send("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
    url = file.resolve().as_uri()
    page.look()
    page.go(url)
    charts = page.value("[...document.querySelectorAll('.wide svg')].map(s => s.querySelectorAll('rect, circle').length)")
    assert len(charts) >= 2 and all(charts), f"charts of the report are empty: {charts}"
    bars = page.value("document.querySelectorAll('#packages rect > title').length")
    packages = page.value("JSON.parse(document.getElementById('report').textContent).shards.length")
    assert bars == packages, f"{bars} bars for {packages} packages"
    for scheme in ["light", "dark"]:
        page.look(scheme)
        page.picture(out / f"report-{scheme}.png", whole=True)
    page.look(width=PHONE)
    page.picture(out / "report-phone.png", whole=True)
    fits(page, "the report")
    page.look()
    pdf = page.pdf(out / "report.pdf")
    assert pdf.startswith(b"%PDF") and len(re.findall(rb"/Type\s*/Page\b", pdf)) >= 2, "the report does not print"
    hidden = "[...document.querySelectorAll('table')].filter(t => !t.checkVisibility() || !t.getBoundingClientRect().height).length"
    page.send("Emulation.setEmulatedMedia", media="print")
    assert page.value(hidden) == 0, "tables of the report do not print"
    page.send("Emulation.setEmulatedMedia", media="")
    assert page.value(hidden) > 0, "the script folds no table"
    page.send("Emulation.setScriptExecutionDisabled", value=True)
    page.go(url)
    assert page.value(hidden) == 0, "tables of the report are hidden without script"
    others = [r["url"] for r in page.requests() if r["url"] != url]
    assert not others, f"the report asks for more than itself: {others}"
    assert not page.complaints(), f"the report complains: {page.complaints()}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anemoe", required=True, help="the binary")
    parser.add_argument("--bundle", required=True, help="a bundle with a chat template")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for pictures and the report")
    parser.add_argument("--chromium", default=shutil.which("chromium") or "chromium", help="the browser")
    parser.add_argument("--clients", action="store_true", help="run the official clients too; needs the packages openai and anthropic")
    parser.add_argument("--no-browser", action="store_true", help="open no page")
    args = parser.parse_args()
    if not args.no_browser:
        args.out.mkdir(parents=True, exist_ok=True)
        report = args.out / "report.html"
        subprocess.run([args.anemoe, "report", args.bundle, "--force", "-o", report], check=True)
        with Chromium(args.chromium) as browser:
            check_report(browser, report, args.out)
            print("report: as expected")
            with Server(args.anemoe, args.bundle) as server:
                check_chat(browser, server.origin, args.out)
                print("chat page: as expected")
    for name in ["openai_client.py", "anthropic_client.py"] if args.clients else []:
        with Server(args.anemoe, args.bundle) as server:
            subprocess.run([sys.executable, HERE.parent.parent / "benches" / name, server.origin], check=True)


if __name__ == "__main__":
    main()
