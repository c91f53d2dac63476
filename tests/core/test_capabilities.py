"""Capabilities: declared once, complete, and a refusal says why."""

import pytest

from txnbridge import Capabilities, Capability, Level, NotSupported
from txnbridge.spi import NATIVE, absent, emulated

ALL = dict.fromkeys(Capability, NATIVE)


def test_a_declaration_that_forgets_a_capability_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match="isolation"):
        Capabilities("toy", {c: NATIVE for c in Capability if c is not Capability.ISOLATION})


def test_an_absent_capability_is_refused_with_the_reason_and_the_link() -> None:
    declared = Capabilities(
        "toy", {**ALL, Capability.REPLAY: absent("it forgets what was read", "https://example.org/1")}
    )
    declared.require(Capability.PREPARE)
    with pytest.raises(NotSupported, match=r"toy has no replay: it forgets what was read.*example.org/1"):
        declared.require(Capability.REPLAY)


def test_a_cluster_may_take_some_away() -> None:
    declared = Capabilities("toy", {**ALL, Capability.DEADLINE: emulated("by a timer")})
    less = declared.but({Capability.TOPIC_ADMIN: absent("no rights")})
    assert declared[Capability.TOPIC_ADMIN] and not less[Capability.TOPIC_ADMIN]
    assert less[Capability.DEADLINE].level is Level.EMULATED
    assert len(less) == len(Capability) and list(less) == list(Capability)


@pytest.mark.parametrize("capability", list(Capability), ids=lambda c: c.value)
def test_each_has_a_sentence(capability: Capability) -> None:
    assert capability.sentence.endswith(".") and capability.value.replace("-", "").isalpha()
