"""An extension of griffe, which shows `name = delegated(txnbridge.Class.name)` in `txnbridge.aio` as a method."""

from copy import copy
from typing import Any

import griffe


class DelegatedMethods(griffe.Extension):
    """Replaces these attributes by the synchronous methods, from which they have their signatures and docstrings."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        for module in pkg["aio"].modules.values() if "aio" in pkg.members else ():
            for kind in module.classes.values():
                for name, attribute in kind.attributes.items():
                    if str(attribute.value).startswith("delegated("):
                        shown = loader.modules_collection[attribute.value.arguments[0].canonical_path]
                        method = copy(shown.final_target)
                        method.parent, method.lineno, method.labels = kind, attribute.lineno, {"async"}
                        kind.members[name] = method
