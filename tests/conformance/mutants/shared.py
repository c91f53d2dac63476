"""Mutants of the embedded groups that share partitions. The docstring of each says what is wrong with it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from txnbridge_embedded.read import group_assignments
from txnbridge_embedded.read.shared import SharedReader
from txnbridge_embedded.write import acks

from tests.conformance.mutants import Mutants, nothing, replace

SHARED = Mutants()


@SHARED.mutant("half-ack", workload="sharing")
def acknowledges_all_that_a_member_holds() -> None:
    """An acknowledgement of a part of the messages that a member has of a partition acknowledges all of them."""

    def apply_acks(connection: Any, context: Any, positions: Mapping[Any, Sequence[Any]], *rest: Any) -> None:
        held = {
            partition: connection.execute(
                "SELECT offset FROM leases WHERE group_id = ? AND partition_id = ? AND member = ?",
                (context.group_id, context.held[partition][0], context.member),
            ).fetchall()
            for partition in positions
        }
        before(connection, context, {each: sorted({*found, *held[each]}) for each, found in positions.items()}, *rest)

    before = replace(acks, "apply_acks", apply_acks)


@SHARED.mutant("half-ack", workload="sharing")
def acknowledges_what_an_aborted_one_had_reserved() -> None:
    """The abort of a prepared transaction acknowledges its messages, instead of giving them back."""
    replace(acks, "abort_pending", acks.commit_pending)


@SHARED.mutant("replay-duplicate", workload="sharing")
def leases_to_two_members() -> None:
    """A lease ends at once, and a member without one may acknowledge, even what another member has acknowledged."""

    def lease(reader: Any, *rest: Any) -> Any:
        vars(reader).update(_redeliver_ms=0)
        return before(reader, *rest)

    before = replace(SharedReader, "_lease", lease)
    replace(vars(acks)["_Acks"], "_check_leases", nothing)
    replace(vars(acks)["_Acks"], "_check_free", nothing)


@SHARED.mutant("half-ack", workload="sharing")
def keeps_what_a_killed_member_held() -> None:
    """The leases of a member that has left, or was killed, never end."""

    def remove_members(connection: Any, group_id: int, members: Iterable[str]) -> None:
        removed = [*members]
        before(connection, group_id, removed)
        connection.executemany(
            "UPDATE leases SET until = ? WHERE group_id = ? AND member = ?",
            [(acks.NO_EXPIRY, group_id, member) for member in removed],
        )

    before = replace(group_assignments, "remove_members", remove_members)


SHARED.apply_chosen()
