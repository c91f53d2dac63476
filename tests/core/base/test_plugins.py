"""Plug-ins are loaded one by one; one that fails takes nothing else down."""

import importlib.metadata
import sys
from types import SimpleNamespace

import pluggy
import pytest

from txnbridge import hookimpl
from txnbridge._base.plugins import GROUP, Plugins


class Listener:
    txnbridge_event_names = "commit"

    @hookimpl
    def txnbridge_event(self, event):
        pass


def test_our_hook_marker_marks_as_pluggys_own_would() -> None:
    @pluggy.HookimplMarker(GROUP)
    def theirs() -> None: ...

    @hookimpl
    def ours() -> None: ...

    assert getattr(ours, f"{GROUP}_impl") == getattr(theirs, f"{GROUP}_impl")


def test_a_plugin_that_cannot_be_imported_is_reported_by_name_and_the_others_work(tmp_path, monkeypatch):
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('no client here')\n")
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nbroken = broken_plugin\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    found = Plugins()
    assert "embedded" in [backend.name for backend in found.backends()]
    assert "no client here" in str(found.failed["broken"])
    assert "broken_plugin" not in sys.modules


def test_a_hook_that_raises_is_reported_and_the_other_backends_are_there() -> None:
    class Bad:
        @hookimpl
        def txnbridge_backends(self):
            raise RuntimeError("half installed")

    found = Plugins()
    found.register(Bad())
    assert "embedded" in [backend.name for backend in found.backends()]
    assert any("half installed" in str(error) for error in found.failed.values())


def test_a_plugin_registered_for_a_while_is_gone_afterwards() -> None:
    found = Plugins(entry_points=False)
    with found.registered(Listener()):
        assert [names for _, names in found.filtered_listeners()] == [("commit",)]
    assert not found.filtered_listeners() and not found.listeners()


def test_a_plugin_may_register_another_one_while_it_is_loaded(monkeypatch):
    found = Plugins()
    entry = SimpleNamespace(name="outer", load=lambda: found.register(Listener()))
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [entry])
    assert len(found.filtered_listeners()) == 1


def test_a_hook_with_a_mistyped_argument_is_refused_when_it_is_registered() -> None:
    class Mistyped:
        @hookimpl
        def txnbridge_event(self, evnet):
            pass

    with pytest.raises(pluggy.PluginValidationError):
        Plugins(entry_points=False).register(Mistyped())
