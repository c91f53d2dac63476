"""The translation of the settings of Kafka's Java clients (of Spark or a Java service) into librdkafka's names."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping

from txnbridge.errors import InvalidOption

_RENAMED = {
    "compression.gzip.level": "compression.level",
    "compression.lz4.level": "compression.level",
    "compression.zstd.level": "compression.level",
    "fetch.max.wait.ms": "fetch.wait.max.ms",
    "max.request.size": "message.max.bytes",
    "sasl.mechanisms": "sasl.mechanism",  # librdkafka has both names; the rest of the backend uses only the second
    "sasl.oauthbearer.client.credentials.client.id": "sasl.oauthbearer.client.id",
    "sasl.oauthbearer.client.credentials.client.secret": "sasl.oauthbearer.client.secret",
    "ssl.keystore.certificate.chain": "ssl.certificate.pem",
    "ssl.keystore.key": "ssl.key.pem",
    "ssl.truststore.certificates": "ssl.ca.pem",
}
# The operating system's default is -1 in Java, and 0 in librdkafka.
_OWN_DEFAULT = {"-1": "0"}
_CONVERTED: Mapping[str, tuple[str, Callable[[str], str]]] = {
    "buffer.memory": ("queue.buffering.max.kbytes", lambda value: str(max(1, int(value) // 1024))),
    "receive.buffer.bytes": ("socket.receive.buffer.bytes", lambda value: _OWN_DEFAULT.get(value, value)),
    "send.buffer.bytes": ("socket.send.buffer.bytes", lambda value: _OWN_DEFAULT.get(value, value)),
    "ssl.endpoint.identification.algorithm": ("ssl.endpoint.identification.algorithm", lambda value: value or "none"),
}
_HANDLER = "sasl.login.callback.handler.class"
# The Java classes that are ignored, because the same happens without them.
_HANDLERS = (
    "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler",
    "org.apache.kafka.common.security.oauthbearer.secured.OAuthBearerLoginCallbackHandler",
)
_STORES = ("ssl.truststore", "ssl.keystore")
_STORE_SETTINGS = {f"{store}.{part}" for store in _STORES for part in ("type", "location", "password")}

NAMES = frozenset({*_RENAMED, *_CONVERTED, *_STORE_SETTINGS, _HANDLER, "sasl.jaas.config"})


def librdkafka_names(given: Mapping[str, str]) -> dict[str, str]:
    """Return the settings in librdkafka's names. Raise `InvalidOption`, without secrets, if one is wrong."""
    left = dict(given)
    if left.pop(_HANDLER, _HANDLERS[0]) not in _HANDLERS:
        raise InvalidOption(f"{_HANDLER!r} names a Java class, which these clients cannot load; leave it out")
    line = left.pop("sasl.jaas.config", None)
    pairs = [pair for store in _STORES for pair in _store(store, left)]
    pairs += [_renamed(name, value) for name, value in left.items()]
    if line is not None:
        mechanism = dict(pairs).get("sasl.mechanism")
        pairs = [pair for pair in pairs if pair[0] != "sasl.mechanism"] + [*login(line, mechanism).items()]
    named: dict[str, str] = {}
    for name, value in pairs:
        if name in named:
            raise InvalidOption(f"{name!r} is given twice: also under its name in Kafka's Java clients")
        named[name] = value
    return named


def _renamed(name: str, value: str) -> tuple[str, str]:
    target, convert = _CONVERTED.get(name, (_RENAMED.get(name, name), str))
    try:
        return target, convert(value)
    except ValueError:
        raise InvalidOption(f"option {name!r} must be a whole number") from None


def _store(store: str, left: dict[str, str]) -> list[tuple[str, str]]:
    """Remove a key store's or trust store's settings from `left`; return librdkafka's settings for its PEM file."""
    kind = left.pop(f"{store}.type", "").upper()
    location = left.pop(f"{store}.location", None)
    password = left.pop(f"{store}.password", None)
    if location is None:
        if password is not None or kind not in ("", "PEM"):
            raise InvalidOption(f"'{store}.type' and '{store}.password' have no effect without '{store}.location'")
        return []
    if kind != "PEM":
        raise InvalidOption(
            f"'{store}.location' must be a PEM file here, with {store}.type=PEM; convert the store by: "
            f"{_conversion(store, location, kind)}"
        )
    if password is not None:
        raise InvalidOption(f"'{store}.password': a PEM file has no password; its key's is 'ssl.key.password'")
    if store == "ssl.truststore":
        return [("ssl.ca.location", location)]
    return [("ssl.certificate.location", location), ("ssl.key.location", location)]


def _conversion(store: str, location: str, kind: str) -> str:
    """Return the shell command that converts a Java key store or trust store to PEM; it asks for the password."""
    stem = re.sub(r"\.(jks|p12|pfx|pkcs12|keystore|truststore)$", "", location, flags=re.IGNORECASE)
    source, pem, p12 = (shlex.quote(path) for path in (location, f"{stem}.pem", f"{stem}.converted.p12"))
    if store == "ssl.truststore":
        return f"keytool -list -rfc -keystore {source} > {pem}"
    if kind == "JKS" or location.lower().endswith(".jks"):
        convert = f"keytool -importkeystore -srckeystore {source} -destkeystore {p12} -deststoretype PKCS12"
        return f"{convert} && openssl pkcs12 -in {p12} -nodes -out {pem}"
    return f"openssl pkcs12 -in {source} -nodes -out {pem}"


