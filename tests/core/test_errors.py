"""Errors: a short tree that survives pickling."""

import pickle

import pytest

from txnbridge import errors
from txnbridge.errors import Abort, EvidenceLost, Fenced, OutcomeUnknown, Poison, TxnBridgeError
from txnbridge.spi import NO_HEADERS, Message

ERRORS = [getattr(errors, name) for name in errors.__all__]
OURS = [cls for cls in ERRORS if issubclass(cls, TxnBridgeError)]


@pytest.mark.parametrize("cls", OURS, ids=lambda cls: cls.__name__)
def test_every_error_survives_pickling_with_its_token_and_the_text_of_its_cause(cls: type[TxnBridgeError]) -> None:
    error = cls("what was wrong", token="txb1.x")
    error.__cause__ = OSError(28, "no space")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == "what was wrong"
    assert copy.token == "txb1.x"
    assert "OSError" in str(copy.__cause__) and "no space" in str(copy.__cause__)


def test_a_cause_that_cannot_be_pickled_does_not_stop_the_error() -> None:
    class Unpicklable(Exception):
        def __reduce__(self):
            raise TypeError("no")

    error = Fenced("taken over", newer="host-2 pid 7")
    error.__cause__ = Unpicklable("inner")
    copy = pickle.loads(pickle.dumps(error))
    assert copy.newer == "host-2 pid 7"
    assert "inner" in str(copy.__cause__)


def test_poison_keeps_its_message_over_a_pickle() -> None:
    message = Message("t", 0, (1,), b"k", b"v", NO_HEADERS, 5, 1, object())
    copy = pickle.loads(pickle.dumps(Poison("cannot be decoded", message=message)))
    assert copy.message == message and str(copy) == "cannot be decoded"


def test_deadlines_and_missing_rights_are_errors_of_python_too() -> None:
    assert issubclass(errors.DeadlineExceeded, TimeoutError) and issubclass(errors.AccessDenied, PermissionError)


def test_signals_are_no_errors_of_ours() -> None:
    assert not issubclass(Abort, TxnBridgeError) and not issubclass(Poison, TxnBridgeError)


def test_only_lost_evidence_says_that_asking_later_will_not_help() -> None:
    assert EvidenceLost("x").permanent and not OutcomeUnknown("x").permanent


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_every_error_says_in_one_sentence_what_it_means(cls: type[Exception]) -> None:
    assert cls.__doc__ and cls.__doc__.strip()
