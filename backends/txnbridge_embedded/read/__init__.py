"""Readers: `reader` opens one. `ungrouped`, `ordered` and `shared` are the three kinds of readers, `base_reader` has
the base class of all, and `grouped` the base class of the members of groups.
"""
