"""Checks for settings and states of a RocketMQ cluster that weaken a promise."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from txnbridge.spi import Advice, Deadline, OpenTransaction
from txnbridge_rocketmq.client.codes import ROCKSDB_HALF_TOPIC
from txnbridge_rocketmq.cluster import RocketMQCluster
from txnbridge_rocketmq.settings import RocketMQSettings
from txnbridge_rocketmq.settings.broker_config import BrokerConfig
from txnbridge_rocketmq.topics import route_of

# The least age of a half at the first check-back. Brokers set to 0.3 s sent check-backs for halves that were ended
# immediately; brokers set to one second did not.
_YOUNGEST_SECONDS = 1.0
# The outage of an application that halves should survive: a repair may take until the next morning.
_OUTAGE_SECONDS = 12 * 3600
# The default retention of brokers. An application that is stopped for longer loses the records of its decision log.
_KEPT_SECONDS = 72 * 3600
# The margin in retention for clocks that differ, as in the decision log.
_SKEW_SECONDS = 300
# The disk use at which brokers begin to drop old files, and at which they drop files within retention.
_NEARLY_FULL, _DROPS = 0.75, 0.85
# How long after its deadline a transaction counts as stuck: brokers run a round of check-backs every half minute.
_LATE_SECONDS = 90
_Named = tuple[str | None, str] | None
# The least size of an op message. It names halves by offsets of up to 12 characters, so it holds 20 and more.
_LEAST_NOTE_BYTES = 256
_HOW = "mqadmin updateBrokerConfig -b ADDRESS -k {key} -v {value}, and in the broker's file"


def check_settings(config: BrokerConfig, settings: RocketMQSettings) -> Iterator[Advice]:
    """Yield advice about a broker's settings."""
    yield from _check_switches(config)
    yield from _check_intervals(config)
    yield from _check_patience(config, settings)
    yield from _check_retention(config, settings)
    yield from _check_copies(config)


def _check_switches(config: BrokerConfig) -> Iterator[Advice]:
    if config.is_on("rejectTransactionMessage"):
        yield _problem(
            config, "it takes no transactions: rejectTransactionMessage is true", "rejectTransactionMessage", "false"
        )
    if not config.is_on("messageIndexEnable", True):
        text = "messageIndexEnable is false: what became of a half cannot be looked up, so nobody but its owner ends it"
        yield _problem(config, text, "messageIndexEnable", "true")
    elif not config.is_on("messageIndexSafe"):
        text = (
            "messageIndexSafe is false: when it was killed it finds only what stands in the last files of its commit"
            " log. What was published before is taken for missing then: tokens, transactional ids and groups whose last"
            " transaction is older do not go on, and repeats cannot be told from messages"
        )
        yield _problem(config, text, "messageIndexSafe", "true")
    if config.is_on("indexRocksDBEnable"):
        yield _warning(
            config,
            "indexRocksDBEnable is true: looking messages up in that index was not tested",
            "use the index as brokers come with it",
        )


def _check_intervals(config: BrokerConfig) -> Iterator[Advice]:
    """Yield advice about the timing of check-backs.

    A broker sends another check-back for an ended half if it has not written the op message yet. A resolver that
    commits without a look-up then publishes the message twice.
    """
    least = max(2 * config.op_message_interval, _YOUNGEST_SECONDS)
    if config.transaction_timeout < least:
        yield _problem(
            config,
            f"it asks about halves that are {config.transaction_timeout:g} s old (transactionTimeOut), and notes what"
            f" has ended every {config.op_message_interval:g} s (transactionOpBatchInterval): healthy transactions are"
            " asked about again, copied at each look, and doubled by checkers that do not look first",
            "transactionTimeOut",
            f"{least * 1000:.0f}",
        )
    if config.check_interval < config.op_message_interval:
        yield _problem(
            config,
            f"it looks for open halves every {config.check_interval:g} s (transactionCheckInterval), and notes their"
            f" ends only every {config.op_message_interval:g} s (transactionOpBatchInterval): what was answered is"
            " asked again",
            "transactionCheckInterval",
            f"{config.op_message_interval * 1000:.0f}",
        )
    noted = config.number("transactionOpMsgMaxSize", 4_096)
    if noted < _LEAST_NOTE_BYTES:
        yield _warning(
            config,
            f"it notes few ends at a time (transactionOpMsgMaxSize is {noted}): one thread of the broker writes the"
            " notes, and where halves are ended faster than that for long, each end waits 0.1 s for a place among"
            " 20,000; then a broker ends 120 halves a second instead of thousands",
            _HOW.format(key="transactionOpMsgMaxSize", value="4096"),
        )


