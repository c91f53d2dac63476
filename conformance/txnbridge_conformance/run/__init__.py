"""A conformance run: processes work on a broker while faults are injected, and the checker judges their histories.

- `plan`: what a run creates at the broker, and which processes take part.
- `program`: one process. Its `client`, which records each call in a history, does the work of a role (`workloads`,
  `sales`).
- `hunt`: starts the `processes`, injects `faults`, ends what is left open, and reads everything back, also by the
  broker's `official` client.
- `verdict`: the judgement of a history: kept, broken, or too thin to say.
"""
