"""The file: `files` checks the path, `schema` has the tables, `store` opens it and gives writers their turn, and
`change_notification` waits for commits of others.
"""
