"""What is refused before it is queued: what could not finish even if it were alone, and what comes to a full queue."""

from streamengine.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from streamengine.groups import seats
from streamengine.kv import KVPool
from streamengine.request import Sequence


def check_fit(sequence: Sequence, pool: KVPool, max_num_seqs: int, max_model_len: int, reserve: int = 0) -> None:
    """``reserve`` pages of the pool are for transfers between engines.

    Raises:
        InvalidRequest: it has more answers or beams than sequences may run.
        ContextLengthExceeded: it is longer than the context, or than the pool with all its answers at their longest.
    """
    request = sequence.request
    prompt, answers = len(request.prompt), seats(request)
    if answers > max_num_seqs:
        param = "beam_width" if request.beam_width else "n"
        raise InvalidRequest(
            f"{param} is {answers}; at most {max_num_seqs} sequences run at once",
            param=param,
            max_num_seqs=max_num_seqs,
        )
    asked = f"a prompt of {prompt} tokens and max_tokens {request.max_tokens}"
    if prompt + request.max_tokens > max_model_len:
        raise ContextLengthExceeded(
            f"{asked} make {prompt + request.max_tokens} tokens; the context holds {max_model_len}",
            param="max_tokens",
            tokens=prompt + request.max_tokens,
            max_model_len=max_model_len,
        )
    shared = (prompt - 1) // pool.page_size  # by all answers; of the page behind these each has its own
    pages = shared + answers * (sequence.most_pages - shared)
    capacity = pool.capacity - reserve
    if pages > capacity:
        times = f", {answers} times," if answers > 1 else ""
        raise ContextLengthExceeded(
            f"{asked}{times} need {pages} KV pages of {pool.page_size} tokens; there are {capacity}",
            param="max_tokens",
            pages=pages,
            capacity=capacity,
        )


def check_queue(unfinished: int, max_num_seqs: int, max_queue: int) -> None:
    """Raise Overloaded where ``unfinished`` requests are as many as may run and wait."""
    if unfinished >= max_num_seqs + max_queue:
        raise Overloaded(
            f"{unfinished} requests are running or waiting; at most {max_num_seqs} run and {max_queue} wait",
            unfinished=unfinished,
            max_num_seqs=max_num_seqs,
            max_queue=max_queue,
        )
