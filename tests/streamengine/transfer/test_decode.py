"""Both scheduler halves, move by move: what a peer says too early, twice, too late or not at all."""

import pytest
from msgspec import structs

from compiled.step import Sampling
from streamengine.request import QUEUE_TIMEOUT, Finish
from streamengine.transfer.values import Busy, Heartbeat, Held, Prefill, Prefilled, Refused, Release
from tests.fakes import formula, oracle
from tests.remote import DEADLINE_S, LEASE_S, SCRIBBLE, Engine, Wire

PROMPT = tuple(range(50, 70))


class Pair:
    """An engine that answers, its peer, and what is between them."""

    def __init__(self, **options):
        self.decode = Engine("d", decode=True, **options)
        self.prefill = Engine("p", prefill=True, now=1000.0)
        self.wire = Wire(self.decode, self.prefill, "p")
        self.wire.connect()
        self.decode.exchange()

    def said(self, sender, kind):
        """The messages of ``kind`` that ``sender`` has on their way."""
        (queue,) = sender.worker.outbox.values()
        return [message for message in queue if isinstance(message, kind)]

    def go_on(self, rounds=4):
        for _ in range(rounds):
            self.wire.deliver()
            self.prefill.turn()
            self.wire.deliver()
            self.decode.turn()

    def pass_time(self, seconds):
        self.decode.now += seconds
        self.prefill.now += seconds

    def post_a_read(self, **options):
        """A request whose pages are being read; returns its id and its transfer."""
        id = self.decode.submit(PROMPT, 6, **options)
        self.go_on(1)
        (transfer,) = self.decode.worker.reads
        return id, transfer

    def settle(self):
        """Everything ends, and nothing is held any more."""
        for transfer in list(self.decode.worker.reads):
            self.decode.end_read(transfer)
        self.go_on()
        self.decode.run()
        self.pass_time(LEASE_S)
        self.go_on(2)
        for engine in (self.decode, self.prefill):
            assert engine.pool.available == engine.pool.capacity
            assert not engine.connector.statistics()["transfer_pages"]

    def fallbacks(self):
        found = self.decode.connector.statistics()
        return {k.removeprefix("remote_fallbacks_"): v for k, v in found.items() if k.startswith("remote_fallbacks_")}

    def note_of(self, id):
        return [delta.remote for delta in self.decode.deltas if delta.request == id and delta.remote]


@pytest.fixture
def pair():
    return Pair()


def test_the_first_token_is_told_before_the_pages_have_come(pair):
    id, transfer = pair.post_a_read()
    assert pair.decode.answers[id] == [formula(PROMPT, Sampling())] and not pair.decode.running
    pair.decode.end_read(transfer)
    pair.settle()
    assert pair.decode.answers[id] == oracle(PROMPT, 6)
    assert pair.note_of(id) == ["done"]
    # No prompt token was computed here, the last one neither.
    assert sum(len(row.tokens) for step in pair.decode.runner.steps for row in step.rows) == 5
    assert pair.decode.scheduler.statistics()["generated_tokens"] == 6


def test_an_answer_that_ends_with_its_first_token_moves_no_page(pair):
    id = pair.decode.submit(PROMPT, 1)
    pair.go_on(1)
    assert pair.decode.finishes[id] == Finish("length", "max_tokens") and not pair.decode.worker.reads
    pair.settle()
    assert not pair.decode.runner.steps


def test_several_answers_begin_with_the_last_prompt_token_once_more(pair):
    id, transfer = pair.post_a_read(n=3, sampling=Sampling(temperature=1.0, seed=5))
    assert pair.decode.answers[id] == []
    pair.decode.end_read(transfer)
    pair.settle()
    for index in range(3):
        assert pair.decode.answer(id, index) == pair.decode.expected(id, index)
    assert pair.decode.runner.steps[0].rows[0].start == len(PROMPT) - 1


