"""How transactions end: `endings` ends prepared ones and tells what became of any, by what its coordinator says.

What the coordinator has forgotten is in its own topic, which `history` reads. What it has ended and a partition was not
told of is found and told by `forgotten`; `watch` looks for it where this bridge is at work.
"""
