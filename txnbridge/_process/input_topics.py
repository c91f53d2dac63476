"""`InputTopics`: the topics that a processor reads: those with the names given, and those whose names fit a pattern."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase

from txnbridge._base.connection import Connection
from txnbridge._base.topic import Topic
from txnbridge._process.retries import parse_retry_topic
from txnbridge.errors import AccessDenied, NotFound

_log = logging.getLogger("txnbridge")


class InputTopics:
    """The topics that a processor was `given`. A name with `*` is a pattern, which never fits the topics in `apart`."""

    def __init__(self, given: list[Topic], apart: Iterable[str]) -> None:
        self.named = {topic.name: topic for topic in given if "*" not in topic.name}
        self.patterns = [topic for topic in given if "*" in topic.name]
        self._known: dict[str, Topic | None] = {**dict.fromkeys(apart), **self.named}
        self._look_at = 0.0  # when to look for the topics that fit, by `time.monotonic`
        self._denied: set[str] = set()  # the fitting topics that this user may not read
        self._missed: set[str] = set()  # the topics that were read, and that the last look did not find
        self.with_retry_topics = False  # whether retry topics may fit
        self.now = given
        self.gone: bool = False  # whether the last look found none

    def topic(self, name: str) -> Topic | None:
        """Return the input topic with this name, also if it is gone or not found yet; None if it is no input."""
        if name not in self._known:
            fitting = (replace(each, name=name) for each in self.patterns if fnmatchcase(name, each.name))
            self._known[name] = next(fitting, None)
        return self._known[name]

    def look(self, connection: Connection, now: bool = False) -> bool:
        """Look for fitting topics if it is time, or `now`; return whether it looked. Raise `NotFound` if none fit."""
        if not self.patterns or (not now and time.monotonic() < self._look_at):
            return False
        admin, deadline = connection.broker.admin, connection.deadline()
        names = [each for each in admin.topic_names(deadline) if self.with_retry_topics or not parse_retry_topic(each)]
        fitting = {name: topic for name in names if (topic := self.topic(name))}
        denied = set(admin.unreadable([*fitting.keys() - self.named], deadline))
        for name in sorted(denied - self._denied):
            _log.warning("topic %r fits a pattern, and is left out: this user may not read it", name)
        self._denied = denied
        found = {**self.named, **{name: topic for name, topic in fitting.items() if name not in denied}}
        if not found and not self._look_at:
            patterns = ", ".join(pattern.name for pattern in self.patterns)
            if denied:
                raise AccessDenied(f"this user may not read {', '.join(sorted(denied))}; nothing else fits {patterns}")
            raise NotFound(f"no topic fits {patterns}: create one first")
        self.gone = not found
        if self._look_at and not now:  # a name server that has just started does not know all topics
            missed = {each.name: each for each in self.now if each.name not in {*found, *denied}}
            found |= {name: each for name, each in missed.items() if name not in self._missed}
            self._missed = set(missed)
        self._look_at = time.monotonic() + connection.timing.pattern_look
        # A list without any is one of a name server that has just started, or reading tells what is deleted.
        if found and found.keys() != (before := {topic.name for topic in self.now}):
            for name in sorted(before - found.keys() - denied - {each.name for each in self.patterns}):
                _log.warning("topic %r is gone, and is read no longer", name)
            self.now = [found[name] for name in sorted(found)]
        return True
