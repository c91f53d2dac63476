"""Measure a question on a broker, each contender in turn.

Without arguments, list the questions and the brokers that each takes. `all` measures each question: on one broker
(half an hour for Kafka), or on all (about an hour and a quarter).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

from benchmarks._harness import machine, make_parser, opened

# The questions that each broker takes, and those about no broker. Those about a database start PostgreSQL as well,
# and Spark's start Spark.
BROKERS = {
    "none": "overhead checker",
    "embedded": "write read commit group_commit aio memory processes large_file telemetry spans "
    "growth_partitions growth_transactions growth_bridges growth_log day",
    "kafka": "write read process waiting group_commit aio half_messages small tokens telemetry outbox processor_db "
    "spark_write spark_read spark_recover spans copy mirror day "
    "growth_partitions growth_transactions growth_bridges growth_log",
    "pulsar": "write read process commit group_commit half_messages memory spark_write spans copy day "
    "growth_partitions growth_transactions growth_bridges",
    "rocketmq": "write read group_commit recover day growth_partitions growth_transactions growth_bridges",
}
# The questions of each module that does not have only the one of its name. A question is a function of its module.
MODULES = {
    "copying": "copy mirror",
    "databases": "outbox processor_db",
    "growth": "growth_partitions growth_transactions growth_bridges growth_log",
    "overhead": "overhead telemetry",
    "process": "process small waiting",
    "recovery": "tokens recover",
    "small_transactions": "commit group_commit aio",
    "spark": "spark_write spark_read spark_recover",
}
PAIRS = [(question, broker) for broker, questions in BROKERS.items() for question in questions.split()]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("question", nargs="?", help="a question, or all")
    parser.add_argument("broker", nargs="?", help="may be left out if the question takes only one")
    options = parser.parse_args(arguments)
    if options.question is None:
        for question in questions():
            print(f"{question:20}{' '.join(broker for name, broker in PAIRS if name == question)}")
        return
    pairs = chosen(options, parser)
    with opened(options) as settings:
        print(machine(settings.folder))
        for question, broker in pairs:
            getattr(import_module(f"benchmarks.{module_of(question)}"), question)(settings, broker)


def module_of(question: str) -> str:
    return next((name for name, questions in MODULES.items() if question in questions.split()), question)


def questions() -> list[str]:
    return list(dict.fromkeys(question for question, _ in PAIRS))


def chosen(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """Return the pairs of question and broker to measure. End the program if the options name no such pair."""
    question, broker = options.question, options.broker
    pairs = [pair for pair in PAIRS if question in (pair[0], "all")]
    brokers = list(dict.fromkeys(one for _, one in pairs))
    if not pairs:
        parser.error(f"there is no question {question!r}; the questions are: all {' '.join(questions())}")
    if broker is not None and broker not in brokers:
        parser.error(f"{question} does not take {broker!r}, but: {' '.join(brokers)}")
    if broker is None and question != "all" and len(brokers) > 1:
        parser.error(f"{question} needs a broker: {' '.join(brokers)}")
    return [pair for pair in pairs if broker in (pair[1], None)]


if __name__ == "__main__":
    main()
