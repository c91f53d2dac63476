"""The doctor's checks: settings and states of a RocketMQ cluster that weaken a promise."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from txnbridge.spi import Advice, Deadline, OpenTransaction
from txnbridge_rocketmq.admin.open_halves import groups_of_open_halves
from txnbridge_rocketmq.client.protocol.codes import ROCKSDB_HALF_TOPIC
from txnbridge_rocketmq.cluster import RocketMQCluster
from txnbridge_rocketmq.settings import RocketMQSettings
from txnbridge_rocketmq.settings.broker_config import BrokerConfig
from txnbridge_rocketmq.topics import route_of

# The least `transactionTimeOut`. Brokers set to 0.3 s sent check-backs for halves that were ended immediately; brokers
# set to one second did not.
_LEAST_CHECK_BACK_AGE_SECONDS = 1.0
# The outage of an application that halves should survive: a repair may take until the next morning.
_LONGEST_OUTAGE_SECONDS = 12 * 3600
# The default retention of brokers. An application that is stopped for longer loses the records of its decision log.
_DEFAULT_RETENTION_SECONDS = 72 * 3600
# The margin in retention for clocks that differ, as in the decision log.
_CLOCK_SKEW_SECONDS = 300
# The disk use at which brokers begin to drop old files, and at which they drop files within retention.
_NEARLY_FULL, _DROPS_FILES = 0.75, 0.85
# A transaction counts as stuck this long after its deadline: brokers run a round of check-backs every half minute.
_STUCK_SECONDS = 90
# Application and group of a half message, from `RocketMQSettings.group_of_halves`; None for other halves.
_HalfGroup = tuple[str, str] | None
# The least size of an op message. It names halves by offsets of up to 12 characters, so it names 20 and more.
_LEAST_OP_MESSAGE_BYTES = 256
_SETTING_COMMAND = "mqadmin updateBrokerConfig -b ADDRESS -k {key} -v {value}, and in the broker's file"


def check_settings(config: BrokerConfig, settings: RocketMQSettings) -> Iterator[Advice]:
    """Yield advice about settings of a broker that weaken a promise."""
    yield from _check_switches(config)
    yield from _check_intervals(config)
    yield from _check_patience(config, settings)
    yield from _check_retention(config, settings)
    yield from _check_copies(config)


def _check_switches(config: BrokerConfig) -> Iterator[Advice]:
    if config.is_on("rejectTransactionMessage"):
        text = "it takes no transactions: rejectTransactionMessage is true"
        yield _problem(config, text, "rejectTransactionMessage", "false")
    if not config.is_on("messageIndexEnable", True):
        text = "messageIndexEnable is false: no process can look messages up, so only the owner of a half can end it"
        yield _problem(config, text, "messageIndexEnable", "true")
    elif not config.is_on("messageIndexSafe"):
        text = (
            "messageIndexSafe is false: after kill -9 it finds only messages in the last files of its commit log. Older"
            " published messages then count as missing: tokens, transactional ids and groups whose last transaction is"
            " older are blocked, and messages that were published twice cannot be recognized"
        )
        yield _problem(config, text, "messageIndexSafe", "true")
    if config.is_on("enableSlaveActingMaster"):
        text = "enableSlaveActingMaster: replicas may move halves to other brokers; published ones may count as aborted"
        yield _problem(config, text, "enableSlaveActingMaster", "false")
    if config.is_on("indexRocksDBEnable"):
        text = "indexRocksDBEnable is true: looking messages up in that index was not tested"
        yield _warning(config, text, "use the broker's default index")


def _check_intervals(config: BrokerConfig) -> Iterator[Advice]:
    """Yield advice about the timing of check-backs.

    Until a broker has written the op message of an ended half, it may send more check-backs about the half. A client
    that answers them by a commit, without a look-up, publishes the message twice.
    """
    least = max(2 * config.op_message_interval, _LEAST_CHECK_BACK_AGE_SECONDS)
    if config.transaction_timeout < least:
        text = (
            f"it sends check-backs for halves that are {config.transaction_timeout:g} s old (transactionTimeOut), and"
            f" writes op messages every {config.op_message_interval:g} s (transactionOpBatchInterval): ended halves get"
            " check-backs and are written again, and clients that commit without a look-up publish them twice"
        )
        yield _problem(config, text, "transactionTimeOut", f"{least * 1000:.0f}")
    if config.check_interval < config.op_message_interval:
        text = (
            f"it sends check-backs every {config.check_interval:g} s (transactionCheckInterval), and writes op messages"
            f" only every {config.op_message_interval:g} s (transactionOpBatchInterval): halves that have ended get"
            " check-backs"
        )
        yield _problem(config, text, "transactionCheckInterval", f"{config.op_message_interval * 1000:.0f}")
    noted = config.number("transactionOpMsgMaxSize", 4_096)
    if noted < _LEAST_OP_MESSAGE_BYTES:
        text = (
            f"its op messages name few halves each (transactionOpMsgMaxSize is {noted}), and one thread writes them."
            " If halves are ended faster for long, its queue of 20,000 is full, and each end waits 0.1 s; then a broker"
            " ends 120 halves a second instead of thousands"
        )
        yield _warning(config, text, _SETTING_COMMAND.format(key="transactionOpMsgMaxSize", value="4096"))


def _check_patience(config: BrokerConfig, settings: RocketMQSettings) -> Iterator[Advice]:
    asked = (
        f"it sends {config.check_max} check-backs (transactionCheckMax), every {config.check_interval:g} s: after"
        f" {config.discarded_after:g} s a half is discarded"
    )
    value = f"{_LONGEST_OUTAGE_SECONDS / max(config.check_interval, 0.001):.0f}"
    longest = settings.timeout + (settings.hold or 0)
    if longest > config.longest_transaction:
        text = (
            f"{asked}, the first when it is {config.transaction_timeout:g} s old (transactionTimeOut). A transaction"
            f" here may take {longest:g} s (timeout and hold): its halves can be discarded before its deadline"
        )
        yield _problem(config, text, "transactionCheckMax", value)
    elif config.discarded_after < _LONGEST_OUTAGE_SECONDS and config.half_topic == ROCKSDB_HALF_TOPIC:
        yield Advice(
            "problem",
            f"broker {config.name}",
            f"{asked}, even if no bridge was running to answer. Discarded halves in RocksDB cannot be listed: what an"
            " owner decided and did not publish stays unpublished, unless its transactional id is opened again",
            f"{_SETTING_COMMAND.format(key='transactionCheckMax', value=value)}. After a restart with that setting the"
            " broker sends check-backs again for the halves that it has discarded",
        )
    elif config.discarded_after < _LONGEST_OUTAGE_SECONDS:
        text = f"{asked}, even if no bridge was running to answer; then only its token, or an administrator, ends it"
        yield _warning(config, text, _SETTING_COMMAND.format(key="transactionCheckMax", value=value))


def _check_retention(config: BrokerConfig, settings: RocketMQSettings) -> Iterator[Advice]:
    kept = f"records are kept for {config.retention / 3600:g} h (fileReservedTime)"
    if config.retention <= config.discarded_after:
        text = (
            f"{kept}, and an open half for {config.discarded_after / 3600:g} h: it can outlive the record that decides"
            " it, and then no process may end it"
        )
        yield _problem(config, text, "fileReservedTime", f"{config.discarded_after / 3600 + 24:.0f}")
    if config.retention <= settings.timeout + (settings.hold or 0) + _CLOCK_SKEW_SECONDS:
        text = (
            f"{kept}, and a transaction here may wait for {settings.timeout + (settings.hold or 0):g} s (timeout and"
            " hold): the decision log can lose its records before"
        )
        yield _problem(config, text, "fileReservedTime", "72")
    elif config.retention < _DEFAULT_RETENTION_SECONDS:
        text = f"{kept}: {_STOPPED_TOO_LONG}"
        yield _warning(config, text, "keep them for 72 h, or put the log elsewhere (decision_log=)")
    else:
        yield Advice("ok", f"broker {config.name}", f"{kept}: {_STOPPED_TOO_LONG}")


_STOPPED_TOO_LONG = (
    "if no bridge of an application runs for longer than that, its decision log loses openings and positions, and the"
    " next bridge raises an error instead of reading or writing on"
)


def _check_copies(config: BrokerConfig) -> Iterator[Advice]:
    if config.values.get("flushDiskType") == "ASYNC_FLUSH":
        text = "flushDiskType is ASYNC_FLUSH: kill -9 loses no committed message, but a loss of power loses the latest"
        yield _warning(config, text, "SYNC_FLUSH where that matters")
    if config.values.get("brokerRole") == "ASYNC_MASTER":
        text = (
            "brokerRole is ASYNC_MASTER: the last moments are lost with its disk, and a replica that takes over may"
            " lack decisions"
        )
        yield _warning(config, text, "SYNC_MASTER with a replica, at least for the broker with txnbridge's own topics")


def check_brokers_of_topics(cluster: RocketMQCluster, topics: Iterable[str], deadline: Deadline) -> Iterator[Advice]:
    """Yield advice about topics that are spread over several brokers."""
    for name in topics:
        route = route_of(cluster.client, name, deadline)
        brokers = sorted({queue.broker for queue in route.readable + route.writable}) if route else []
        if len(brokers) > 1:
            text = f"is on the brokers {', '.join(brokers)}, and txnbridge neither reads nor writes it"
            yield Advice("warning", f"topic {name}", text, "use a topic on one broker")


def check_producer_groups(cluster: RocketMQCluster, deadline: Deadline) -> Iterator[Advice]:
    """Yield advice about other clients in the producer groups of bridges (hazard H134)."""
    groups = {cluster.settings.producer_group, *groups_of_open_halves(cluster, deadline)}
    for group, strangers in cluster.producer_groups.strangers(groups, deadline, strict=True).items():
        text = (
            f"the clients {', '.join(strangers)} are no bridges, and brokers send them check-backs about half messages"
            " of txnbridge, which they publish or drop as they answer"
        )
        remedy = "have these clients leave the group, or choose another application= or prefix"
        yield Advice("problem", f"producer group {group}", text, remedy)


def check_disk(broker: str, full: float) -> Iterator[Advice]:
    """Yield advice about a broker's disk. `full` is the used share, from 0 to 1."""
    if full >= _NEARLY_FULL:
        text = (
            f"its disk is filled to {full:.0%}: beyond {_DROPS_FILES:.0%} it drops records of any age, even of decision"
            " logs, and beyond 90% it accepts no messages"
        )
        remedy = "make room; open halves fill a disk, too, because each round of check-backs writes them again"
        yield Advice("problem" if full >= _DROPS_FILES else "warning", f"broker {broker}", text, remedy)


