"""Benchmarks of txnbridge, each beside a yardstick that is measured in the same run.

`python -m benchmarks` runs all, `python -m benchmarks.write` one; `--help` lists what can be set. Nothing here is
installed or imported by the package. docs/performance.md has the results.
"""
