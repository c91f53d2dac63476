"""A client of RocketMQ's remoting protocol, which brokers and name servers speak on their own ports.

The client knows nothing of bridges (only `retry` does) and needs nothing but Python. It exposes the protocol's details:
the addresses of half messages, response codes, and whether a failed request may have had effect. The functions of
`send_requests`, `read_requests`, `groups`, `administration` and `routes` make requests; a `RemotingClient` sends them:

    with RemotingClient(["127.0.0.1:9876"]) as client:
        route = client.route("orders", timeout=5)
        queue = route.writable[0]
        request = send_half(WireMessage("orders", b"hello"), "shop", queue.queue)
        result = client.call(queue.broker, request, timeout=5)
        client.call(queue.broker, end(half_handle("orders", "shop", result), HalfEnd.COMMIT), timeout=5)
"""
