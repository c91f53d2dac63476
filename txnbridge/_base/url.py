"""Parses broker URLs and backends' options. Only the URL names the broker; unknown options are refused."""

from __future__ import annotations

import json
import os
import urllib.parse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from txnbridge._base.deadline import check_times
from txnbridge._base.plugins import plugins
from txnbridge.errors import BackendMissing, InvalidOption
from txnbridge.spi import Backend, Option, Url

# The extra of the package txnbridge to install, for each URL scheme whose backend is not installed.
_EXTRAS = {"kafka": "kafka", "pulsar": "pulsar", "pulsar+ssl": "pulsar", "rocketmq": "rocketmq"}
_NO_USER = "a URL holds no user or password; give them as options, for example password='env:NAME'"


def parse_url(text: object) -> tuple[Url, dict[str, str]]:
    """Split a URL into the address and the options of its query. Raise `InvalidOption` for an invalid URL."""
    if not isinstance(text, str) or ":" not in text:
        given = repr(text.partition("?")[0]) if isinstance(text, str) else type(text).__name__
        raise InvalidOption(f"a broker's URL looks like kafka://host:9092 or embedded:orders.db, not {given}")
    scheme, _, rest = text.partition(":")
    rest, _, query = rest.partition("?")
    hosts: tuple[tuple[str, int | None], ...] = ()
    path = rest
    if rest.startswith("//"):
        authority, slash, tail = rest[2:].partition("/")
        path = slash + tail
        hosts = tuple(_host(part) for part in authority.split(",") if part)
    elif ":" in rest.partition("@")[0] and "@" in rest.lstrip("/").partition("/")[0]:  # its // is missing
        raise InvalidOption(f"{_NO_USER}. A file with a colon and an @ in its name is given as ./NAME")
    while path.startswith("//"):
        path = path[1:]
    path = urllib.parse.unquote(path)
    options = dict(_query(query))
    shown = scheme + ":" + ("//" + ",".join(_host_text(h) for h in hosts) if rest.startswith("//") else "") + path
    return Url(scheme.lower(), hosts, path, shown), options


def _host(part: str) -> tuple[str, int | None]:
    if "@" in part:
        raise InvalidOption(_NO_USER)
    name, port = part, ""
    if part.startswith("["):  # an IPv6 address
        name, _, port = part[1:].partition("]")
        port = port.removeprefix(":")
    elif ":" in part:
        name, _, port = part.rpartition(":")
    if not name or (port and not (port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536)):
        raise InvalidOption(f"a URL names each server as host:port; wrong at {name!r}")  # a password has a colon, too
    return name, int(port) if port else None


def _host_text(host: tuple[str, int | None]) -> str:
    name = f"[{host[0]}]" if ":" in host[0] else host[0]
    return name if host[1] is None else f"{name}:{host[1]}"


def _query(query: str) -> Iterable[tuple[str, str]]:
    seen: set[str] = set()
    for name, value in urllib.parse.parse_qsl(query, keep_blank_values=True):
        if name in seen:
            raise InvalidOption(f"option {name!r} is in the URL twice")
        seen.add(name)
        yield name, value


def check_opening(
    transactional_id: object,
    application: object,
    timeout: object,
    hold: object,
    writers: object,
    create_topics: object,
    group_commit: object,
) -> None:
    """Raise `InvalidOption` for an argument of `connect` that is invalid on every broker."""
    for name, given in (("transactional_id", transactional_id), ("application", application)):
        if given is not None and not (isinstance(given, str) and given.strip()):
            raise InvalidOption(f"{name} is non-empty text; leave it out to have none")
    if transactional_id and len(json.dumps(transactional_id)) > 1000:  # a token of Kafka has it twice
        raise InvalidOption("transactional_id takes more than 1,000 characters in JSON: no token could hold it")
    check_times(timeout, hold)
    if type(writers) is not int or writers < 1:
        raise InvalidOption("writers is a whole number from 1")
    if create_topics is not None and (type(create_topics) is not int or create_topics < 0):
        raise InvalidOption("create_topics is a number of partitions from 0, which is to create none")
    if group_commit not in (None, True, False):
        raise InvalidOption("group_commit is True, False or None, the backend's default")


