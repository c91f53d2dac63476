"""`Outcomes`: makes tokens, which name transactions for any process; by them ends transactions and finds outcomes."""

from __future__ import annotations

import time

from txnbridge import errors
from txnbridge._base.connection import Connection
from txnbridge._base.deadline import Deadline
from txnbridge._base.token import Outcome, Status, Token, TokenState
from txnbridge._decisions.logs import DecisionLogs
from txnbridge.capabilities import Capability
from txnbridge.spi import Writer

# The pause between two requests for an answer: long enough not to burden a broker that is starting, short enough for
# several requests within a deadline of a second.
_RETRY_SECONDS = 0.1


class Outcomes:
    def __init__(self, connection: Connection, logs: DecisionLogs) -> None:
        self._connection = connection
        self._logs = logs

    def token_of(self, writer: Writer, transaction: str, *, prepared: bool, fingerprint: int | None = None) -> Token:
        """Return the token of a writer's current or last transaction, with the backend's data to find its outcome."""
        evidence = writer.evidence()
        return Token(
            broker=self._connection.backend,
            cluster=self._connection.broker.cluster,
            transaction=transaction,
            how=evidence.how,
            prepared=prepared,
            expires_at=evidence.expires_at,
            messages=evidence.messages,
            fingerprint=fingerprint,
            log=evidence.log,
        )

    def status(self, token: str | Token) -> Status:
        connection = self._connection
        parsed = self._check(token)
        connection.capabilities.require(Capability.STATUS_LOOKUP)
        with connection.call(), connection.events.step("status", parsed.transaction) as found:
            status = connection.broker.status(parsed, self._logs.ledger_of(parsed), connection.deadline())
            found["state"] = status.state.value
        return status

    def end(self, token: str | Token, commit: bool, timeout: float | None) -> Outcome:
        """Commit or abort the prepared transaction of a token, from any process; return its true outcome."""
        connection = self._connection
        parsed = self._check(token)
        if not parsed.prepared:
            text = f"transaction {parsed.transaction} was never prepared, so its token is only for status(): no other"
            raise errors.InvalidState(text + " process can end this transaction")
        connection.capabilities.require(Capability.RESOLVE_ANYWHERE)
        decision = "commit" if commit else "abort"
        with connection.call(), connection.events.step("resolve", parsed.transaction, decision=decision) as found:
            outcome = self._ask_to_end(parsed, commit, connection.deadline(timeout))
            found["outcome"] = outcome.value
        return outcome

    def _ask_to_end(self, token: Token, commit: bool, deadline: Deadline) -> Outcome:
        broker = self._connection.broker
        end = broker.commit if commit else broker.abort
        while True:
            try:
                return end(token, self._logs.ledger_of(token), deadline)
            except errors.EvidenceLost as error:
                error.token = str(token)
                raise
            except (errors.OutcomeUnknown, errors.BrokerUnavailable) as error:
                # Repeating the same decision is safe, so repeat it until the broker answers.
                if isinstance(error, errors.OutcomeUnknown):
                    error.token = str(token)
                if deadline.left() <= _RETRY_SECONDS:
                    raise
                time.sleep(_RETRY_SECONDS)

    def resolve(self, token: Token | None, deadline: Deadline) -> Outcome | None:
        """Return the outcome of a token's transaction whose commit was not answered; None if unknown by the deadline.

        Raise `EvidenceLost` if the outcome can never be known.
        """
        connection = self._connection
        if token is None or not connection.capabilities[Capability.STATUS_LOOKUP]:
            return None
        with connection.events.step("resolve", token.transaction, decision=None) as found:
            while True:
                try:
                    status = connection.broker.status(token, self._logs.ledger_of(token), deadline)
                except errors.EvidenceLost as error:
                    error.token = str(token)
                    raise
                except errors.TxnBridgeError:  # any other error leaves the outcome unknown for now
                    status = Status(TokenState.UNKNOWN)
                found["state"] = status.state.value
                if status.state in (TokenState.COMMITTED, TokenState.ABORTED):
                    return Outcome(status.state.value)
                if status.permanent:
                    raise errors.EvidenceLost(
                        f"the evidence of the outcome of transaction {token.transaction} is gone: {status.reason}",
                        token=str(token),
                    )
                if deadline.left() <= _RETRY_SECONDS:
                    return None
                time.sleep(_RETRY_SECONDS)

    def _check(self, token: str | Token) -> Token:
        connection = self._connection
        connection.check_open()
        parsed = Token.parse(token)
        if parsed.broker != connection.backend:
            text = f"this token belongs to a {parsed.broker} broker; this bridge speaks to {connection.backend}"
            raise errors.InvalidToken(text)
        if parsed.cluster != connection.broker.cluster:
            text = f"this token belongs to cluster {parsed.cluster}; this bridge speaks to {connection.broker.cluster}"
            raise errors.InvalidToken(text)
        return parsed
