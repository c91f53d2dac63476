"""Tests of a fence topic's identity in the decision log, and of an opener's conclusion from both."""

from typing import Any

import pytest
from txnbridge_pulsar.write.fence_records import FenceRecord
from txnbridge_pulsar.write.owner import FenceIdentity

from tests.pulsar.kit import Kept
from txnbridge import AccessDenied, EvidenceLost
from txnbridge.spi import Deadline

pytestmark = pytest.mark.offline

SOON = Deadline(60)


class Denied(Kept):
    def newest_opening(self, deadline: Deadline) -> Any:
        raise AccessDenied("no right")


class Overtaken(Kept):
    def open_behind(self, before: str | None, data: Any, deadline: Deadline) -> bool:
        self.newest = ("other", {"lineage": "of the other"})
        return False


def fence_id(ledger: Any) -> FenceIdentity:
    return FenceIdentity("id", ledger)


def notice(fence_id: str) -> FenceRecord:
    return FenceRecord("older", "host", 0, fence_id=fence_id)


@pytest.mark.parametrize("before", [None, notice("first")], ids=["nothing", "not recorded by its opener"])
def test_the_first_opening_chooses_a_fence_identity_and_all_later_ones_follow(before: FenceRecord | None) -> None:
    ledger = Kept()
    chosen = fence_id(ledger).follow(before, SOON)
    assert chosen == "first" if before else chosen
    fence_id(ledger).record(chosen, SOON)
    assert fence_id(ledger).follow(notice(chosen), SOON) == chosen


@pytest.mark.parametrize("before", [None, notice("another")], ids=["nothing", "another"])
def test_a_fence_topic_that_was_deleted_is_noticed(before: FenceRecord | None) -> None:
    with pytest.raises(EvidenceLost, match="another transactional_id"):
        fence_id(Kept(lineage="first")).follow(before, SOON)


def test_an_owner_that_may_not_use_the_log_goes_on_without_it(caplog: pytest.LogCaptureFixture) -> None:
    found = fence_id(Denied())
    found.record(found.follow(None, SOON), SOON)
    assert fence_id(Denied()).follow(notice("first"), SOON) == "first"
    assert "it will not be noticed if the fence topic is deleted" in caplog.text


def test_only_one_of_two_identities_recorded_at_once_counts() -> None:
    with pytest.raises(EvidenceLost):
        fence_id(Overtaken()).record("mine", SOON)
