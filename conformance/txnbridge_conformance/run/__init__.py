"""A conformance run: processes work on a broker while faults are injected, and the checker judges their histories.

- `plan`: what a run creates at the broker, and which processes take part. - `program`: one process. It does the work of
one role (`workloads`, `sales`) by a `client`, which records each call. - `hunt`: starts the `processes`, injects
`faults`, lets `settling` end open transactions, and reads all topics. The broker's own client (`official_readers`)
reads them, too; in a run through `raw` clients it also writes. - `verdict`: whether a history keeps the broker's
promises, breaks one, or tried too little to tell.
"""
