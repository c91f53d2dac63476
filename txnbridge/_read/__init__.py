"""Reading committed messages, in a group or without one.

- `consumer` is the interface for programs.
- `deliveries` keeps the state of each delivered message: out (the program has it), held (a transaction that has not
  ended acknowledges it), or back (it is to be delivered again).
- `open_consumers` closes a bridge's consumers with the bridge.
"""
