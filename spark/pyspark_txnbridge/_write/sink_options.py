"""The options of a query's sink: which broker, topic and decision log it writes to."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from txnbridge import InvalidOption, connect


def option_names(text: str) -> dict[str, str]:
    """Return the names in a text, by the names as Spark passes them: in lower case."""
    return {name.lower(): name for name in text.split()}


_NAMES = option_names(
    "url topic sink transactionalIdPrefix decisionLog commitTimeout createTopics includeTimestamp txnAppId txnVersion"
    " nondeterministic"
)
# Options of Spark itself, and one of its Kafka sink, which finds headers by their column without it.
_IGNORED = {"checkpointlocation", "queryname", "includeheaders"}
# Names of this form become parts of transactional ids, where a dot separates them.
_NAME = re.compile(r"[A-Za-z0-9_-]{1,80}")
# The first character of the generated name of a job without txnAppId; no name of a user begins with it.
NAMELESS = "#"
_NO_TABLES = (
    "CREATE TABLE … USING txnbridge can't work: Spark hands a table's options on to no Python data source. Use CREATE"
    ' TEMPORARY VIEW … USING txnbridge OPTIONS (…) to read, or format("txnbridge") with options'
)
_BOOTSTRAP = re.compile(r"([a-z0-9_]+)\.bootstrap\.servers")
_ARGUMENTS = {"url", *(connect.__kwdefaults__ or ())}  # names that no backend has

# Further settings of each backend, by the backend's name.
Settings = tuple[tuple[str, tuple[tuple[str, str], ...]], ...]


@dataclass(frozen=True)
class SinkOptions:
    """The options of one sink, checked as far as possible without a broker."""

    url: str = field(repr=False)  # may hold a password
    settings: Settings = field(default=(), repr=False)
    topic: str | None = None
    sink: str = "sink"
    prefix: str = "spark"
    log: str | None = None
    log_url: str | None = field(default=None, repr=False)  # may hold a password
    commit_timeout: float = 30.0
    create_topics: int | None = None
    timestamps: bool = False
    app_id: str | None = None
    version: int | None = None
    nondeterministic: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> SinkOptions:
        """Return the checked options. Raise `InvalidOption` for an option that is missing, unknown or invalid."""
        options = {name.lower(): value for name, value in given.items() if name.lower() not in _IGNORED}
        if "path" in options:
            raise InvalidOption("save() takes no path here: the option url names the broker, topic the topic")
        url, settings = take_address(options, "write")
        check_names(options, _NAMES)
        topic = options.get("topic", "").strip() or None
        log_url = options.pop("decisionlog") if ":" in options.get("decisionlog", "") else None
        parsed = cls(
            url=url,
            settings=settings,
            topic=topic,
            sink=id_part(options, "sink") or cls.sink,
            prefix=id_part(options, "transactionalIdPrefix") or cls.prefix,
            log=id_part(options, "decisionLog"),
            log_url=log_url,
            commit_timeout=seconds(options, "commitTimeout", cls.commit_timeout),
            create_topics=number(options, "createTopics"),
            timestamps=flag(options, "includeTimestamp", cls.timestamps),
            app_id=id_part(options, "txnAppId"),
            version=number(options, "txnVersion"),
            nondeterministic=flag(options, "nondeterministic", cls.nondeterministic),
        )
        if parsed.version is not None and parsed.app_id is None:
            raise InvalidOption("txnVersion numbers the runs of one job, so it needs the job's name: txnAppId")
        return parsed

    def check_job(self) -> None:
        """Raise `InvalidOption` for a named job without txnVersion: a job has no batch number of its own."""
        if self.app_id is not None and self.version is None:
            raise InvalidOption(
                "txnAppId names a job, and without txnVersion all its runs would be taken for the same one: only the"
                " first would publish anything. Give each run a number above the last one's, such as its date:"
                " txnVersion=20261121"
            )

    def application(self, query: str) -> str:
        """Return the decision log's name: each query and named job has a log, and all nameless jobs share one."""
        return self.log or f"{self.prefix}-{'jobs' if query.startswith(NAMELESS) else query}"


def take_address(options: dict[str, str], purpose: str) -> tuple[str, Settings]:
    """Remove the broker's URL and the backends' settings from the options of a sink or a source, and return them."""
    url = _take_url(options, purpose)
    settings: dict[str, dict[str, str]] = {}
    for name in [name for name in options if "." in name and name.partition(".")[0] not in _ARGUMENTS]:
        backend, _, setting = name.partition(".")
        if backend in ("kafkaconsumer", "fetchoffset"):
            raise InvalidOption(f"option {name!r} is only for Spark's own Kafka source: leave it out")
        settings.setdefault(backend, {})[setting] = options.pop(name)
    return url, tuple((backend, tuple(pairs.items())) for backend, pairs in settings.items())


def as_keywords(settings: Settings) -> dict[str, Any]:
    """Return backends' settings as keyword arguments of `txnbridge.connect`."""
    return {backend: dict(pairs) for backend, pairs in settings}


def check_names(options: Mapping[str, str], names: Mapping[str, str]) -> None:
    """Raise `InvalidOption` for an unknown option; `names` maps lower-case names to the documented spelling."""
    if unknown := sorted(options.keys() - names.keys()):
        nearest = difflib.get_close_matches(unknown[0], names, 1)
        hint = f"; did you mean {names[nearest[0]]}?" if nearest else ""
        raise InvalidOption(f"option {unknown[0]!r} is unknown{hint} (known: {', '.join(names.values())})")


def _take_url(options: dict[str, str], purpose: str) -> str:
    if options.keys() >= {"provider", "owner"}:  # Spark passes these two when it asks for a table's columns
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


def id_part(options: Mapping[str, str], name: str) -> str | None:
    value = options.get(name.lower())
    if value is not None and not _NAME.fullmatch(value):
        raise InvalidOption(f"option {name} is 1 to 80 letters, digits, '-' or '_', not {value!r:.100}")
    return value


def name_values(option: str, given: Iterable[str]) -> dict[str, str]:
    """Return the NAME=VALUE arguments of a command-line option as a mapping."""
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
    value = options.get(name.lower(), str(default))
    try:
        parsed = float(value)
    except ValueError:
        parsed = 0.0
    if not 0 < parsed < float("inf"):
        raise InvalidOption(f"option {name} is a number of seconds above 0, not {value!r:.100}")
    return parsed


def flag(options: Mapping[str, str], name: str, default: bool) -> bool:
    value = options.get(name.lower(), str(default)).lower()
    if value not in ("true", "false"):
        raise InvalidOption(f"option {name} is true or false, not {value!r:.100}")
    return value == "true"
