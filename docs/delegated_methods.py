"""An extension of griffe, which shows `name = delegated(txnbridge.Class.name)` in `txnbridge.aio` as a method.

`delegated_property(…)` is shown as the property.
"""

from copy import copy
from typing import Any

import griffe


class DelegatedMethods(griffe.Extension):
    """Replaces these attributes by the synchronous members, from which they have their signatures and docstrings."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        for module in pkg["aio"].modules.values() if "aio" in pkg.members else ():
            for kind in module.classes.values():
                for name, attribute in kind.attributes.items():
                    if str(attribute.value).startswith(("delegated(", "delegated_property(")):
                        shown = loader.modules_collection[attribute.value.arguments[0].canonical_path]
                        member = copy(shown.final_target)
                        member.parent, member.lineno = kind, attribute.lineno
                        member.labels = {"async"} if member.is_function else shown.labels
                        kind.members[name] = member
