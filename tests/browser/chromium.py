"""Headless Chromium for tests, driven through its DevTools protocol (https://chromedevtools.github.io)."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import aiohttp

START_S, ANSWER_S = 60.0, 60.0
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--remote-debugging-port=0",
)  # fmt: skip


def executable() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One page. `problems` has what went wrong in it: errors on the console, exceptions, what could not be loaded."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="pat-chromium-")
        self._runner = asyncio.Runner()
        self._number = 0
        self.problems: list[str] = []
        self._process = subprocess.Popen(
            [executable(), *FLAGS, f"--user-data-dir={self._folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._runner.run(self._attach())
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        if hasattr(self, "_http"):
            self._runner.run(self._http.close())
        self._runner.close()
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)
        shutil.rmtree(self._folder, ignore_errors=True)

    def call(self, method: str, **parameters) -> dict:
        """A command of the protocol and its result. RuntimeError if the browser refuses it."""
        return self._runner.run(self._call(method, parameters))

    def resize(self, width: int, height: int, phone: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )  # fmt: skip

    def open(self, url: str) -> None:
        """Opens a page and waits until it has loaded. Forgets the problems of the one before."""
        self._go("about:blank")  # what the page before still asks for is of no interest; nor is its address kept
        self.problems.clear()
        self._go(url)

    def _go(self, url: str) -> None:
        failed = self.call("Page.navigate", url=url).get("errorText")
        if failed:
            raise RuntimeError(f"{url}: {failed}")
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str):
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails'].get('exception', {}).get('description')}")
        return answer["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 30.0):
        """The value of `condition` once it is true. TimeoutError with the page's text if it does not become so."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(condition)):
            if time.monotonic() > end:
                text = self.evaluate("document.body ? document.body.innerText.slice(0, 2000) : ''")
                raise TimeoutError(f"{condition} after {seconds:.0f} s; the page says: {text}")
            self._runner.run(asyncio.sleep(0.2))
        return value

    def screenshot(self, path: Path, whole: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def pdf(self, path: Path) -> bytes:
        path.parent.mkdir(parents=True, exist_ok=True)
        answer = self.call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
        path.write_bytes(base64.b64decode(answer["data"]))
        return path.read_bytes()

    async def _attach(self) -> None:
        port_file, end = Path(self._folder) / "DevToolsActivePort", time.monotonic() + START_S
        while not (port_file.exists() and port_file.read_text().strip()):
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{executable()} did not start (status {self._process.poll()})")
            await asyncio.sleep(0.1)
        port = int(port_file.read_text().split()[0])
        self._http = aiohttp.ClientSession()
        async with self._http.get(f"http://127.0.0.1:{port}/json/list") as answer:
            (page,) = [each for each in await answer.json() if each["type"] == "page"]
        self._socket = await self._http.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)

    async def _call(self, method: str, parameters: dict) -> dict:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        async with asyncio.timeout(ANSWER_S):
            while True:
                message = await self._socket.receive()
                if message.type is not aiohttp.WSMsgType.TEXT:
                    raise RuntimeError(f"Chromium went away in {method}")
                content = json.loads(message.data)
                if content.get("id") != self._number:
                    self._note(content)
                elif "error" in content:
                    raise RuntimeError(f"{method}: {content['error']['message']}")
                else:
                    return content["result"]

    def _note(self, event: dict) -> None:
        method, said = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = said["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "assert"):
            self.problems.append(" ".join(str(each.get("value", each.get("description"))) for each in said["args"]))
        elif method == "Log.entryAdded" and said["entry"]["level"] == "error":
            self.problems.append(f"{said['entry']['text']} {said['entry'].get('url', '')}")
        elif method == "Network.loadingFailed" and not said.get("canceled"):
            self.problems.append(f"not loaded: {said['errorText']}")
