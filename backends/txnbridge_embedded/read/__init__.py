"""Readers: `reader` opens the one that is asked for. `polling` is what all of them do, `grouped` what those in a group
do; `alone`, `ordered` and `shared` are the three kinds.
"""
