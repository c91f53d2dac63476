"""`InputTopics`: the topics that a processor reads: those with the names given, and those whose names fit a pattern."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase

from txnbridge._base.connection import Connection
from txnbridge._base.topic import Topic
from txnbridge._process.retries import parse_retry_topic
from txnbridge.errors import NotFound


class InputTopics:
    """The topics `given` to a processor. A name with `*` is a pattern, for all topics but those `apart`.

    Retry topics of whatever group fit no pattern.
    """

    def __init__(self, given: list[Topic], apart: Iterable[str | None]) -> None:
        self._named = {topic.name: topic for topic in given if "*" not in topic.name}
        self._patterns = [topic for topic in given if "*" in topic.name]
        self._apart = frozenset(apart)
        self._look_at = 0.0  # when to look for the topics that fit, by `time.monotonic`
        self.now = given
        self.names = frozenset(topic.name for topic in given)

    @property
    def change(self) -> bool:
        """True if topics may come and go, because a pattern is given."""
        return bool(self._patterns)

    def look(self, connection: Connection, now: bool = False) -> bool:
        """Look which topics there are, `now` or once in a while; return whether they have changed since the last look.

        Raise `NotFound` if there are none.
        """
        if not self._patterns or (not now and time.monotonic() < self._look_at):
            return False
        found = dict(self._named)
        for info in connection.broker.admin.topics(connection.deadline()):
            if info.internal or info.name in self._apart or parse_retry_topic(info.name) is not None:
                continue
            for pattern in self._patterns:
                if fnmatchcase(info.name, pattern.name):
                    found.setdefault(info.name, replace(pattern, name=info.name))
        if not found:
            raise NotFound(f"no topic fits {', '.join(pattern.name for pattern in self._patterns)}: create one first")
        self._look_at = time.monotonic() + connection.timing.pattern_look
        before, self.names = self.names, frozenset(found)
        self.now = [found[name] for name in sorted(found)]
        return self.names != before
