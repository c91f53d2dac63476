"""Processes that die or stop at a chosen event, and the programs that do.

`txnbridge.testing.Child` runs a function of one of these modules and kills or pauses it at an event;
`txnbridge.testing.crash_everywhere` walks it through all its events.
"""
