"""What comes into the file: by `writer` in transactions, by `publisher` without, both through `outgoing`; and what
`retention` removes of it again.
"""
