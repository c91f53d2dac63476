"""The names of clusters whose brokers give them none: a test module imports all of this.

It brings `named(prefix)`, what a bridge takes for the cluster's name; `open_log(prefix)`, which makes a log beside it;
`lose_name(prefix)`, which deletes all that says the name; and `write_foreign_name(prefix)`, which stores something else
where the name belongs.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from txnbridge.errors import StorageFailed, TxnBridgeError


@pytest.fixture
def prefix(name):
    return f"{name}-"


def test_all_threads_that_ask_at_once_are_told_one_cluster_id(named, prefix):
    with ThreadPoolExecutor(8) as pool:
        names = set(pool.map(lambda _: named(prefix), range(8)))
    assert len(names) == 1
    assert names == {named(prefix)}
    assert named(f"x{prefix}") not in names


def test_a_lost_name_is_not_made_up_anew_beside_other_topics_of_ours(named, prefix, open_log, lose_name):
    named(prefix)
    open_log(prefix)
    lose_name(prefix)
    with pytest.raises(StorageFailed, match=f"{prefix}cluster"):
        named(prefix)


def test_a_foreign_record_is_no_name(named, prefix, write_foreign_name):
    write_foreign_name(prefix)
    with pytest.raises(TxnBridgeError, match="prefix"):
        named(prefix)
