"""Readers: `reader` opens one. `base_reader` is the base of all, `grouped` the base of those in a group; `ungrouped`,
`ordered` and `shared` are the three kinds.
"""
