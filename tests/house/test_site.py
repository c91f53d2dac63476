"""The documentation as a site: it is built without a warning, and has every public name and every setting."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import zlib

import pytest

import txnbridge
from tests.house.rooms import PUBLIC_MODULES, ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


def test_every_public_name_has_its_place_in_the_reference(site):
    # The inventory begins with four lines of text; the rest is compressed.
    entries = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    there = {line.split()[0] for line in entries.splitlines()}
    public = {f"txnbridge.{name}" for name in txnbridge.__all__}
    for name in (*PUBLIC_MODULES, "sql"):
        module = importlib.import_module(f"txnbridge.{name}")
        public |= {f"txnbridge.{name}.{each}" for each in module.__all__}
    # What several modules show has its place where it is shown first.
    shown = {name.rpartition(".")[2] for name in there}
    assert sorted(name for name in public if name.rpartition(".")[2] not in shown) == []


def test_the_page_of_settings_has_every_option_with_its_default():
    page = (ROOT / "docs" / "settings.md").read_text()
    for backend in txnbridge.plugins.backends():
        for name, option in backend.options.items():
            default = "secret" if option.secret else f"`{option.default}`" if option.default != "" else ""
            assert f"| `{name}` | {default} | {option.help}" in page


def test_no_page_asks_another_server_for_anything(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert 'src="http' not in text and "fonts.g" not in text, page
