"""Twenty pydantic models of the kinds that people write."""

from __future__ import annotations

from datetime import date, datetime, time
from enum import Enum, IntEnum
from ipaddress import IPv4Address, IPv6Address
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import AnyUrl, BaseModel, ConfigDict, Field, RootModel


class Color(Enum):
    RED = "red"
    GREEN = "green"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Plain(BaseModel):
    name: str
    age: int
    weight: float
    alive: bool


class Address(BaseModel):
    street: str
    zip_code: Annotated[str, Field(pattern=r"^\d{5}$")]


class Nested(BaseModel):
    id: int
    home: Address
    work: Address | None = None


class Optionals(BaseModel):
    a: int | None
    b: str | None = None
    c: float = 1.5


class Unions(BaseModel):
    value: int | str | list[bool]
    other: Address | Color


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    tricks: Annotated[list[Literal["sit", "roll"]], Field(max_length=3)]


class Discriminated(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    others: Annotated[list[Annotated[Cat | Dog, Field(discriminator="kind")]], Field(max_length=2)]


class Literals(BaseModel):
    word: Literal["yes", "no"]
    number: Literal[1, 2, 3]
    mixed: Literal["x", 7, None, True]


class Enums(BaseModel):
    color: Color
    level: Level
    colors: dict[Color, Level]


class Numbers(BaseModel):
    positive: Annotated[int, Field(gt=0)]
    share: Annotated[float, Field(ge=0, le=1)]
    even: Annotated[int, Field(multiple_of=2, ge=-10, lt=100)]
    negative: Annotated[float, Field(lt=0)]


class Strings(BaseModel):
    short: Annotated[str, Field(min_length=2, max_length=5)]
    code: Annotated[str, Field(pattern=r"^[A-Z]{2}-\d+$", max_length=20)]
    hex: Annotated[str, Field(pattern=r"^(0x)?[0-9a-f]{1,8}$")]


class Times(BaseModel):
    at: datetime
    day: date
    hour: time


class Formats(BaseModel):
    id: UUID
    link: AnyUrl
    host: IPv4Address | IPv6Address


class Tree(BaseModel):
    value: int
    children: Annotated[list[Tree], Field(max_length=2)] = []


class Chain(BaseModel):
    head: Literal["x"]
    next: Chain | None


class Lists(BaseModel):
    words: Annotated[list[str], Field(min_length=1, max_length=3)]
    grid: Annotated[list[Annotated[list[int], Field(max_length=2)]], Field(max_length=2)]
    pair: tuple[int, str]
    many: Annotated[tuple[bool, ...], Field(max_length=4)]


class Maps(BaseModel):
    scores: dict[str, int]
    deep: dict[str, dict[str, bool]]


class Documented(BaseModel):
    """What a person says of it ends up in the schema."""

    title: str = Field(description='With "quotes" and\nlines', examples=["a"], title="The title")
    default: int = Field(default=3, deprecated=True)


class Aliased(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    class_name: str = Field(alias="class")
    path: str = Field(alias="a/b~c")
    spaced: int = Field(alias="with space")


class Anything(BaseModel):
    data: Any
    many: Annotated[list[Any], Field(max_length=2)]
    text: object


class Choices(RootModel[Annotated[list[Color], Field(min_length=2, max_length=4)]]):
    pass


class Invoice(BaseModel):
    model_config = ConfigDict(extra="forbid")
    number: Annotated[str, Field(pattern=r"^INV-\d{4}$")]
    issued: date
    lines: Annotated[list[Line], Field(min_length=1, max_length=3)]
    paid: Literal["cash", "card"] | None = None


class Line(BaseModel):
    model_config = ConfigDict(extra="forbid")
    item: Annotated[str, Field(max_length=12)]
    count: Annotated[int, Field(ge=1, le=99)]
    price: Annotated[float, Field(gt=0, lt=1000)]


MODELS: list[type[BaseModel]] = [
    Plain,
    Nested,
    Optionals,
    Unions,
    Discriminated,
    Literals,
    Enums,
    Numbers,
    Strings,
    Times,
    Formats,
    Tree,
    Chain,
    Lists,
    Maps,
    Documented,
    Aliased,
    Anything,
    Choices,
    Invoice,
]