def check_open(transactions: Iterable[OpenTransaction], settings: RocketMQSettings) -> Iterator[Advice]:
    """Yield advice about open transactions that need an administrator, and half messages that no resolver decided."""
    parked: Counter[str] = Counter()
    for listed in transactions:
        named = settings.group_of_halves(listed.owner)
        if named is not None and listed.state == "discarded" and listed.token is not None:
            parked[named[1]] += 1
        else:
            yield from _check_transaction(listed, named)
    for group, count in parked.items():
        text = f"{count} are parked: no resolver decided them, and the broker drops them by age (fileReservedTime)"
        remedy = f"txnbridge resolver parked --group {shlex.quote(group)}"
        yield Advice("problem", f"half messages of {group}", text, remedy)


def _check_transaction(listed: OpenTransaction, named: _HalfGroup) -> Iterator[Advice]:
    """Yield advice about a listed transaction whose state is "discarded" or "lost", or that does not end.

    `named` is None, or application and group for a transaction of half messages.
    """
    now = time.time() * 1000
    if listed.state == "discarded":
        yield Advice(
            "problem",
            f"transaction {listed.transaction}",
            f"of {listed.owner}: the broker has discarded {listed.messages} halves, and no longer sends check-backs",
            f"txnbridge transactions repair {shlex.quote(listed.transaction)} --yes --reason TEXT has it send"
            " check-backs again; commit or abort instead of repair ends the transaction",
        )
    elif listed.state == "lost":
        text = f"of {listed.owner}: the records that decide it are gone, so no process may end it"
        remedy = "keep records for longer (fileReservedTime), or the log elsewhere (decision_log=)"
        yield Advice("problem", f"transaction {listed.transaction}", text, remedy)
    elif listed.state == "ending" or now > (listed.expires_at or now) + _STUCK_SECONDS * 1000:
        who = "bridge of that application" if named is None else f"resolver of the half messages of {named[1]}"
        text = (
            f"of {listed.owner} is {listed.state}, and does not end: no {who} seems to run. Each round"
            " of check-backs writes its halves again"
        )
        remedy = f"{_command_to_end(listed.owner, named)}, or end it with txnbridge transactions"
        yield Advice("warning", f"transaction {listed.transaction}", text, remedy)


def _command_to_end(owner: str, named: _HalfGroup) -> str:
    if named is None:
        return f"open a bridge with application={owner!r}"
    application, group = named
    names = f"--group {shlex.quote(group)} --application {shlex.quote(application)}"
    return f"txnbridge resolver run {names} --check MODULE:FUNCTION"


def _problem(config: BrokerConfig, text: str, key: str, value: str) -> Advice:
    return Advice("problem", f"broker {config.name}", text, _SETTING_COMMAND.format(key=key, value=value))


def _warning(config: BrokerConfig, text: str, remedy: str) -> Advice:
    return Advice("warning", f"broker {config.name}", text, remedy)
