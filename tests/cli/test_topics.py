import json


def test_a_topic_is_created_once_and_listed(invoke, url):
    assert invoke("topics", "create", "orders", "--partitions", "2").stdout == "created orders\n"
    assert invoke("topics", "create", "orders", "--partitions", "2").stdout == "orders is there already\n"
    lines = invoke("topics", "list").stdout.splitlines()
    assert [line.split() for line in lines] == [["topic", "partitions", "retention"], ["orders", "2", "forever"]]


def test_topics_are_told_as_json_and_their_retention_in_words(invoke, url):
    created = invoke("topics", "create", "orders", "--retention-seconds", "60", "--retention-bytes", "1000", "--json")
    assert json.loads(created.stdout) == {"topic": "orders", "created": True}
    assert json.loads(invoke("topics", "list", "--json").stdout) == [
        {"name": "orders", "partitions": 1, "internal": False, "retention_seconds": 60.0, "retention_bytes": 1000}
    ]
    assert "60 s, 1000 bytes" in invoke("topics", "list").stdout


def test_a_topic_grows_and_does_not_shrink(invoke, url, bridge):
    invoke("topics", "create", "orders")
    assert invoke("topics", "grow", "orders", "3").exit_code == 0
    assert bridge.admin.topic("orders").partitions == 3
    assert invoke("topics", "grow", "orders", "2").exit_code == 2
    assert json.loads(invoke("topics", "grow", "orders", "4", "--json").stdout) == {"topic": "orders", "partitions": 4}


def test_deleting_needs_yes(invoke, url, bridge):
    invoke("topics", "create", "orders")
    refused = invoke("topics", "delete", "orders")
    assert (refused.exit_code, refused.stdout.split()[0]) == (2, "would")
    assert json.loads(invoke("topics", "delete", "orders", "--json").stdout) == {"topic": "orders", "deleted": False}
    assert [topic.name for topic in bridge.admin.topics()] == ["orders"]
    done = invoke("topics", "delete", "orders", "--yes")
    assert (done.exit_code, done.stdout) == (0, "deleted orders\n")
    assert bridge.admin.topics() == []
