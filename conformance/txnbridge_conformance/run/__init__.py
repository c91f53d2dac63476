"""A conformance run: processes work on a broker while faults are injected, and the checker judges their histories.

- `plan`: what a run creates at the broker, and which processes take part.
- `client`: the program of one process; it records each call in the process's history.
- `workloads`: what the processes do, by role.
- `hunt`: starts and attacks the processes, ends what they left open, and reads everything back.
- `verdict`: the judgement of a history: kept, broken, or too thin to say.
"""