def test_a_message_that_comes_twice_or_after_the_end_changes_nothing(pair):
    id, transfer = pair.post_a_read()
    for number in range(len(pair.wire.past)):
        pair.wire.repeat(number)
    pair.go_on()
    assert list(pair.decode.worker.reads) == [transfer]
    pair.decode.end_read(transfer)
    pair.go_on()
    pair.decode.run()
    for number in range(len(pair.wire.past)):
        pair.wire.repeat(number)
    pair.settle()
    assert pair.decode.answers[id] == oracle(PROMPT, 6) and pair.fallbacks() == {}


@pytest.mark.parametrize("at", ["sent", "computing", "computed", "reading", "landed"])
def test_an_abort_frees_both_sides_wherever_the_request_is(pair, at):
    id = pair.decode.submit(PROMPT, 6)
    if at != "sent":
        pair.wire.deliver()
        pair.prefill.exchange()
        pair.prefill.launch()
    if at in ("computed", "reading", "landed"):
        pair.prefill.land()
    if at in ("reading", "landed"):
        pair.wire.deliver()
        pair.decode.exchange()
        pair.decode.exchange()
        (transfer,) = pair.decode.worker.reads
        if at == "landed":
            pair.decode.end_read(transfer)
            pair.decode.exchange()
    assert [delta.finish for delta in pair.decode.abort(id)] == [Finish("cancelled", "client")]
    assert pair.decode.abort(id) == []
    assert at != "landed" or pair.decode.pool.available == pair.decode.pool.capacity
    pair.settle()


def test_a_read_whose_request_went_on_keeps_its_pages_until_it_has_ended(pair):
    """What it writes late reaches nobody: the pool gives those pages to no other request, however short it is."""
    id, transfer = pair.post_a_read()
    pair.pass_time(DEADLINE_S)
    pair.decode.exchange()
    assert pair.fallbacks() == {"deadline": 1} and pair.note_of(id) == ["done", "deadline"]
    assert pair.decode.connector.statistics()["remote_zombies"] == 1
    landing = {here for _, here in pair.decode.worker.reads[transfer][0].pairs}
    pair.decode.alone_below(8)
    others = [pair.decode.submit(2, 40) for _ in range(6)]
    while pair.decode.scheduler.has_work:
        pair.decode.scribble(transfer)
        pair.decode.turn()
        used = {page for step in pair.decode.runner.steps for row in step.rows for page in row.pages}
        assert not used & landing
    assert pair.decode.answers[id] == oracle(PROMPT, 6)
    assert all(pair.decode.answers[other] == pair.decode.expected(other) for other in others)
    assert {bytes(pair.decode.runner._page(page)) for page in landing} == {SCRIBBLE * 64}
    pair.settle()


def test_pages_that_were_read_after_their_lease_are_not_used(pair):
    """The peer gives them away, and its next prompt takes them, before they are copied."""
    id, transfer = pair.post_a_read()
    pair.pass_time(LEASE_S)
    pair.prefill.turn()
    pair.prefill.submit(tuple(range(200, 256)), 40)
    pair.prefill.turn()
    pair.decode.end_read(transfer)
    pair.decode.run()
    assert pair.fallbacks() == {"lease": 1}
    assert pair.decode.answers[id] == oracle(PROMPT, 6)
    pair.prefill.run()
    pair.settle()


def test_heartbeats_keep_a_lease_for_as_long_as_a_read_takes(pair):
    id, transfer = pair.post_a_read()
    for _ in range(12):
        pair.pass_time(LEASE_S / 4)
        pair.go_on(1)
    assert pair.decode.now > 2 * LEASE_S
    pair.decode.end_read(transfer)
    pair.settle()
    assert pair.fallbacks() == {} and pair.decode.answers[id] == oracle(PROMPT, 6)


def test_a_peer_that_knows_nothing_of_a_transfer_is_believed(pair):
    id = pair.decode.submit(PROMPT, 6)
    pair.pass_time(LEASE_S / 2)
    pair.decode.exchange()
    (beat,) = pair.said(pair.decode, Heartbeat)
    pair.decode.receive("p", Held((), beat.sent))
    pair.decode.run()
    assert pair.fallbacks() == {"lease": 1} and pair.decode.answers[id] == oracle(PROMPT, 6)


