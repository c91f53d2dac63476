import json

import pytest


@pytest.fixture
def read(bridge):
    """A group that has acknowledged two of three orders."""
    with bridge.transaction() as txn:
        txn.send_many("orders", [b"1", b"2", b"3"])
    with bridge.consumer("orders", "shipping") as consumer:
        messages = consumer.poll()
        with bridge.transaction() as txn:
            txn.ack(messages[:2])


def test_a_group_is_listed_and_shown_with_its_members_and_its_lag(invoke, bridge, read):
    with bridge.consumer("orders", "shipping"):
        assert invoke("groups", "list").stdout.split() == ["group", "members", "shipping", "1"]
        shown = invoke("groups", "show", "shipping").stdout
        [member] = json.loads(invoke("groups", "show", "shipping", "--json").stdout)["members"]
    assert member["partitions"] == ["orders[0]"]
    assert [line.split()[:4] for line in shown.splitlines()[-1:]] == [["orders[0]", "2", "1", member["host"]]]
    assert json.loads(invoke("groups", "list", "--json").stdout) == [{"group": "shipping", "members": 0}]
    assert invoke("groups", "show", "shipping").stdout.startswith("no members\n")


def test_a_group_is_set_only_with_yes(invoke, bridge, read):
    result = invoke("groups", "reset", "shipping")
    assert (result.exit_code, "its lag is 1 now" in result.stdout) == (2, True)
    told = invoke("groups", "reset", "shipping", "--json")
    assert json.loads(told.stdout) == {"group": "shipping", "lag": 1, "would": "reset"}
    assert invoke("groups", "reset", "shipping", "--yes").stdout == "orders[0] goes on at 0\n"
    told = invoke("groups", "reset", "shipping", "--to", "latest", "--topic", "orders", "--yes", "--json")
    assert json.loads(told.stdout) == {"group": "shipping", "positions": {"orders[0]": [3]}}
