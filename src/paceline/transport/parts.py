"""How many fields a message has, counted before it is decoded: an empty part takes two bytes on the wire and seventy in memory.

Only the outermost fields are looked at; what is inside of them is bounded where it is opened.
"""

from __future__ import annotations

from paceline.core.errors import MalformedMessage, MessageTooLarge

_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5


def check_parts(data: bytes, most: int) -> None:
    """Raise unless these bytes are at most `most` fields.

    Raises:
        MessageTooLarge: there are more.
        MalformedMessage: they are no message.
    """
    at, count = 0, 0
    while at < len(data):
        count += 1
        if count > most:
            raise MessageTooLarge(f"A message has more than {most} parts")
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(data, at)
        elif kind == _LEN:
            size, at = _varint(data, at)
            at += size
        elif kind == _I64:
            at += 8
        elif kind == _I32:
            at += 4
        else:
            raise MalformedMessage("A message can't be read")
    if at != len(data):
        raise MalformedMessage("A message can't be read: it ends early")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number and where the next thing begins."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise MalformedMessage("A message can't be read: it ends early")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise MalformedMessage("A message can't be read")
