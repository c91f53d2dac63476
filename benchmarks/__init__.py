"""Benchmarks of txnbridge, each beside a yardstick that is measured in the same run.

`python -m benchmarks` lists the questions and the brokers that each takes, and `python -m benchmarks read kafka`
answers one. A question is a function of its name that takes the settings and the broker's name; its docstring or its
module's describes the yardsticks. Each broker has a module that starts it and has the contenders of other clients.
Nothing here is installed or imported by the package. docs/performance.md has the results.
"""
