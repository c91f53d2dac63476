"""Readers: `reader` opens a reader. `base_reader` has the base class of all readers, `grouped` that of group members;
`ungrouped`, `ordered` and `shared` are the three kinds of readers.
"""
