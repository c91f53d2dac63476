"""Groups in the file: what they have acknowledged (`acks`), who is in them and has what (`members`), and where they
stand (`standing`).
"""
