"""The embedded backend: its capabilities, its options, and the file of a URL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import Any

from txnbridge.errors import AccessDenied, InvalidOption
from txnbridge.spi import NATIVE, Backend, Capabilities, Capability, Context, Deadline, Limits, Option, Url, absent
from txnbridge_embedded.broker import EmbeddedBroker
from txnbridge_embedded.client.store import Store
from txnbridge_embedded.imitation import PROFILES
from txnbridge_embedded.settings import Settings

_SETTINGS = Option.of(Settings)  # the options that are settings as they are
# SQLite's own limit for one value.
_LARGEST_MESSAGE = 1_000_000_000

OPTIONS: Mapping[str, Option] = {
    "create": Option(bool, True, "create the file if it is missing"),
    "durability": Option(
        str,
        "full",
        "full: commits survive a power cut. survives-process-kill-only: commits do not wait for the disk; a power cut "
        "or a crash of the system may lose the last ones, kill -9 does not",
        ("full", "survives-process-kill-only"),
    ),
    "like": Option(str, "", "refuse calls that this other broker would refuse", ("", *PROFILES)),
    "max_bytes": Option(int, 0, "the largest size of the file; 0: no limit but the disk"),
    **_SETTINGS,
}


class EmbeddedBackend(Backend):
    """A broker in a file, shared by the processes and threads of one machine."""

    name = "embedded"
    schemes = ("embedded",)
    capabilities = Capabilities(
        "the embedded broker",
        {
            **dict.fromkeys(Capability, NATIVE),
            Capability.SHARE_KEY: absent("a partition is shared message by message, or not at all"),
        },
    )
    limits = Limits(message_bytes=_SETTINGS["max_message_bytes"].default)
    options = OPTIONS

    def open(self, url: Url, options: Mapping[str, Any], context: Context, deadline: Deadline) -> EmbeddedBroker:
        _check(options, context)
        like = PROFILES.get(options["like"])
        most = options["max_message_bytes"]
        limits = Limits(message_bytes=most)
        if like is not None:
            most = min(most, like.limits.message_bytes or most)
            limits = Limits(most, like.limits.transaction_messages, None, like.limits.prepared_seconds)
        given = {name: options[name] for name in _SETTINGS}
        given |= {"max_message_bytes": most, "hold_seconds": _hold_seconds(options["hold_seconds"], context, limits)}
        settings = Settings(
            **given,
            refuse=None if like is None else like.refuse,
            refuse_name=None if like is None else like.refuse_name,
        )
        store = Store(
            file_of(url),
            settings,
            context.events,
            durable=options["durability"] == "full",
            max_bytes=options["max_bytes"] or None,
            create_topics=context.create_topics if context.create_topics is not None else 1 if like is None else 0,
        )
        store.open(deadline, create=options["create"])
        try:
            capabilities = self.capabilities.but({} if like is None else like.lacks)
            return EmbeddedBroker(store, capabilities, limits)
        except BaseException:
            store.close()
            raise


def _hold_seconds(seconds: float, context: Context, limits: Limits) -> float:
    """Return how long a transaction without the argument `hold` may stay prepared after its deadline.

    These are `seconds`, or less if the imitated broker's limit, which counts from the transaction's begin, is lower.
    """
    if limits.prepared_seconds is None:
        return seconds
    return max(0.0, min(seconds, limits.prepared_seconds - context.timeout))


def _check(options: Mapping[str, Any], context: Context) -> None:
    if context.client_options:
        raise InvalidOption(f"the embedded broker has no client library with a setting {min(context.client_options)!r}")
    for name, value in options.items():
        least = 0 if name == "max_bytes" else 1e-3
        if OPTIONS[name].kind in (int, float) and not least <= value:
            raise InvalidOption(f"option {name!r} must be above 0, not {value}")
        # SQLite's integers have 63 bits, and Python cannot wait longer than so many nanoseconds.
        most = TIMEOUT_MAX if OPTIONS[name].kind is float else (1 << 63) - 1
        if OPTIONS[name].kind in (int, float) and value > most:
            raise InvalidOption(f"option {name!r} is at most {most:g}")
    if options["max_message_bytes"] > _LARGEST_MESSAGE:
        raise InvalidOption(f"option 'max_message_bytes' is at most {_LARGEST_MESSAGE}, the most that SQLite can store")


def _reason(error: Exception) -> str:
    match error:
        case OSError(strerror=str(text)):
            return text
        case UnicodeEncodeError():
            return "it has half a character (a lone surrogate)"
    return str(error)


def file_of(url: Url) -> Path:
    """Return the path of a URL's file. Without a path it is in the user's data folder, which is created."""
    if url.hosts:
        raise InvalidOption(
            f"{url}: the embedded broker is a file, not a host: embedded:PATH or embedded:///absolute/path"
        )
    if "\0" in url.path:
        raise InvalidOption("a file's name cannot hold a NUL character")
    if url.path:
        try:
            path = Path(url.path).expanduser().absolute()
            os.fsencode(path)
            path.resolve()
        except (OSError, RuntimeError, UnicodeEncodeError) as error:  # ~nobody, a name too long, half a character
            raise InvalidOption(f"{url.path!r} cannot be the name of a file: {_reason(error)}") from error
        return path
    folder = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "txnbridge"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise AccessDenied(f"{folder} cannot be created: {error.strerror}; name a file: embedded:PATH") from error
    return folder / "broker.db"
