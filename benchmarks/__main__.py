"""All benchmarks, one after another: about a quarter of an hour."""

from __future__ import annotations

from importlib import import_module

from benchmarks._harness import machine, opened, parse

NAMES = ("send", "imports", "write", "read", "commit", "writers", "wakeup", "memory", "large_file")
NAMES += ("kafka_write", "kafka_read", "kafka_token", "kafka_process")  # these start a broker


def main() -> None:
    with opened(parse(description=__doc__)) as settings:
        print(machine(settings.folder))
        for name in NAMES:
            import_module(f"benchmarks.{name}").measure(settings)


if __name__ == "__main__":
    main()
