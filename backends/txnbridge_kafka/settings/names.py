"""The names of librdkafka's settings that a user may set: for producers, for consumers, and for every client.

A consumer logs warnings about producers' settings, and a producer about consumers'. A name that is not listed here is
passed to every client, and librdkafka accepts or refuses the name: a newer version may have more settings.
"""

from __future__ import annotations

_PRODUCER = """
    batch.num.messages batch.size compression.codec compression.level compression.type linger.ms
    queue.buffering.backpressure.threshold queue.buffering.max.kbytes queue.buffering.max.messages
    queue.buffering.max.ms request.timeout.ms sticky.partitioning.linger.ms
"""
_CONSUMER = """
    check.crcs coordinator.query.interval.ms fetch.error.backoff.ms fetch.max.bytes fetch.message.max.bytes
    fetch.min.bytes fetch.queue.backoff.ms fetch.wait.max.ms group.instance.id group.remote.assignor
    heartbeat.interval.ms max.partition.fetch.bytes max.poll.interval.ms queued.max.messages.kbytes
    queued.min.messages session.timeout.ms
"""
_COMMON = """
    api.version.fallback.ms api.version.request api.version.request.timeout.ms broker.address.family
    broker.address.ttl broker.version.fallback builtin.features client.dns.lookup client.id client.rack
    connections.max.idle.ms enable.metrics.push enable.random.seed enable.ssl.certificate.verification
    https.ca.location https.ca.pem internal.termination.signal message.copy.max.bytes message.max.bytes
    metadata.max.age.ms metadata.recovery.rebootstrap.trigger.ms metadata.recovery.strategy
    receive.message.max.bytes reconnect.backoff.jitter.ms reconnect.backoff.max.ms reconnect.backoff.ms
    retry.backoff.max.ms retry.backoff.ms sasl.mechanism sasl.oauthbearer.client.id sasl.oauthbearer.client.secret
    sasl.oauthbearer.extensions sasl.oauthbearer.method sasl.oauthbearer.scope sasl.oauthbearer.sub.claim.name
    sasl.oauthbearer.token.endpoint.url sasl.password sasl.username security.protocol socket.blocking.max.ms
    socket.connection.setup.timeout.ms socket.keepalive.enable socket.max.fails socket.nagle.disable
    socket.receive.buffer.bytes socket.send.buffer.bytes socket.timeout.ms ssl.ca.certificate.stores ssl.ca.location
    ssl.ca.pem ssl.certificate.location ssl.certificate.pem ssl.cipher.suites ssl.crl.location ssl.curves.list
    ssl.endpoint.identification.algorithm ssl.key.location ssl.key.password ssl.key.pem ssl.sigalgs.list
    topic.blacklist topic.metadata.propagation.max.ms topic.metadata.refresh.fast.cnt
    topic.metadata.refresh.fast.interval.ms topic.metadata.refresh.interval.ms topic.metadata.refresh.sparse
"""

PRODUCER = frozenset(_PRODUCER.split())
CONSUMER = frozenset(_CONSUMER.split())
COMMON = frozenset(_COMMON.split())
