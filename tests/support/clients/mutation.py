"""Nearly valid inputs: mutations of JSON values, protobuf messages and bytes."""

import random
import struct
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

TEXTS = (
    *(
        "",
        "x",
        "user",
        "assistant",
        "stop",
        "\x00",
        "\r\n\r\n",
        "data: [DONE]\n\n",
        "🙂",
        "e\u0301",
    ),
    *("\u202e", "\ud7ff", "{{ messages }}", "<|im_end|>", "NaN", "null", "-1", "../../etc/passwd"),
    "long " * 50,
    "ü" * 300,
)
NUMBERS = (
    *(0, 1, -1, 2, 7, 16, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63),
    *(-(2**31), -(2**63), 10**400, 0.0, -0.0, 0.5, 1.0, 1e-300, 1e308, 3.4e38),
)
_NOT_JSON = (float("nan"), float("inf"), float("-inf"))


def json_value(rng: random.Random, depth: int = 3) -> Any:
    """A random JSON value; some hold NaN or infinity, which JSON does not allow."""
    kind = rng.randrange(9 if depth else 6)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind in (1, 2):
        return rng.choice(NUMBERS)
    if kind in (3, 4):
        return rng.choice(TEXTS)
    if kind == 5:
        return rng.choice(_NOT_JSON) if rng.random() < 0.2 else rng.randrange(-5, 400)
    size = rng.randrange(4)
    if kind == 6:
        return {rng.choice(TEXTS): json_value(rng, depth - 1) for _ in range(size)}
    return [json_value(rng, depth - 1) for _ in range(size)]


def mutated_json(rng: random.Random, value: Any, extra_fields: list[str]) -> Any:
    """A value with one place changed."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        value = dict(value)
        action = rng.random()
        if action < 0.3 and extra_fields:
            value[rng.choice(extra_fields)] = json_value(rng)
        elif action < 0.4:
            del value[rng.choice(list(value))]
        else:
            key = rng.choice(list(value))
            value[key] = mutated_json(rng, value[key], extra_fields)
        return value
    if isinstance(value, list) and value and rng.random() < 0.7:
        value = list(value)
        place = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value * rng.choice((0, 2, 3))
        value[place] = mutated_json(rng, value[place], extra_fields)
        return value
    return json_value(rng)


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """Bytes with a few places changed, cut, doubled or inserted."""
    mutable = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(mutable) + 1)
        action = rng.randrange(5)
        if action == 0:
            mutable[place:place] = rng.randbytes(rng.randint(1, 8))
        elif action == 1:
            del mutable[place : place + rng.randint(1, 8)]
        elif action == 2 and place < len(mutable):
            mutable[place] ^= 1 << rng.randrange(8)
        elif action == 3:
            mutable[place:place] = mutable[place : place + rng.randint(1, 32)]
        else:
            mutable[place : place + 4] = struct.pack("<i", rng.choice((-1, 0, 2**31 - 1)))
    return bytes(mutable)


def fill(rng: random.Random, message: Message, depth: int = 5, rate: float = 0.4) -> Message:
    """Sets each field of a message with probability `rate` to a random value of its type."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() > rate:
            continue
        nested = field.type == FieldDescriptor.TYPE_MESSAGE
        if nested and depth == 0:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entries = getattr(message, field.name)
            key, value = field.message_type.fields
            for _ in range(rng.randrange(3)):
                if value.type == FieldDescriptor.TYPE_MESSAGE:
                    fill(rng, entries[_scalar(rng, key)], depth - 1, rate)
                else:
                    entries[_scalar(rng, key)] = _scalar(rng, value)
        elif field.is_repeated:
            target = getattr(message, field.name)
            for _ in range(rng.randrange(4)):
                if nested:
                    fill(rng, target.add(), depth - 1, rate)
                else:
                    target.append(_scalar(rng, field))
        elif nested:
            getattr(message, field.name).SetInParent()
            fill(rng, getattr(message, field.name), depth - 1, rate)
        else:
            setattr(message, field.name, _scalar(rng, field))
    return message


def _scalar(rng: random.Random, field: FieldDescriptor) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.randrange(6)
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice((0.0, 0.5, 1.0, 2.0, -1.0, 1e30, *_NOT_JSON))
    if kind == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            small = [rng.choice((0, 1, 2, 3, 5, 40, 600, -1)) for _ in range(rng.randrange(5))]
            packed = struct.pack(f"<{len(small)}i", *small)
            return packed if rng.random() < 0.9 else packed + b"x"
        return rng.choice(TEXTS)
    low, high = {
        FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
        FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
        FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
        FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    }[kind]
    return rng.choice((max(low, -1), 0, 1, 2, 5, 16, 100, 600, low, high))
