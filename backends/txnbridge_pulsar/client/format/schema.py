"""The tables that the codec makes from `messages.proto`, the protocol's messages in proto2 notation."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib.resources import files


@dataclass(frozen=True)
class Field:
    """A field of a Protocol Buffers message. `type` is the name of a scalar type or of another message."""

    label: str
    type: str
    name: str
    number: int


@dataclass
class MessageType:
    """The schema of one Protocol Buffers message: its fields in order, by name and by number."""

    name: str
    fields: tuple[Field, ...]
    by_name: dict[str, Field] = field(init=False)
    by_number: dict[int, Field] = field(init=False)
    required: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.by_name = {f.name: f for f in self.fields}
        self.by_number = {f.number: f for f in self.fields}
        self.required = frozenset(f.name for f in self.fields if f.label == "required")


def _parse(text: str) -> dict[str, MessageType]:
    types = {}
    for name, body in re.findall(r"message (\w+) \{(.*?)\}", text, re.DOTALL):
        lines = re.findall(r"(required|optional|repeated) (\w+) (\w+) = (\d+);", body)
        fields = tuple(Field(label, type, field_name, int(number)) for label, type, field_name, number in lines)
        types[name] = MessageType(name, fields)
    return types


TYPES = _parse((files("txnbridge_pulsar.client.format") / "messages.proto").read_text("utf-8"))
# A command is one field of BaseCommand, whose number is also the command's type.
COMMANDS = {f.name: f.number for f in TYPES["BaseCommand"].fields if f.name != "type"}