@pytest.mark.parametrize(("on_failure", "tokens"), [("recompute", 6), ("fail", 0)])
def test_a_failure_is_computed_again_or_ends_the_request_as_was_asked_for(on_failure, tokens):
    pair = Pair(on_failure=on_failure)
    id = pair.decode.submit(PROMPT, 6)
    pair.wire.cut()
    pair.decode.run()
    if on_failure == "fail":
        pair.decode.exchange()
        assert pair.decode.finishes[id].cause == "engine_error"
        message = pair.decode.finishes[id].message
        # Who the peer was is in the log, and not for clients.
        assert message.endswith("the connection to the engine that was asked is lost")
    assert pair.decode.answers[id] == oracle(PROMPT, 6)[:tokens] and pair.fallbacks() == {"lost": 1}


def test_a_peer_that_is_full_is_no_failure():
    pair = Pair(on_failure="fail")
    id = pair.decode.submit(PROMPT, 6)
    (prefill,) = pair.said(pair.decode, Prefill)
    pair.decode.receive("p", Refused(prefill.transfer, "overloaded", "enough to do"))
    pair.decode.exchange()
    pair.decode.run()
    assert pair.decode.answers[id] == oracle(PROMPT, 6) and pair.fallbacks() == {"refused": 1}


@pytest.mark.parametrize("change", [{"tokens": 19}, {"pages": (1,)}, {"incarnation": "other"}, {"version": 2}])
def test_a_handle_that_cannot_be_is_not_used(pair, change):
    id = pair.decode.submit(PROMPT, 6)
    pair.wire.deliver()
    pair.prefill.turn()
    (prefilled,) = pair.said(pair.prefill, Prefilled)
    pair.decode.receive("p", Prefilled(structs.replace(prefilled.handle, **change)))
    pair.decode.exchange()
    assert pair.fallbacks() == {"failed": 1}
    pair.settle()
    assert pair.decode.answers[id] == oracle(PROMPT, 6)


def test_pages_are_given_to_a_transfer_when_there_is_room_and_read_when_no_step_can_write_them():
    pair = Pair(depth=2, usable_pages=16, reserve=8)
    pair.decode.alone_below(8)
    first = pair.decode.submit(7, 20)
    second = pair.decode.submit(PROMPT, 6)
    pair.wire.deliver()
    pair.prefill.turn()
    pair.wire.deliver()
    while len(pair.decode.in_flight) < 2:
        pair.decode.launch()
    newest = pair.decode.in_flight[-1][0].number
    pair.decode.exchange()
    assert pair.decode.connector.statistics()["transfer_pages"] == 5 and not pair.decode.worker.reads
    while pair.decode.in_flight and pair.decode.in_flight[0][0].number <= newest:
        assert not pair.decode.worker.reads
        pair.decode.land()
        pair.decode.exchange()
    assert pair.decode.worker.reads
    pair.settle()
    assert pair.decode.answers[first] == pair.decode.expected(first)
    assert pair.decode.answers[second] == oracle(PROMPT, 6)


def test_a_prompt_that_comes_when_its_deadline_has_passed_is_late_and_not_short_of_room():
    pair = Pair()
    id = pair.decode.submit(PROMPT, 6)
    pair.wire.deliver()
    pair.prefill.turn()
    pair.wire.deliver()
    pair.pass_time(DEADLINE_S)
    pair.decode.exchange()
    assert pair.fallbacks() == {"deadline": 1}
    pair.settle()
    assert pair.decode.answers[id] == oracle(PROMPT, 6)