FORM = 'MODULE required name="value" name="value";'
_TOKEN = re.compile(
    r"""
    (?P<skipped>(?:\s+|//[^\r\n]*|/\*.*?\*/)*)
    (?: (?P<mark>[=;])
      | "(?P<double>(?:[^"\\\r\n]|\\.)*)"
      | '(?P<single>(?:[^'\\\r\n]|\\.)*)'
      | (?P<word>(?:[^\W\d]|\$)[\w.$-]*)
      | (?P<end>\Z)
      | (?P<bad>.)
    )
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\([0-3][0-7]{0,2}|[4-7][0-7]?|.)", re.DOTALL)
_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_FLAGS = {"required", "requisite", "sufficient", "optional"}


def parse_jaas(line: str) -> tuple[str, dict[str, str]]:
    """Parse a JAAS line into its login module and options. Raise `InvalidOption`, without its text, if malformed."""
    tokens = _TOKEN.finditer(line)
    module = _text(next(tokens))
    if _text(next(tokens)).lower() not in _FLAGS:
        raise InvalidOption(f"'sasl.jaas.config' has no control flag after the module: {FORM}")
    options: dict[str, str] = {}
    while (token := next(tokens))["mark"] != ";":
        name = _text(token)
        if (token := next(tokens))["mark"] != "=":
            raise _wrong(token)
        options[name] = _text(next(tokens))
    if next(tokens).lastgroup != "end":
        raise InvalidOption("'sasl.jaas.config' holds more than one login module; give the one for this cluster")
    return module, options


def _unescape(match: re.Match[str]) -> str:
    text = match[1]
    return chr(int(text, 8)) if text in "01234567" or len(text) > 1 else _ESCAPES.get(text, text)


def _text(token: re.Match[str]) -> str:
    kind = str(token.lastgroup)
    if kind in ("mark", "end", "bad"):
        raise _wrong(token)
    return token[kind] if kind == "word" else _ESCAPE.sub(_unescape, token[kind])


def _wrong(token: re.Match[str]) -> InvalidOption:
    kind = str(token.lastgroup)
    at = token.end("skipped") + 1
    if kind == "bad":
        return InvalidOption(
            f"'sasl.jaas.config' cannot be read from character {at} on: a quote is not closed, or the value needs"
            f" quotes: {FORM}"
        )
    where = "ends too early" if kind == "end" else f"is wrong at character {at}"
    return InvalidOption(
        f"'sasl.jaas.config' {where}; it looks like: {FORM} (a value with \" or \\ escapes them by \\)"
    )


_SECURITY = "org.apache.kafka.common.security."
_PLAIN = _SECURITY + "plain.PlainLoginModule"
_SCRAM = _SECURITY + "scram.ScramLoginModule"
_OAUTH = _SECURITY + "oauthbearer.OAuthBearerLoginModule"
# For each login module: its options, and librdkafka's settings for them.
_MODULES = {
    _PLAIN: {"username": "sasl.username", "password": "sasl.password"},
    _SCRAM: {"username": "sasl.username", "password": "sasl.password"},
    _OAUTH: {
        "clientId": "sasl.oauthbearer.client.id",
        "clientSecret": "sasl.oauthbearer.client.secret",
        "scope": "sasl.oauthbearer.scope",
    },
}
_MECHANISMS = {_PLAIN: ("PLAIN",), _SCRAM: ("SCRAM-SHA-256", "SCRAM-SHA-512"), _OAUTH: ("OAUTHBEARER",)}
_EXTENSION = "extension_"


def login(line: str, mechanism: str | None) -> dict[str, str]:
    """Return librdkafka's settings for a JAAS line: its options, and the SASL mechanism of its login module."""
    module, options = parse_jaas(line)
    if module not in _MODULES:
        known = ", ".join(name.rpartition(".")[2] for name in _MODULES)
        raise InvalidOption(f"the login module of 'sasl.jaas.config' must be one of {known}; others need Java")
    settings = {"sasl.mechanism": _mechanism(module, mechanism)}
    extensions = []
    for name, value in options.items():
        if module == _OAUTH and name.startswith(_EXTENSION):
            extensions.append(f"{name[len(_EXTENSION) :]}={value}")
        elif name in _MODULES[module]:
            settings[_MODULES[module][name]] = value
        else:
            known = ", ".join(_MODULES[module])
            raise InvalidOption(f"'sasl.jaas.config': {module.rpartition('.')[2]} takes {known} here, and nothing else")
    if extensions:
        settings["sasl.oauthbearer.extensions"] = ",".join(extensions)
    return settings


def _mechanism(module: str, given: str | None) -> str:
    fitting = _MECHANISMS[module]
    mechanism = fitting[0] if given is None and len(fitting) == 1 else (given or "").upper()
    if mechanism not in fitting:
        raise InvalidOption(
            f"{module.rpartition('.')[2]} in 'sasl.jaas.config' needs sasl.mechanism={' or '.join(fitting)}"
        )
    return mechanism
