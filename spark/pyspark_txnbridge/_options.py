"""What a query says about where it writes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from txnbridge import InvalidOption

# Option as Spark hands it on (in small letters) -> as the documentation spells it.
_NAMES = {
    name.lower(): name
    for name in (
        "url",
        "topic",
        "sink",
        "transactionalIdPrefix",
        "decisionLog",
        "commitTimeout",
        "createTopics",
        "txnAppId",
        "txnVersion",
        "nondeterministic",
    )
}
# Spark's own, or of its Kafka sink, which looks for headers in the column alone.
_NOT_OURS = {"checkpointlocation", "queryname", "includeheaders"}
# These become part of ids at the broker, where a dot separates them.
_NAME = re.compile(r"[A-Za-z0-9_-]{1,80}")
# How a job is called that has no name; no name begins so.
NAMELESS = "#"
# What the names of options begin with that only Spark's own Kafka source and sink know.
_SPARKS_OWN = {"kafkaconsumer": "source", "fetchoffset": "source"}
_NO_TABLES = (
    "CREATE TABLE … USING txnbridge can't work: Spark hands a table's options on to no Python data source. Use CREATE"
    ' TEMPORARY VIEW … USING txnbridge OPTIONS (…) to read, or format("txnbridge") with options'
)
_BOOTSTRAP = re.compile(r"([a-z0-9_]+)\.bootstrap\.servers")


# What each backend is told besides, by its name.
Settings = tuple[tuple[str, tuple[tuple[str, str], ...]], ...]


@dataclass(frozen=True)
class SinkOptions:
    """The options of one sink, checked as far as that goes without a broker."""

    url: str = field(repr=False)  # may hold a password
    settings: Settings = field(default=(), repr=False)
    topic: str | None = None
    sink: str = "sink"
    prefix: str = "spark"
    log: str | None = None
    log_place: str | None = field(default=None, repr=False)  # may hold a password
    commit_timeout: float = 30.0
    create_topics: int | None = None
    app_id: str | None = None
    version: int | None = None
    nondeterministic: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> SinkOptions:
        """Raises `InvalidOption` for what is missing, unknown or makes no sense."""
        options = {name.lower(): value for name, value in given.items() if name.lower() not in _NOT_OURS}
        if "path" in options:
            raise InvalidOption("save() takes no path here: the option url names the broker, topic the topic")
        url, settings = take_address(options, "write")
        check_names(options, _NAMES)
        topic = options.get("topic", "").strip() or None
        log_place = options.pop("decisionlog") if ":" in options.get("decisionlog", "") else None
        found = cls(
            url=url,
            settings=settings,
            topic=topic,
            sink=_name(options, "sink") or cls.sink,
            prefix=_name(options, "transactionalIdPrefix") or cls.prefix,
            log=_name(options, "decisionLog"),
            log_place=log_place,
            commit_timeout=seconds(options, "commitTimeout", cls.commit_timeout),
            create_topics=number(options, "createTopics"),
            app_id=_name(options, "txnAppId"),
            version=number(options, "txnVersion"),
            nondeterministic=flag(options, "nondeterministic", cls.nondeterministic),
        )
        if found.version is not None and found.app_id is None:
            raise InvalidOption("txnVersion numbers the runs of one job, so it needs the job's name: txnAppId")
        return found

    def check_job(self) -> None:
        """Raises `InvalidOption` unless this says which run of a named job it is: a job has no batch number."""
        if self.app_id is not None and self.version is None:
            raise InvalidOption(
                "txnAppId names a job, and without txnVersion all its runs would be taken for the same one: only the"
                " first would publish anything. Give each run a number above the last one's, such as its date:"
                " txnVersion=20261121"
            )

    def application(self, query: str) -> str:
        """The name of the decision log: one for each query or named job, one for all jobs without a name."""
        return self.log or f"{self.prefix}-{'jobs' if query.startswith(NAMELESS) else query}"


def take_address(options: dict[str, str], purpose: str) -> tuple[str, Settings]:
    """Take the broker's URL, and what backends are to be told besides, out of the options of a sink or a source."""
    url = _take_url(options, purpose)
    settings: dict[str, dict[str, str]] = {}
    for name in [name for name in options if "." in name]:
        backend, _, setting = name.partition(".")
        if backend in _SPARKS_OWN:
            raise InvalidOption(
                f"option {name!r} is for Spark's own Kafka {_SPARKS_OWN[backend]}, and means nothing here: leave it out"
            )
        settings.setdefault(backend, {})[setting] = options.pop(name)
    return url, tuple((backend, tuple(pairs.items())) for backend, pairs in settings.items())


def as_keywords(settings: Settings) -> dict[str, Any]:
    """The same as `txnbridge.connect` takes them."""
    return {backend: dict(pairs) for backend, pairs in settings}


def check_names(options: Mapping[str, str], names: Mapping[str, str]) -> None:
    """Raises `InvalidOption` for one that is not among these names, given in small letters and as documented."""
    if unknown := sorted(options.keys() - names.keys()):
        nearest = difflib.get_close_matches(unknown[0], names, 1)
        hint = f"; did you mean {names[nearest[0]]}?" if nearest else ""
        raise InvalidOption(f"option {unknown[0]!r} is unknown{hint} (known: {', '.join(names.values())})")


def _take_url(options: dict[str, str], purpose: str) -> str:
    if options.keys() >= {"provider", "owner"}:  # so Spark asks for the columns of a table
        raise InvalidOption(_NO_TABLES)
    servers = [name for name in options if _BOOTSTRAP.fullmatch(name)]
    if len(servers) + ("url" in options) != 1:
        raise InvalidOption(
            f"say where to {purpose}, once: option url (kafka://host:9092, embedded:/path/to/file, …)"
            " or kafka.bootstrap.servers" + ("" if options else f". {_NO_TABLES}")
        )
    if not servers:
        return options.pop("url")
    return f"{servers[0].split('.')[0]}://{options.pop(servers[0])}"


def _name(options: Mapping[str, str], name: str) -> str | None:
    value = options.get(name.lower())
    if value is not None and not _NAME.fullmatch(value):
        raise InvalidOption(f"option {name} is 1 to 80 letters, digits, '-' or '_', not {value!r:.100}")
    return value


def named(option: str, given: Iterable[str]) -> dict[str, str]:
    """What the command line was told as NAME=VALUE."""
    if wrong := [text for text in given if "=" not in text]:
        raise InvalidOption(f"{option} takes NAME=VALUE, not {wrong[0]!r}")
    return dict(text.split("=", 1) for text in given)


def number(options: Mapping[str, str], name: str) -> int | None:
    value = options.get(name.lower())
    if value is None:
        return None
    if not (value.isascii() and value.isdigit()):
        raise InvalidOption(f"option {name} is a whole number of at least 0, not {value!r:.100}")
    return int(value)


def seconds(options: Mapping[str, str], name: str, default: float) -> float:
    value = options.get(name.lower())
    if value is None:
        return default
    try:
        found = float(value)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise InvalidOption(f"option {name} is a number of seconds above 0, not {value!r:.100}")
    return found


def flag(options: Mapping[str, str], name: str, default: bool) -> bool:
    value = options.get(name.lower(), str(default)).lower()
    if value not in ("true", "false"):
        raise InvalidOption(f"option {name} is true or false, not {value!r:.100}")
    return value == "true"
