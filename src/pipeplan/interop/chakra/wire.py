"""The bytes of a Chakra execution trace: Protocol Buffers' wire format of its three messages, written and read back.

A file is a ``GlobalMetadata`` and then one ``Node`` after another, each behind its length (``schema/protobuf/
et_def.proto`` of MLCommons Chakra, schema 1.0.0). It takes no library: the format is numbers of variable length, and
generated code would bind users to one release of protobuf.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from pipeplan.errors import FileError

VERSION = "1.0.0"
"""Of the schema, which every file says."""

_VARINT, _BYTES = 0, 2
"""Wire types: a number, and what stands behind its length."""

_TYPES = {"is_cpu_op": 27, "comm_size": 9, "comm_src": 7, "comm_dst": 7, "comm_tag": 7, "comm_type": 9, "pg_name": 29}
"""{attribute: field of its value}: bool 27, int64 9, int32 7, string 29, as ASTRA-sim reads them."""

_TEXT = 29


class NodeType(IntEnum):
    """What a node is."""

    COMPUTE = 4
    SEND = 5
    RECEIVE = 6
    COLLECTIVE = 7


class CollectiveType(IntEnum):
    """What a collective does, in the attribute ``comm_type``."""

    ALL_REDUCE = 0
    ALL_GATHER = 2
    REDUCE_SCATTER = 7


Value = int | bool | str


@dataclass(frozen=True, slots=True)
class TraceNode:
    """A node of a rank's trace: it starts when those before it, by their ids, have ended."""

    id: int
    name: str
    type: NodeType
    control: tuple[int, ...] = ()
    data: tuple[int, ...] = ()
    micros: int = 0
    attributes: tuple[tuple[str, Value], ...] = ()

    def attribute(self, name: str) -> Value | None:
        """The value of one; None if it has none of this name."""
        return next((value for key, value in self.attributes if key == name), None)


def trace_bytes(nodes: Iterable[TraceNode], about: Iterable[tuple[str, str]] = ()) -> bytes:
    """The file of a rank; ``about`` are texts that its metadata has by name."""
    found = bytearray()
    _add_message(found, _text(1, VERSION) + b"".join(_message(2, _text(1, k) + _text(_TEXT, v)) for k, v in about))
    for node in nodes:
        _add_message(found, _node(node))
    return bytes(found)


def _node(node: TraceNode) -> bytes:
    parts = [_number(1, node.id), _text(2, node.name), _number(3, node.type)]
    parts += [_message(field, b"".join(map(_varint, ids))) for field, ids in ((4, node.control), (5, node.data)) if ids]
    if node.micros:
        parts.append(_number(7, node.micros))
    for name, value in node.attributes:
        content = _text(_TYPES[name], value) if isinstance(value, str) else _number(_TYPES[name], value)
        parts.append(_message(10, _text(1, name) + content))
    return b"".join(parts)


def _add_message(found: bytearray, message: bytes) -> None:
    found += _varint(len(message))
    found += message


def _varint(number: int) -> bytes:
    if number < 0x80:
        return bytes((number,))
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def _number(field: int, number: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(number)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())


# Read back ----------------------------------------------------------------------------------------------------------


def read_nodes(content: bytes) -> list[TraceNode]:
    """The nodes of a rank's file as :func:`trace_bytes` writes it.

    Raises:
        FileError: it is of another version, or no such file.
    """
    try:
        messages = [*_messages(content)]
        texts = (value for field, value in _fields(messages[0]) if field == 1)
        version = "".join(value.decode() for value in texts if isinstance(value, bytes))
        if version != VERSION:
            raise FileError(f"the trace is of Chakra's schema {version or 'without a version'}, not {VERSION}")
        return [_read_node(message) for message in messages[1:]]
    except (IndexError, KeyError, ValueError) as error:
        raise FileError(f"no Chakra execution trace of schema {VERSION}: {error}") from None


def _read_node(message: bytes) -> TraceNode:
    numbers, name = {1: 0, 3: 0, 7: 0}, ""
    ids: dict[int, list[int]] = {4: [], 5: []}
    attributes = []
    for field, value in _fields(message):
        if isinstance(value, int):
            numbers[field] = value
        elif field == 2:
            name = value.decode()
        elif field in ids:
            ids[field] += _packed(value)
        elif field == 10:
            attributes.append(_read_attribute(value))
    return TraceNode(numbers[1], name, NodeType(numbers[3]), (*ids[4],), (*ids[5],), numbers[7], (*attributes,))


def _read_attribute(message: bytes) -> tuple[str, Value]:
    found = dict(_fields(message))
    name = found[1]
    assert isinstance(name, bytes)
    key = name.decode()
    value = found[_TYPES[key]]
    if isinstance(value, bytes):
        return key, value.decode()
    return key, bool(value) if key == "is_cpu_op" else value


def _messages(content: bytes) -> Iterator[bytes]:
    place = 0
    while place < len(content):
        length, place = _read_varint(content, place)
        if place + length > len(content):
            raise ValueError("it ends inside of a message")
        yield content[place : place + length]
        place += length


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field, value) of what a message has; only numbers, and what has a length, stand in these."""
    place = 0
    while place < len(message):
        key, place = _read_varint(message, place)
        value, place = _read_varint(message, place)
        if key & 7 == _VARINT:
            yield key >> 3, value
        elif key & 7 == _BYTES:
            yield key >> 3, message[place : place + value]
            place += value
        else:
            raise ValueError(f"field {key >> 3} has wire type {key & 7}")


def _packed(content: bytes) -> Sequence[int]:
    found, place = list[int](), 0
    while place < len(content):
        number, place = _read_varint(content, place)
        found.append(number)
    return found


def _read_varint(content: bytes, place: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = content[place]
        number |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return number, place
