"""`Rest`: a client of the brokers' REST admin API at `admin_url`, for requests that the binary protocol lacks."""

from __future__ import annotations

import base64
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urljoin

from txnbridge.errors import AccessDenied, BrokerUnavailable, DeadlineExceeded, TxnBridgeError
from txnbridge.spi import Deadline
from txnbridge_pulsar.settings import PulsarSettings

# A broker redirects a request to the one that serves the topic; more redirects than this go in circles.
_MAX_REDIRECTS = 5
_REDIRECT_STATUSES = (307, 308)
_DENIED_STATUSES = (401, 403)
# A broker may die in the middle of its answer.
_CONNECTION_ERRORS = (OSError, http.client.HTTPException)
_MAX_REASON_CHARACTERS = 300  # of a broker's error, which may contain a whole stack trace


class RestRefused(Exception):
    """The broker refused a REST request, with an HTTP status and a reason."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status = status
        self.text = text

    def __str__(self) -> str:
        return f"HTTP {self.status}: {self.text}" if self.text else f"HTTP {self.status}"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Disables the library's redirects, which only work for GET and HEAD; `Rest` follows redirects itself."""

    def redirect_request(self, *answer: Any) -> None:
        return None


class Rest:
    """A REST client, which connects at its first call. Each thread sends one request at a time.

    Paths begin with `/admin/`. If one address of the `admin_url` does not answer, the request is sent to the next
    address, unless the request may already have changed something. Without an `admin_url` the client is false, and may
    not be called.
    """

    def __init__(self, settings: PulsarSettings) -> None:
        self._settings = settings
        handlers: list[urllib.request.BaseHandler] = [_NoRedirects(), urllib.request.ProxyHandler({})]
        if settings.admin_url.startswith("https:"):
            handlers.append(urllib.request.HTTPSHandler(context=settings.tls_context()))
        scheme, _, hosts = settings.admin_url.partition("://")
        self._addresses = [f"{scheme}://{host}" for host in hosts.split(",")]
        self._current = 0  # index of the address in use
        self._opener = urllib.request.build_opener(*handlers)

    def __bool__(self) -> bool:
        return bool(self._settings.admin_url)

    def get(self, path: str, deadline: Deadline) -> Any:
        """Return the JSON answer to GET. Raise `RestRefused`, `AccessDenied` or `BrokerUnavailable`."""
        return self.ask("GET", path, deadline)

    def ask(self, method: str, path: str, deadline: Deadline, body: Any = None) -> Any:
        """Send a request and return its JSON answer; None if it is empty.

        If no answer arrives, the broker may still have made the change.
        """
        _, answer = self.exchange(method, path, deadline, body)
        try:
            return json.loads(answer) if answer else None
        except ValueError as error:
            raise BrokerUnavailable(f"{method} {path}: no broker has answered (admin_url): {error}") from error

    def headers(self, path: str, deadline: Deadline) -> Mapping[str, str]:
        """Return the headers of the answer to GET, by their lower-case names."""
        return self.exchange("GET", path, deadline)[0]

    def exchange(self, method: str, path: str, deadline: Deadline, body: Any = None) -> tuple[Mapping[str, str], bytes]:
        """Send a request. Return the answer's headers, by their lower-case names, and its body."""
        for left in range(len(self._addresses), 0, -1):
            address = self._addresses[self._current % len(self._addresses)]
            try:
                return self._send(method, address, path, Deadline(deadline.left() / left), body)
            except TxnBridgeError:
                raise  # `AccessDenied` is an `OSError`, too
            except _CONNECTION_ERRORS as error:
                self._current += 1
                deadline.check(f"asking {address}{path}")
                was_sent = not isinstance(getattr(error, "reason", None), ConnectionRefusedError)
                if left == 1 or (method != "GET" and was_sent):
                    raise BrokerUnavailable(f"asking {address}{path}: {error}") from error
        raise AssertionError("there is an address")

    def _send(
        self, method: str, address: str, path: str, deadline: Deadline, body: Any
    ) -> tuple[Mapping[str, str], bytes]:
        url = address + path
        for _ in range(_MAX_REDIRECTS):
            try:
                with self._opener.open(self._request(method, url, body), timeout=max(0.001, deadline.left())) as answer:
                    return {name.lower(): value for name, value in answer.headers.items()}, answer.read()
            except urllib.error.HTTPError as error:
                if error.code not in _REDIRECT_STATUSES:
                    raise _refusal(error, method, path) from error
                url = urljoin(url, error.headers["Location"] or "")
                error.close()
                if not url.startswith(address.partition(":")[0]):  # it would show the credentials to the network
                    raise BrokerUnavailable(f"{address}{path}: a broker redirects to {url}") from error
        raise BrokerUnavailable(f"{address}{path}: the brokers redirect in circles")

    def _request(self, method: str, url: str, body: Any) -> urllib.request.Request:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Accept": "*/*", **self._credentials()}
        return urllib.request.Request(url, data, headers, method=method)

    def _credentials(self) -> dict[str, str]:
        way = self._settings.authentication()
        if way.method not in ("token", "basic"):
            return {}
        data = way.data()
        kind, text = ("Bearer", data.decode()) if way.method == "token" else ("Basic", base64.b64encode(data).decode())
        return {"Authorization": f"{kind} {text}"}


def _refusal(error: urllib.error.HTTPError, method: str, path: str) -> RestRefused | TxnBridgeError:
    with error:
        text = _reason(error.read())
    if error.code in _DENIED_STATUSES:
        return AccessDenied(
            f"{method} {path}: {text or 'this user may not do that'}; it needs an administrator of the tenant"
            " (pulsar-admin tenants update --admin-roles), or a superuser"
        )
    return RestRefused(error.code, text)


def _reason(body: bytes) -> str:
    """Return the reason in the body of an error answer, without a stack trace; "" for an HTML page."""
    try:
        text = str(json.loads(body)["reason"])
    except (ValueError, TypeError, KeyError):
        text = body.decode(errors="replace")
    if text.lstrip().startswith("<"):
        return ""
    messages = [line.removeprefix("Message: ") for line in text.splitlines() if line.startswith("Message: ")]
    return " ".join((messages[-1] if messages else text).split())[:_MAX_REASON_CHARACTERS]


def unavailable(refused: RestRefused, what: str) -> BrokerUnavailable:
    """Return the error for a refusal that the caller cannot explain; the caller raises it `from` the refusal."""
    return (DeadlineExceeded if refused.status == 504 else BrokerUnavailable)(f"{what}: {refused}")


def path_of(full: str) -> str:
    """Return a topic's full name as part of a URL path, without the leading "persistent/"."""
    return "/".join(quote(part, safe="") for part in full.removeprefix("persistent://").split("/"))
