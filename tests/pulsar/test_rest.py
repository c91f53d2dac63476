"""The REST interface of several brokers, of which some do not answer."""

import io
import socket
import urllib.error
import urllib.request
from email.message import Message
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from txnbridge_conformance.brokers._broker import free_ports
from txnbridge_pulsar.admin.rest import Rest

from tests.failing import EACH, fail_call
from tests.pulsar.kit import SOON, http_server, settings_for
from txnbridge.errors import BrokerUnavailable
from txnbridge.spi import Deadline


class Answering(BaseHTTPRequestHandler):
    """Says which request it was; of /admin/half only the beginning, and of /admin/page what no broker says."""

    def do_GET(self) -> None:
        self.server.seen.append(self.command)  # type: ignore[attr-defined]
        if self.path == "/admin/half":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n[")
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>" if self.path == "/admin/page" else b'"here"')

    def do_PUT(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


def answering() -> Any:
    return http_server(Answering, seen=[])


def rest_of(*ports: int) -> Rest:
    hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
    return Rest(settings_for("pulsar://127.0.0.1:1/public/default", admin_url=f"http://{hosts}"))


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_a_rest_address_where_nobody_listens_is_left_for_the_next_one(method: str) -> None:
    with answering() as server:
        rest = rest_of(*free_ports(1), server.server_port)
        assert [rest.ask(method, "/admin/x", Deadline(SOON)) for _ in range(2)] == ["here", "here"]
        assert rest._current == 1


def test_a_broker_that_says_nothing_takes_a_part_of_the_time_only() -> None:
    with answering() as server, socket.create_server(("127.0.0.1", 0)) as silent:
        assert rest_of(silent.getsockname()[1], server.server_port).get("/admin/x", Deadline(20)) == "here"


def test_a_change_whose_answer_is_lost_is_not_asked_for_again() -> None:
    with answering() as dying, answering() as other:
        rest = rest_of(dying.server_port, other.server_port)
        with pytest.raises(BrokerUnavailable):
            rest.ask("PUT", "/admin/half", Deadline(SOON))
        assert other.seen == []
        with pytest.raises(BrokerUnavailable):  # a question is asked of the next one: here it gets no further there
            rest.get("/admin/half", Deadline(SOON))
        assert (dying.seen, other.seen) == (["PUT", "GET"], ["GET"])


def test_rest_addresses_where_nobody_listens_raise_broker_unavailable() -> None:
    with pytest.raises(BrokerUnavailable, match="refused"):
        rest_of(*free_ports(2)).get("/admin/x", Deadline(SOON))


@pytest.mark.parametrize(
    ("location", "times"), [("http://other/admin/x", 1), ("/admin/y", 5)], ids=["http", "relative"]
)
def test_a_redirect_stays_in_https(monkeypatch: pytest.MonkeyPatch, location: str, times: int) -> None:
    headers = Message()
    headers["Location"] = location
    redirect = urllib.error.HTTPError("https://127.0.0.1:1", 307, "", headers, io.BytesIO())
    asked = fail_call(monkeypatch, urllib.request.OpenerDirector, "open", redirect, EACH)
    rest = Rest(settings_for("pulsar://127.0.0.1:1/public/default", admin_url="https://127.0.0.1:1"))
    with pytest.raises(BrokerUnavailable, match="redirect"):
        rest.get("/admin/x", Deadline(SOON))
    assert len(asked) == times and all(request.full_url.startswith("https:") for _, request, *_ in asked)


def test_an_answer_that_no_broker_gives_is_an_error_that_names_the_option() -> None:
    with answering() as server, pytest.raises(BrokerUnavailable, match="admin_url"):
        rest_of(server.server_port).get("/admin/page", Deadline(SOON))
