"""Conversion between a frozen dataclass and a message, by a table of the fields that need one.

Law: a field with the same name on both sides needs no entry. A field that the table misses, on either side, raises ValueError where the table is
made, so a field that is added to one side alone is found at once. `read` converts, and `check` checks a value against its bounds. `read_checked`
does both and raises only the table's own error: it is for data from another node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar

from google.protobuf.message import Message

from paceline.core.errors import PacelineError
from paceline.core.generation import Range
from paceline.core.model import LayerRange
from paceline.core.text import printable

V = TypeVar("V")
M = TypeVar("M", bound=Message)

RefuseField = Callable[[str, str], PacelineError]
"""Function that makes an error from a text and the name of the field it is about."""
MOST_MS: Final = (1 << 32) - 1


def split_bytes(data: bytes, size: int) -> tuple[bytes, ...]:
    """Split joined pieces of `size` bytes. The last piece has the rest."""
    return tuple(data[at : at + size] for at in range(0, len(data), size))


@dataclass(frozen=True, slots=True)
class Length:
    """Bound on the length of a text, of bytes or of a tuple. `each` checks every element."""

    least: int
    most: int
    each: Callable[[Any], bool] | None = None

    def holds(self, value: Sequence[Any]) -> bool:
        return self.least <= len(value) <= self.most and (self.each is None or all(map(self.each, value)))


Bound = Range | Length | Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Mapped:
    """The conversion of one field of a dataclass to a message and back.

    Args:
        name: name of the field in the message, if it differs. With several names, `write` returns as many values and `read` takes them.
        bound: of the dataclass's value. None as a value is always valid, and left out of the message.
        write, read: convert a value to the message's form and back; None: the value stays as it is.
        codec: for a field that is another message, or a tuple of them.
        always: read the field even if it is absent; otherwise an absent optional field is read as None.
        called: name of the field in refusals, where its own name says less.
    """

    name: str | tuple[str, ...] = ""
    bound: Bound | None = None
    write: Callable[[Any], Any] | None = None
    read: Callable[..., Any] | None = None
    codec: Codec[Any, Any] | None = None
    always: bool = False
    called: str = ""


class Codec(Generic[V, M]):
    """Codec between one dataclass and one message.

    Args:
        kind: the dataclass.
        message: the message.
        refuse: makes the error for a value out of its bounds.
        fields: entries for fields that need one; a name, a bound or a codec alone stands for a `Mapped` with nothing else.
        bounds: bounds by the name of a type, for all its fields without a bound of their own.
        also: returns what is wrong between fields; empty if nothing is.
        given: fields of the dataclass that the caller of `read` passes, unless they have a default. The message has only those of them that `fields`
            names.
        beside: fields of the message that the dataclass does not have: the caller of `write` passes them.
    """

    def __init__(
        self,
        kind: type[V],
        message: type[M],
        refuse: RefuseField,
        fields: Mapping[str, Mapped | Bound | Codec[Any, Any] | str] = MappingProxyType({}),
        *,
        bounds: Mapping[str, Bound] | None = None,
        also: Callable[[V], str] | None = None,
        given: Collection[str] = (),
        beside: Iterable[str] = (),
    ) -> None:
        self._kind, self._message, self._refuse, self._also = kind, message, refuse, also
        there = dict(message.DESCRIPTOR.fields_by_name)
        types = {field.name: str(field.type) for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        table = {attr: _mapped(fields.get(attr, "")) for attr in types if attr in fields or attr not in given}
        names = {attr: mapped.name if isinstance(mapped.name, tuple) else (mapped.name or attr,) for attr, mapped in table.items()}
        if wrong := ({name for several in names.values() for name in several} | set(beside)) ^ there.keys() | fields.keys() - types.keys():
            raise ValueError(f"{kind.__name__} and {message.DESCRIPTOR.name} don't fit together: {sorted(wrong)}")
        plain: dict[str, str] = {}
        self._writes: list[tuple[str, str | tuple[str, ...], Callable[[Any], Any]]] = []
        self._reads: list[tuple[str, str | tuple[str, ...], bool, Callable[..., Any]]] = []
        checks: dict[str, tuple[str, Bound | None, Codec[Any, Any] | None, bool]] = {}
        for attr, mapped in table.items():
            first, several, codec = there[names[attr][0]], isinstance(mapped.name, tuple), mapped.codec
            write, read = mapped.write, mapped.read or (tuple if first.is_repeated and codec is None else None)
            if codec is not None:
                write = write or (codec.write_all if first.is_repeated else codec.write)
                read = read or (codec.read_all if first.is_repeated else codec.read)
            bound = mapped.bound or (bounds or {}).get(types[attr])
            if bound is not None or codec is not None:
                checks[attr] = (mapped.called or attr, bound, codec, first.is_repeated)
            presence = first.has_presence and not mapped.always and not several
            if write is None and read is None and not presence and attr not in given:
                plain[attr] = names[attr][0]
                continue
            self._writes.append((attr, mapped.name or attr, write or _same))
            if attr not in given:
                self._reads.append((attr, mapped.name or attr, presence, read or _same))
        self._attrs, self._names, self._checks = tuple(plain), tuple(plain.values()), tuple(checks.values())
        self._get_attrs, self._get_names, self._get_checked = _getter(plain), _getter(plain.values()), _getter(checks)

    def write(self, value: V, /, **beside: Any) -> M:
        said: dict[str, Any] = dict(zip(self._names, self._get_attrs(value), strict=True))
        for attr, name, write in self._writes:
            got = getattr(value, attr)
            if got is not None and isinstance(name, str):
                said[name] = write(got)
            elif got is not None:
                said.update(zip(name, write(got), strict=True))
        return self._message(**said, **beside)

    def read(self, message: M, /, **given: Any) -> V:
        """Convert a message to the dataclass, without checking bounds.

        Raises:
            ValueError: the message has a value that the dataclass can't hold.
        """
        values: dict[str, Any] = dict(zip(self._attrs, self._get_names(message), strict=True))
        for attr, name, presence, read in self._reads:
            if isinstance(name, str):
                values[attr] = None if presence and not message.HasField(name) else read(getattr(message, name))
            else:
                values[attr] = read(*[getattr(message, one) for one in name])
        return self._kind(**values, **given)

    def write_all(self, values: Iterable[V]) -> list[M]:
        return [self.write(value) for value in values]

    def read_all(self, messages: Iterable[M]) -> tuple[V, ...]:
        return tuple([self.read(message) for message in messages])

    def read_checked(self, message: M, /, what: str, **given: Any) -> V:
        """Convert another node's message to the dataclass, and check it.

        Args:
            what: names the message in the error.

        Raises:
            PacelineError: made by `refuse`, for a value out of its bounds.
        """
        try:
            value = self.read(message, **given)
        except ValueError as error:
            raise self._refuse(f"{what}: {printable(str(error))}", "") from error
        self.check(value, what)
        return value

    def check(self, value: V, what: str, refuse: RefuseField | None = None) -> None:
        """Check a value against its bounds.

        Args:
            what: names the value in the error.
            refuse: makes the error in place of the codec's own.

        Raises:
            PacelineError: made by `refuse`.
        """
        refuse = refuse or self._refuse
        for (called, bound, codec, repeated), got in zip(self._checks, self._get_checked(value), strict=True):
            if got is None:
                continue
            if bound is not None and not (bound(got) if callable(bound) else bound.holds(got)):
                raise refuse(f"{what}: {called} {_complaint(bound, got)}", called)
            if codec is not None:
                for one in got if repeated else (got,):
                    codec.check(one, f"{what}, {called}", refuse)
        if self._also is not None and (wrong := self._also(value)):
            raise refuse(f"{what}: {wrong}", "")


class Columns(Generic[V, M]):
    """Codec between rows (dataclasses or named tuples) and one message that holds their columns. A column's `write` and `read` take the whole column.

    Args:
        columns: by the row's fields, in their order.
    """

    def __init__(self, kind: Callable[..., V], message: type[M], refuse: RefuseField, /, **columns: Mapped) -> None:
        self._kind, self._message, self._refuse = kind, message, refuse
        self._columns = [(str(column.name), column.write or list, column.read or _same) for column in columns.values()]
        self._row = _getter(columns)

    def write(self, rows: Iterable[V]) -> M:
        columns = zip(*map(self._row, rows), strict=True)
        return self._message(**{name: write(column) for (name, write, _), column in zip(self._columns, columns, strict=False)})

    def read(self, message: M) -> tuple[V, ...]:
        """Convert the columns to rows.

        Raises:
            PacelineError: made by `refuse`: the columns differ in length.
        """
        try:
            rows = zip(*(read(getattr(message, name)) for name, _, read in self._columns), strict=True)
            return tuple([self._kind(*row) for row in rows])
        except ValueError as error:
            raise self._refuse(f"The columns of {self._message.DESCRIPTOR.name} differ in length", "") from error


def refuse_with(kind: type[PacelineError]) -> RefuseField:
    """Return a `RefuseField` that makes errors of one kind and ignores the field."""
    return lambda text, _: kind(text)


def or_none(bound: Bound | None = None, name: str = "") -> Mapped:
    """Map None of the dataclass to an empty text or 0 in the message."""
    return Mapped(name, bound, None, lambda got: got or None)


def milliseconds(name: str, bound: Bound | None = None) -> Mapped:
    """Map seconds to whole milliseconds of 32 bits."""
    return Mapped(name, bound, to_ms, from_ms)


def to_ms(seconds: float) -> int:
    return min(MOST_MS, max(0, round(seconds * 1000)))


def from_ms(ms: int) -> float:
    return ms / 1000


def layer_span(bound: Bound | None = None) -> Mapped:
    """Map a layer range to two fields: its first layer, and the layer after its last."""
    return Mapped(("first_layer", "stop_layer"), bound, lambda layers: (layers.start, layers.stop), LayerRange)


def _mapped(entry: Mapped | Bound | Codec[Any, Any] | str) -> Mapped:
    match entry:
        case Mapped():
            return entry
        case str():
            return Mapped(entry)
        case Codec():
            return Mapped(codec=entry)
        case _:
            return Mapped(bound=entry)


def _complaint(bound: Bound, got: Any) -> str:
    match bound:
        case Range():
            return f"is {got}, and {bound} is taken"
        case Length(least, most) if not least <= len(got) <= most:
            return f"has a length of {len(got)}, and {least} to {most} is taken"
        case _:
            return f"can't be {printable(repr(got), 80)}"


def _same(value: Any) -> Any:
    return value


def _getter(names: Collection[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that reads the attributes of these names, always as a tuple."""
    match [*names]:
        case []:
            return lambda _: ()
        case [name]:
            return lambda value: (getattr(value, name),)
        case several:
            return attrgetter(*several)
