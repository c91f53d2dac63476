"""The documentation as a site: it is built without a warning, and has every public name and every setting."""

import importlib
import inspect
import os
import shutil
import subprocess
import sys
import zlib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

import pytest

import txnbridge
from tests.house.rooms import PUBLIC_MODULES, ROOT
from txnbridge import aio

# What needs the built site is not in the gate's own command: `.ci/run` names this file.
OF_THE_BUILT_SITE = pytest.mark.full


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


@OF_THE_BUILT_SITE
def test_every_public_name_has_its_place_in_the_reference(site):
    # The inventory begins with four lines of text; the rest is compressed.
    entries = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    there = {line.split()[0] for line in entries.splitlines()}
    public = {f"txnbridge.{name}" for name in txnbridge.__all__}
    for name in (*PUBLIC_MODULES, "sql"):
        module = importlib.import_module(f"txnbridge.{name}")
        public |= {f"txnbridge.{name}.{each}" for each in module.__all__}
    shown_methods = {line.split()[0] for line in entries.splitlines() if " py:method " in line}
    methods = {
        f"txnbridge.aio.{kind}.{name}"
        for kind in aio.__all__
        for name, member in vars(getattr(aio, kind)).items()
        if inspect.isfunction(member) and name[0] != "_"
    }
    assert sorted(methods - shown_methods) == []
    # What several modules show has its place where it is shown first.
    shown = {name.rpartition(".")[2] for name in there}
    assert sorted(name for name in public if name.rpartition(".")[2] not in shown) == []


def test_the_page_of_settings_has_every_option_with_its_default():
    page = (ROOT / "docs" / "settings.md").read_text()
    for backend in txnbridge.plugins.backends():
        for name, option in backend.options.items():
            default = "secret" if option.secret else f"`{option.default}`" if option.default != "" else ""
            assert f"| `{name}` | {default} | {option.help}" in page


@OF_THE_BUILT_SITE
def test_no_page_asks_another_server_for_anything(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert 'src="http' not in text and "fonts.g" not in text, page


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


# The page reports what it found, and is not loaded before: the browser ends when the page is loaded.
REPORT = """<img src="/wait"><script>setInterval(() => {
  const found = [...document.querySelectorAll(".md-search-result__link")].map((link) => link.href);
  if (found.length) fetch("/found?" + found.join(","));
}, 100)</script></body>"""


@OF_THE_BUILT_SITE
@pytest.mark.skipif(CHROMIUM is None, reason="the site is looked at in Chromium, which is not installed")
def test_the_search_finds_a_page_in_a_browser(site, tmp_path):
    found: list[str] = []
    reported = Event()

    class Server(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith("/found"):
                found.append(self.path)
                reported.set()
            elif self.path == "/wait":
                reported.wait(60)
            elif self.path.startswith("/index.html"):
                self.send_response(200)
                self.end_headers()
                self.wfile.write((site / "index.html").read_text().replace("</body>", REPORT).encode())
                return
            super().do_GET()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=site)) as server:
        Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
        try:
            address = f"http://127.0.0.1:{server.server_port}/index.html?q=immunity"
            options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={tmp_path}"]
            command = [str(CHROMIUM), *options, "--dump-dom", address]
            subprocess.run(command, capture_output=True, timeout=110, check=True)
        finally:
            server.shutdown()
    assert any("architecture-rocketmq.html" in address for address in found)
