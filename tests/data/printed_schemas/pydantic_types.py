"""Print the JSON schemas of 100 types of pydantic: `python pydantic_types.py > pydantic.json`.

The types stand in the order of pydantic's own pages: standard library types, `pydantic.types`, `pydantic.networks`, then models. Left out are types that
print no schema (`Callable`, `Type`, `Hashable`, a bare `Iterator`) and those that need another package (`EmailStr`).
"""

# pyright: basic
# ruff: noqa: F403, F405, PYI061, RUF012, T201
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import importlib.metadata
import ipaddress
import json
import pathlib
import re
import uuid
from typing import Annotated, Any, Literal, NamedTuple, Optional, Union

from pydantic import *
from pydantic import types
from typing_extensions import TypedDict


class Fruit(enum.StrEnum):
    PEAR = "pear"
    BANANA = "banana"


class Tool(enum.IntEnum):
    SPANNER = 1
    WRENCH = 2


class Plain(enum.Enum):
    A = "a"
    ONE = 1


class Point(NamedTuple):
    x: int
    y: int


class Movie(TypedDict):
    name: str
    year: int


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str | None = None


class Tree(BaseModel):
    value: int
    children: list["Tree"] = []


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]]


class Invoice(BaseModel):
    number: Annotated[str, Field(pattern=r"^INV-\d{4}$", examples=["INV-0001"])]
    total: decimal.Decimal
    due: dt.date
    lines: list[tuple[str, int]]
    notes: dict[str, str] = {}


@dataclasses.dataclass
class Item:
    name: str
    price: float = 0.0


D = decimal.Decimal
TYPES: dict[str, Any] = {
    # standard library types
    "bool": bool,
    "str": str,
    "str, lengths": Annotated[str, Field(min_length=2, max_length=5)],
    "str, pattern": Annotated[str, Field(pattern=r"^[a-z]+\d?$")],
    "bytes": bytes,
    "int": int,
    "int, bounds": Annotated[int, Field(ge=1, lt=100)],
    "int, multiple": Annotated[int, Field(multiple_of=5)],
    "int, 64 bits": Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1)],
    "float": float,
    "float, bounds": Annotated[float, Field(gt=0, le=1)],
    "float, any finite": Annotated[float, Field(ge=-1.7976931348623157e308, le=1.7976931348623157e308)],
    "IntEnum": Tool,
    "Decimal": D,
    "Decimal, digits": Annotated[D, Field(max_digits=5, decimal_places=2)],
    "Decimal, bounds": Annotated[D, Field(gt=0, le=100)],
    "complex": complex,
    "Fraction": fractions.Fraction,
    "datetime": dt.datetime,
    "date": dt.date,
    "time": dt.time,
    "timedelta": dt.timedelta,
    "Enum of strings": Fruit,
    "Enum, mixed": Plain,
    "None": None,
    "list": list,
    "list[int]": list[int],
    "list, lengths": Annotated[list[str], Field(min_length=1, max_length=3)],
    "tuple": tuple,
    "tuple[int, str]": tuple[int, str],
    "tuple[int, ...]": tuple[int, ...],
    "NamedTuple": Point,
    "set[str]": set[str],
    "set[Enum]": set[Fruit],
    "frozenset[int]": frozenset[int],
    "frozenset[Literal]": frozenset[Literal["a", "b", "c"]],
    "deque[int]": collections.deque[int],
    "Sequence[str]": collections.abc.Sequence[str],
    "dict": dict,
    "dict[str, int]": dict[str, int],
    "dict[int, str]": dict[int, str],
    "dict[Literal, int]": dict[Literal["a", "b"], int],
    "dict[Enum, int]": dict[Fruit, int],
    "dict, lengths": Annotated[dict[str, bool], Field(min_length=1, max_length=2)],
    "OrderedDict": collections.OrderedDict[str, int],
    "defaultdict": collections.defaultdict[str, list[int]],
    "Counter": collections.Counter[str],
    "TypedDict": Movie,
    "Iterable[int]": collections.abc.Iterable[int],
    "IPv4Address": ipaddress.IPv4Address,
    "IPv4Network": ipaddress.IPv4Network,
    "IPv6Address": ipaddress.IPv6Address,
    "IPv6Interface": ipaddress.IPv6Interface,
    "UUID": uuid.UUID,
    "Literal": Literal["apple", "pumpkin"],
    "Literal, mixed": Literal[1, "two", None],
    "Any": Any,
    "Pattern": re.Pattern,
    "Path": pathlib.Path,
    # pydantic.types
    "StrictStr": types.StrictStr,
    "conbytes": types.conbytes(min_length=1, max_length=8),
    "conset": types.conset(int, min_length=1, max_length=3),
    "constr": types.constr(min_length=1, max_length=10, pattern=r"\w+"),
    "PositiveInt": types.PositiveInt,
    "NegativeInt": types.NegativeInt,
    "NonNegativeFloat": types.NonNegativeFloat,
    "FiniteFloat": types.FiniteFloat,
    "condecimal": types.condecimal(gt=D(0), decimal_places=3),
    "UUID4": types.UUID4,
    "UUID7": types.UUID7,
    "FilePath": types.FilePath,
    "Json[list[int]]": types.Json[list[int]],
    "SecretStr": types.SecretStr,
    "SecretBytes": types.SecretBytes,
    "PaymentCardNumber": types.PaymentCardNumber,
    "ByteSize": types.ByteSize,
    "PastDate": types.PastDate,
    "FutureDatetime": types.FutureDatetime,
    "condate": types.condate(ge=dt.date(2020, 1, 1)),
    "AwareDatetime": types.AwareDatetime,
    "Base64Str": types.Base64Str,
    "Base64UrlBytes": types.Base64UrlBytes,
    "JsonValue": types.JsonValue,
    "OnErrorOmit": list[types.OnErrorOmit[int]],
    # pydantic.networks
    "AnyUrl": AnyUrl,
    "HttpUrl": HttpUrl,
    "WebsocketUrl": WebsocketUrl,
    "IPvAnyAddress": IPvAnyAddress,
    "PostgresDsn": PostgresDsn,
    "RedisDsn": RedisDsn,
    # models and unions
    "Optional[int]": Optional[int],  # noqa: UP045
    "Union[int, str]": Union[int, str],  # noqa: UP007
    "discriminated union": Annotated[Cat | Dog, Field(discriminator="kind")],
    "dataclass": Item,
    "model": Cat,
    "model in itself": Tree,
    "model, closed": Closed,
    "model, nested": Invoice,
    "RootModel": RootModel[dict[str, Cat]],
    "list[model]": list[Dog],
}


if __name__ == "__main__":
    assert len(TYPES) == 100, len(TYPES)
    print("{")
    print(f'"version": "pydantic {importlib.metadata.version("pydantic")}"')
    for name, kind in TYPES.items():
        print("," + json.dumps(name) + ": " + json.dumps(TypeAdapter(kind).json_schema()))
    print("}")