def test_what_waits_for_room_goes_on_without_at_its_deadline():
    pair = Pair(usable_pages=24, reserve=6, on_failure="fail")
    held, transfer = pair.post_a_read()
    waits = pair.decode.submit((*PROMPT[:10], *range(10)), 6)
    pair.go_on(2)
    assert pair.decode.answers[waits] and list(pair.decode.worker.reads) == [transfer]
    pair.decode.end_read(transfer)
    pair.decode.worker.reports.clear()  # the worker is asleep
    for _ in range(30):
        pair.pass_time(1)
        pair.go_on(1)
    assert pair.fallbacks() == {"no_room": 1, "deadline": 1}
    assert pair.decode.answers[waits] == pair.decode.expected(waits)
    assert pair.decode.finishes[held].reason == "error"


def test_a_request_whose_pages_landed_is_preempted_and_computed_again():
    pair = Pair(usable_pages=16, reserve=6, max_num_seqs=4)
    ids = [pair.decode.submit(bytes(range(i, i + 12)), 28) for i in range(2)]
    for _ in range(4):
        pair.go_on(1)
        for transfer in list(pair.decode.worker.reads):
            pair.decode.end_read(transfer)
    pair.settle()
    assert pair.decode.preemptions > 0 and pair.decode.connector.statistics()["remote_landed"] == 2
    assert all(pair.decode.answers[id] == pair.decode.expected(id) for id in ids)


def test_a_landed_request_goes_before_those_that_wait_for_their_first_turn():
    pair = Pair(max_num_seqs=1)
    pair.decode.alone_below(8)
    running = pair.decode.submit(3, 8)
    pair.decode.turn()
    landed, transfer = pair.post_a_read()
    fresh = pair.decode.submit(3, 2)
    pair.decode.end_read(transfer)
    pair.decode.exchange()
    assert pair.decode.waiting == [landed, fresh] and pair.decode.running == [running]
    pair.settle()


def test_a_queue_timeout_ends_what_no_step_was_planned_for_on_either_side(pair):
    waits, begun = pair.decode.submit(PROMPT, 6), pair.decode.submit((*PROMPT, 1), 6)
    (ends,) = pair.decode.note(pair.decode.connector.cancel(waits, QUEUE_TIMEOUT))
    assert ends.finish == Finish("cancelled", QUEUE_TIMEOUT)
    pair.go_on(1)
    assert pair.decode.connector.cancel(begun, QUEUE_TIMEOUT) == []
    (transfer,) = pair.decode.worker.reads
    pair.decode.end_read(transfer)
    pair.decode.exchange()
    assert pair.decode.scheduler.abort(begun, QUEUE_TIMEOUT) == []
    pair.settle()


def test_a_peer_takes_no_more_prompts_than_it_has_room_for_and_the_rest_wait_there():
    decode = Engine("d", decode=True, usable_pages=100, reserve=50)
    prefill = Engine("p", prefill=True, usable_pages=40, reserve=10)
    wire = Wire(decode, prefill, "p")
    wire.connect()
    decode.exchange()
    ids = [decode.submit(tuple(range(i, i + 20)), 2) for i in range(4)]
    for _ in range(3):
        wire.deliver()
        prefill.turn()
        assert prefill.scheduler.landing.pages <= 10
    assert prefill.connector.statistics()["prefills_held"] == 2
    for _ in range(20):
        wire.deliver()
        prefill.turn()
        decode.turn()
        for transfer in list(decode.worker.reads):
            decode.end_read(transfer)
    assert all(decode.answers[id] == decode.expected(id) for id in ids)
    assert decode.connector.statistics()["remote_landed"] == 4


def test_a_prompt_goes_past_a_peer_that_has_said_how_busy_it_is():
    decode = Engine("d", decode=True)
    for name in ("p", "q"):
        Wire(decode, Engine(name, prefill=True), name).connect()
    decode.exchange()

    def chosen():
        id = decode.submit(PROMPT, 2)
        asked = [peer for peer, queue in decode.worker.outbox.items() if any(isinstance(m, Prefill) for m in queue)]
        decode.abort(id)
        for queue in decode.worker.outbox.values():
            queue.clear()
        (peer,) = asked
        return peer

    favourite = chosen()
    assert chosen() == favourite
    decode.receive(favourite, Busy(5))
    decode.exchange()
    assert chosen() != favourite
    decode.receive(favourite, Busy(0))
    decode.exchange()
    assert chosen() == favourite