def find_backend(scheme: str) -> Backend:
    """Return the backend of a URL scheme. Raise `BackendMissing` if it is not installed or the scheme is unknown."""
    backends = plugins.backends()
    for backend in backends:
        if scheme in backend.schemes:
            return backend
    if extra := _EXTRAS.get(scheme):
        text = f"there is no backend for {scheme}: here; in a clone of txnbridge, pip install -e '.[{extra}]'"
        raise BackendMissing(text + plugin_failures())
    known = ", ".join(sorted(s for backend in backends for s in backend.schemes)) or "none"
    text = f"no backend knows the URL scheme {scheme!r}; known here: {known}; a host is kafka://{scheme}:9092, say"
    raise BackendMissing(text + plugin_failures())


def plugin_failures() -> str:
    """Return the errors of plug-ins that could not be loaded, to add to an error; '' if there are none."""
    if not plugins.failed:
        return ""
    told = "; ".join(f"{name}: {type(e).__name__}: {e}" for name, e in sorted(plugins.failed.items()))
    return f" (plug-ins that could not be loaded: {told})"


def resolve_options(
    declared: Mapping[str, Option], given: Mapping[str, Any], backend: str, also: Iterable[str] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the `declared` options with the `given` values or defaults, and the client library's options.

    The names of the client library's options contain a dot. Raise `InvalidOption` for an unknown option (with the
    nearest known name, perhaps one of `also`) and for a value of the wrong type.
    """
    ours = {name: option.default for name, option in declared.items()}
    clients: dict[str, Any] = {}
    for name, value in given.items():
        value = indirect(name, value)
        if name in declared:
            ours[name] = _typed(name, declared[name], value)
        elif "." in name:
            clients[name] = value
        else:
            raise unknown_option(name, [*declared, *also], f"the {backend} backend")
    return ours, clients


def unknown_option(name: str, known: Iterable[str], whose: str) -> InvalidOption:
    near = nearest(name, known)
    hint = f"; did you mean {near!r}?" if near else f"; known: {', '.join(sorted(known)) or 'none'}"
    return InvalidOption(f"{whose} has no option {name!r}{hint}")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant; None if none is similar."""
    import difflib  # not at the top, because it is needed only for an error

    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def indirect(name: str, value: Any) -> Any:
    """Replace an option's value `env:NAME` or `file:/path` by the variable's or file's content.

    So secrets need not be in URLs and code.
    """
    if not isinstance(value, str):
        return value
    if value.startswith("env:"):
        found = os.environ.get(value[4:])
        if found is None:
            raise InvalidOption(
                f"option {name!r} is to come from the environment variable {value[4:]}, which is not set"
            )
        return found
    if value.startswith("file:"):
        try:
            return Path(value[5:]).read_text("utf-8").rstrip("\n")
        except OSError as error:
            raise InvalidOption(f"option {name!r} is to come from the file {value[5:]}: {error.strerror}") from error
        except ValueError:  # the error's text contains the secret, so raise another error
            raise InvalidOption(f"option {name!r} is to come from a file, which holds no UTF-8 text") from None
    return value


_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}


def _typed(name: str, option: Option, value: Any) -> Any:
    typed = _convert(name, option, value)
    if option.choices and typed not in option.choices:
        raise InvalidOption(f"option {name!r} must be one of {', '.join(map(repr, option.choices))}")
    return typed


def _convert(name: str, option: Option, value: Any) -> Any:
    wanted = option.kind.__name__
    if value is None or (option.kind is not bool and isinstance(value, bool)):
        raise InvalidOption(f"option {name!r} must be a {wanted}")
    if option.kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
            return value.lower() in _TRUE
        raise InvalidOption(f"option {name!r} must be true or false")
    if option.kind is str and not isinstance(value, str | os.PathLike):
        raise InvalidOption(f"option {name!r} must be text")
    try:
        return option.kind(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidOption(f"option {name!r} must be a {wanted}") from None
