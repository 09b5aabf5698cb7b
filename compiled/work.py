"""What a call has to do at least: bytes and floating point operations, as exact functions of its sizes.

Bytes are those that no implementation gets around: each input that is used is read once, each result written once, and
of a table only the rows that are looked up. Operations are arithmetic on floating point numbers: a product of
``[m, k]`` and ``[k, n]`` has ``2mkn``; a function of single elements, whichever, has one for each element of its
result; a sum of n has ``n - 1``. Standard library only.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

Term = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Polynomial:
    """The sum of ``c * T**t * R**r`` over ``terms`` ``(c, t, r)``: T tokens, R logit rows."""

    terms: tuple[Term, ...] = ()

    def __call__(self, tokens: int, rows: int) -> int:
        return sum(c * tokens**t * rows**r for c, t, r in self.terms)

    def __add__(self, other: "Polynomial") -> "Polynomial":
        return _collect((*self.terms, *other.terms))

    def __sub__(self, other: "Polynomial") -> "Polynomial":
        return self + Polynomial(((-1, 0, 0),)) * other

    def __mul__(self, other: "Polynomial") -> "Polynomial":
        return _collect((a * b, t + u, r + s) for a, t, r in self.terms for b, u, s in other.terms)

    def __str__(self) -> str:
        return " + ".join(map(_text, self.terms)).replace("+ -", "- ") or "0"


def constant(value: int) -> Polynomial:
    """``value``, whatever the sizes."""
    return Polynomial(((value, 0, 0),) if value else ())


@dataclass(frozen=True, slots=True)
class Work:
    """Of one call. ``bytes`` are None where they depend on numbers, as those of a mixture of experts do; ``uncounted``
    are operators whose operations are not among ``flops``."""

    bytes: Polynomial | None
    flops: Polynomial
    uncounted: tuple[str, ...] = ()


def attention_work(
    *,
    heads: int,
    kv_heads: int,
    key_size: int,
    value_size: int,
    window: int | None,
    item_bytes: int,
    rows: Iterable[tuple[int, int]],
) -> tuple[int, int]:
    """Bytes and operations of one layer's attention, for ``rows`` of ``(start, tokens)``: the tokens of a row stand at
    positions ``start …`` of its sequence.

    Queries, keys and values are read, the latter two written to their pages and the result to memory; of what is in
    the pages already is read what a ``window`` lets any token of the row see. Operations are those of the two
    products; the softmax, a few for each score, is not counted.
    """
    tokens = cached = scores = 0
    for start, count in rows:
        seen = start + count if window is None else window
        unlimited = min(max(seen - start, 0), count)
        scores += unlimited * start + unlimited * (unlimited + 1) // 2 + (count - unlimited) * seen
        cached += min(start, seen - 1)
        tokens += count
    per_token = (heads + 2 * kv_heads) * (key_size + value_size)
    items = tokens * per_token + cached * kv_heads * (key_size + value_size)
    return items * item_bytes, 2 * heads * (key_size + value_size) * scores


def _collect(terms: Iterable[Term]) -> Polynomial:
    sums: Counter[tuple[int, int]] = Counter()
    for c, t, r in terms:
        sums[t, r] += c
    return Polynomial(tuple((c, t, r) for (t, r), c in sorted(sums.items(), reverse=True) if c))


def _text(term: Term) -> str:
    c, t, r = term
    powers = [f"{name}^{power}" if power > 1 else name for name, power in (("T", t), ("R", r)) if power]
    return "·".join([f"{c:,}", *powers] if c != 1 or not powers else powers)