def test_an_engine_tells_its_peers_when_many_more_or_fewer_prompts_wait_there(pair):
    for _ in range(7):
        pair.decode.submit(PROMPT, 2)
        pair.wire.deliver()
        pair.prefill.exchange()
    for _ in range(8):
        pair.go_on()
        for transfer in list(pair.decode.worker.reads):
            pair.decode.end_read(transfer)
    pair.settle()
    assert [message.waiting for _, _, message in pair.wire.past if isinstance(message, Busy)] == [2, 6, 1, 0]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"max_tokens": 2}, "max_tokens of a prefill is 1, not 2"),
        ({"n": 2}, "n of a prefill is 1, not 2"),
        ({"prompt": (1, 258)}, "each below 258"),
        ({"prompt": ()}, "a prefill has tokens"),
        ({"prompt": (1,) * 100}, "a prompt of 25 pages; at most 16 can be kept"),
        ({"prompt_logprobs": 0}, "neither answered tokens nor prompt_logprobs"),
    ],
)
def test_a_request_that_is_no_prefill_is_refused_by_name(pair, change, why):
    pair.decode.submit(PROMPT, 6)
    (asked,) = pair.said(pair.decode, Prefill)
    pair.prefill.receive("p-accepted-1", structs.replace(asked, request=structs.replace(asked.request, **change)))
    pair.prefill.turn()
    (refused,) = pair.said(pair.prefill, Refused)
    assert refused.code == "invalid_request" and why in refused.message
    assert not pair.prefill.runner.steps


def test_every_prefill_is_released_once_it_is_over(pair):
    _, transfer = pair.post_a_read()
    assert pair.said(pair.decode, Release) == []
    pair.decode.end_read(transfer)
    pair.decode.exchange()
    assert pair.said(pair.decode, Release) == [Release(transfer)]
    pair.settle()


def test_of_an_engine_that_died_nothing_is_kept_beyond_the_lease_and_its_next_start_is_another_one(pair):
    pair.post_a_read()
    pair.decode.submit((*PROMPT, 1), 6)
    pair.wire.deliver()
    pair.prefill.exchange()
    pair.wire.cut()
    pair.prefill.turn()
    # What was computed may still be being read; what was not is given up at once.
    assert pair.prefill.connector.statistics()["prefills_held"] == 1 and not pair.prefill.scheduler.has_work
    again = Engine("d", 2, decode=True)
    wire = Wire(again, pair.prefill, "p")
    wire.connect()
    again.exchange()
    id = again.submit(PROMPT, 6)
    for _ in range(3):
        wire.deliver()
        pair.prefill.turn()
        again.turn()
        for transfer in list(again.worker.reads):
            again.end_read(transfer)
    again.run()
    assert again.answers[id] == oracle(PROMPT, 6) and again.connector.statistics()["remote_landed"] == 1
    pair.pass_time(LEASE_S)
    wire.deliver()
    pair.prefill.turn()
    assert pair.prefill.connector.statistics()["transfer_pages"] == 0
    assert pair.prefill.pool.available == pair.prefill.pool.capacity


def test_a_peer_that_restarted_is_not_asked_for_pages_of_its_former_life(pair):
    id = pair.decode.submit(PROMPT, 6)
    pair.wire.deliver()
    pair.prefill.turn()
    (prefilled,) = pair.said(pair.prefill, Prefilled)
    pair.wire.cut()
    pair.wire.prefill = Engine("p", 2, prefill=True, now=pair.prefill.now)
    pair.wire.connect()
    pair.decode.receive("p", prefilled)
    pair.decode.run()
    assert not pair.decode.worker.reads and pair.fallbacks() == {"lost": 1}
    assert pair.decode.answers[id] == oracle(PROMPT, 6)