def _check_patience(config: BrokerConfig, settings: RocketMQSettings) -> Iterator[Advice]:
    asked = (
        f"it asks {config.check_max} times (transactionCheckMax), every {config.check_interval:g} s: after"
        f" {config.discarded_after:g} s a half is discarded"
    )
    value = f"{_OUTAGE_SECONDS / max(config.check_interval, 0.001):.0f}"
    longest = settings.timeout + (settings.hold or 0)
    if longest > config.longest_transaction:
        yield _problem(
            config,
            f"{asked}, first when it is {config.transaction_timeout:g} s old (transactionTimeOut). A transaction here"
            f" may take {longest:g} s (timeout and hold): it can be discarded before anybody is asked what became"
            " of it",
            "transactionCheckMax",
            value,
        )
    elif config.discarded_after < _OUTAGE_SECONDS and config.half_topic == ROCKSDB_HALF_TOPIC:
        yield Advice(
            "problem",
            f"broker {config.name}",
            f"{asked}, also while nobody is there to be asked. Of one in RocksDB nothing tells then: what its owner had"
            " decided and did not come to publish stays unpublished, unless its transactional id is opened again",
            f"{_HOW.format(key='transactionCheckMax', value=value)}. A broker that is restarted with that asks again"
            " about what it has given up",
        )
    elif config.discarded_after < _OUTAGE_SECONDS:
        yield _warning(
            config,
            f"{asked}, also while nobody is there to be asked; then only its token, or an administrator, ends it",
            _HOW.format(key="transactionCheckMax", value=value),
        )


def _check_retention(config: BrokerConfig, settings: RocketMQSettings) -> Iterator[Advice]:
    kept = f"records are kept for {config.retention / 3600:g} h (fileReservedTime)"
    if config.retention <= config.discarded_after:
        yield _problem(
            config,
            f"{kept}, and an open half is for {config.discarded_after / 3600:g} h: it can outlive the record that"
            " decided it, and then nobody may end it any more",
            "fileReservedTime",
            f"{config.discarded_after / 3600 + 24:.0f}",
        )
    if config.retention <= settings.timeout + (settings.hold or 0) + _SKEW_SECONDS:
        yield _problem(
            config,
            f"{kept}, and a transaction here may wait for {settings.timeout + (settings.hold or 0):g} s (timeout and"
            " hold): the decision log would lose it before",
            "fileReservedTime",
            "72",
        )
    elif config.retention < _KEPT_SECONDS:
        yield _warning(
            config, f"{kept}: {_STOP}", "keep them for 72 h at least, or put the log elsewhere (decision_log=)"
        )
    else:
        yield Advice("ok", f"broker {config.name}", f"{kept}: {_STOP}")


_STOP = (
    "when no bridge of an application runs for longer than that, the openings and positions in its decision log are"
    " gone, and it has to say so instead of going on"
)


def _check_copies(config: BrokerConfig) -> Iterator[Advice]:
    if config.values.get("flushDiskType") == "ASYNC_FLUSH":
        yield _warning(
            config,
            "flushDiskType is ASYNC_FLUSH: what was committed survives kill -9, but its last moments no loss of power",
            "SYNC_FLUSH where that matters",
        )
    if config.values.get("brokerRole") == "ASYNC_MASTER":
        yield _warning(
            config,
            "brokerRole is ASYNC_MASTER: the last moments are lost with its disk, and a replica that takes over may"
            " lack decisions",
            "SYNC_MASTER with a replica, for the broker with our own topics at least",
        )


