"""The file. `files` says whether a path can be one, `schema` what is in it; `store` opens it and knows whose turn it is
to write. `wake` waits for others' commits.
"""
