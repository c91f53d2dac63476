"""Tokens: text that names one transaction for ever."""

import base64
import json
import zlib
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from txnbridge import InvalidToken, Token, UsageError

TOKEN = Token(
    broker="embedded",
    cluster="c-1",
    transaction="billing/7",
    how={"p": 1},
    prepared=True,
    expires_at=1_700_000_000_000,
    messages=3,
    fingerprint=2**64 - 1,
    log={"name": "billing", "begin": [4]},
)

# What version 1 looked like from its first day; it must stay readable.
GOLDEN = (
    "txb1.c6OpY3siYiI6ImVtYmVkZGVkIiwiYyI6ImMtMSIsImUiOjE3MDAwMDAwMDAwMDAsImYiOjE4NDQ2NzQ0MDczNzA5NTUxNjE1LCJoIjp7"
    "InAiOjF9LCJsIjp7ImJlZ2luIjpbNF0sIm5hbWUiOiJiaWxsaW5nIn0sIm4iOjMsInAiOnRydWUsInQiOiJiaWxsaW5nLzcifQ"
)


def pack(body: bytes) -> str:
    return "txb1." + base64.urlsafe_b64encode(zlib.crc32(body).to_bytes(4, "big") + body).decode().rstrip("=")


def test_the_first_version_stays_readable() -> None:
    assert Token.parse(GOLDEN) == TOKEN
    assert str(TOKEN) == GOLDEN
    assert Token.parse(f"  {TOKEN}\n") == TOKEN  # white space around it is forgiven


def test_a_repr_shows_no_text_that_could_be_used() -> None:
    assert str(TOKEN) not in repr(TOKEN)


@given(st.integers(min_value=0, max_value=len(GOLDEN) - 1), st.characters(min_codepoint=33, max_codepoint=126))
def test_a_changed_character_is_noticed(index: int, character: str) -> None:
    changed = GOLDEN[:index] + character + GOLDEN[index + 1 :]
    if changed != GOLDEN:
        with pytest.raises(InvalidToken):
            Token.parse(changed)


@given(st.integers(min_value=0, max_value=len(GOLDEN) - 1))
def test_a_token_cut_short_is_noticed(length: int) -> None:
    with pytest.raises(InvalidToken):
        Token.parse(GOLDEN[:length])


@given(st.text() | st.text().map("txb1.{}".format) | st.binary().map(pack))
@example(pack(b"[" * 2000))  # it does not exhaust the stack
def test_garbage_is_refused_as_such(text: str) -> None:
    with pytest.raises(InvalidToken):
        Token.parse(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from("bcthpenfl"), json_values))
def test_fields_of_the_wrong_kind_are_refused_and_nothing_else_is_raised(fields: dict[str, Any]) -> None:
    try:
        token = Token.parse(pack(json.dumps(fields).encode()))
    except InvalidToken:
        return
    assert isinstance(token.broker, str) and isinstance(token.how, dict) and isinstance(token.prepared, bool)


def test_a_token_that_would_be_too_long_is_never_made() -> None:
    with pytest.raises(UsageError, match="4096"):
        str(Token("b", "c", "t", {"x": "y" * 5000}, prepared=True))


def test_something_that_is_not_text_is_refused() -> None:
    with pytest.raises(InvalidToken, match="int"):
        Token.parse(42)  # type: ignore[arg-type]