def check_places(cluster: RocketMQCluster, topics: Iterable[str], deadline: Deadline) -> Iterator[Advice]:
    """Yield advice about topics that are spread over several brokers."""
    for name in topics:
        route = route_of(cluster.client, name, deadline)
        brokers = sorted({queue.broker for queue in route.readable + route.writable}) if route else []
        if len(brokers) > 1:
            yield Advice(
                "warning",
                f"topic {name}",
                f"is on the brokers {', '.join(brokers)}, and is neither read nor written here",
                "use a topic on one broker",
            )


def check_disk(broker: str, full: float) -> Iterator[Advice]:
    """Yield advice about a broker's disk. `full` is the used share, from 0 to 1."""
    if full >= _NEARLY_FULL:
        yield Advice(
            "problem" if full >= _DROPS else "warning",
            f"broker {broker}",
            f"its disk is filled to {full:.0%}: beyond {_DROPS:.0%} it drops records whatever their age, those of"
            " decision logs among them, and beyond 90% it takes no messages",
            "make room; halves that nobody ends fill a disk, too, because each look writes them again",
        )


def check_open(transactions: Iterable[OpenTransaction], settings: RocketMQSettings) -> Iterator[Advice]:
    """Yield advice about transactions that no process ends."""
    parked: Counter[str] = Counter()
    for listed in transactions:
        named = settings.group_of_halves(listed.owner)
        if named is not None and listed.state == "discarded" and listed.token is not None:
            parked[named[1]] += 1
        else:
            yield from _check_transaction(listed, named)
    for group, count in parked.items():
        yield Advice(
            "problem",
            f"half messages of {group}",
            f"{count} are parked: nobody answered for them, and with age (fileReservedTime) the broker drops them",
            f"txnbridge resolver parked --group {shlex.quote(group)}",
        )


def _check_transaction(listed: OpenTransaction, named: _Named) -> Iterator[Advice]:
    """Yield advice about one transaction. `named` has application (if known) and group of a half message."""
    now = time.time() * 1000
    if listed.state == "discarded":
        yield Advice(
            "problem",
            f"transaction {listed.transaction}",
            f"of {listed.owner}: the broker has given up {listed.messages} halves of it, and asks nobody any more",
            f"txnbridge transactions repair {shlex.quote(listed.transaction)} --yes --reason TEXT lets it ask again;"
            " commit or abort instead of repair ends it",
        )
    elif listed.state == "lost":
        yield Advice(
            "problem",
            f"transaction {listed.transaction}",
            f"of {listed.owner}: the records that would tell what became of it are gone, so nobody may end it",
            "keep records for longer (fileReservedTime), or the log elsewhere (decision_log=)",
        )
    elif listed.state == "ending" or now > (listed.expires_at or now) + _LATE_SECONDS * 1000:
        yield Advice(
            "warning",
            f"transaction {listed.transaction}",
            f"of {listed.owner} is {listed.state}, and nobody ends it: {_nobody(named)} is there to be asked. Its"
            " halves are written again at each look",
            f"{_asked(listed.owner, named)}, or end it with txnbridge transactions",
        )


def _nobody(named: _Named) -> str:
    return "no bridge of that application" if named is None else f"no resolver of the half messages of {named[1]}"


def _asked(owner: str, named: _Named) -> str:
    if named is None:
        return f"open a bridge with application={owner!r}"
    application, group = named
    config = "" if application is None else f" --application {shlex.quote(application)}"
    return f"txnbridge resolver run --group {shlex.quote(group)}{config} --check MODULE:FUNCTION"


def _problem(config: BrokerConfig, text: str, key: str, value: str) -> Advice:
    return Advice("problem", f"broker {config.name}", text, _HOW.format(key=key, value=value))


def _warning(config: BrokerConfig, text: str, remedy: str) -> Advice:
    return Advice("warning", f"broker {config.name}", text, remedy)
