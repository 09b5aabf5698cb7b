"""Steps that no request asked for: those that warm a runner up, and the largest there can be.

Their rows have the lowest token of the vocabulary at every position.
"""

from collections.abc import Iterator

from compiled.step import PADDING_PAGE, Row, Sampling, Step

WHOLE = Sampling(temperature=1.0)
CUT = Sampling(temperature=1.0, top_k=2, top_p=0.5, min_p=0.1, typical_p=0.5, repetition_penalty=1.1, logprobs=1)
RANKED = Sampling(temperature=1.0, top_p=0.9, typical_p=0.9)
"""What sampling on a GPU needs the most memory for."""


def warm_up(page_size: int) -> Iterator[Step]:
    """Decoding, a chunk and every kind of sampling, on the padding page's memory only."""
    for lengths in ((1,), (1, 1, 1), (page_size, 1)):
        rows = (
            Row(i, (0,) * length, 0, (PADDING_PAGE,), sampling, history=(0,) * length, targets=(0,) * length)
            for i, (length, sampling) in enumerate(zip(lengths, (CUT, WHOLE, Sampling()), strict=False))
        )
        yield Step(0, tuple(rows))


def full_step(page_size: int, max_num_seqs: int, max_num_batched_tokens: int, sampling: Sampling = WHOLE) -> Step:
    """The whole budget, split over as many sampling rows as may run, with the logits of every token."""
    share, rest = divmod(max_num_batched_tokens, max_num_seqs)
    rows, page = [], PADDING_PAGE + 1
    for i in range(max_num_seqs):
        tokens = share + (i < rest)
        pages = -(-tokens // page_size)
        ids = (0,) * tokens
        rows.append(Row(i, ids, 0, tuple(range(page, page + pages)), sampling, targets=ids))
        page += pages
    return Step(0, tuple(rows))
