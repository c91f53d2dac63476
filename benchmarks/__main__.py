"""Runs all benchmarks, one after another. This takes about an hour and a quarter, half an hour of it for Kafka."""

from __future__ import annotations

from importlib import import_module

from benchmarks._harness import machine, make_parser, opened

NAMES: tuple[str, ...] = (
    "send",
    "imports",
    "write",
    "read",
    "commit",
    "group_commit",
    "writers",
    "wakeup",
    "memory",
    "large_file",
)
NAMES += ("checker", "aio")
NAMES += (
    "kafka_write",
    "kafka_java",
    "kafka_read",
    "kafka_token",
    "kafka_small",
    "kafka_group_commit",
    "kafka_aio",
    "kafka_process",
    "kafka_half_messages",
    "kafka_telemetry",
)  # these start Kafka
NAMES += ("pulsar_write", "pulsar_read", "pulsar_process", "pulsar_commit", "pulsar_memory", "pulsar_spark")
NAMES += ("pulsar_half_messages", "pulsar_group_commit")
NAMES += ("rocketmq_write", "rocketmq_small", "rocketmq_read", "rocketmq_recover")
NAMES += ("outbox", "processor_db")  # these start PostgreSQL and Kafka
NAMES += ("spark_write", "spark_read", "spark_recover")  # these start Kafka and Spark


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("begin", nargs="?", default="", help="run only those whose names begin with this, like kafka")
    options = parser.parse_args()
    names = [name for name in NAMES if name.startswith(options.begin)]
    if not names:
        parser.error(f"no benchmark begins with {options.begin!r}: {' '.join(NAMES)}")
    with opened(options) as settings:
        print(machine(settings.folder))
        for name in names:
            import_module(f"benchmarks.{name}").measure(settings)


if __name__ == "__main__":
    main()
