"""What a core records while an engine works over a fake runner, and what a replay of that finds."""

import json
from functools import partial

import anyio
import pytest

from streamengine import cli, replay
from streamengine.errors import StartupError
from streamengine.sampling import SamplingParams
from streamengine.scheduler import Scheduler
from streamengine.trace import Aborted, Landed, Planned, Submitted
from tests.fakes import EOS, FakeRunner, fake_kv, formula
from tests.serving import engine_over

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def serve(path, work, *, pages=40, depth=1, answer=formula, **config):
    """Let ``work(engine, runner)`` run over a trace at ``path``."""
    runner = FakeRunner(kv=fake_kv(pages), depth=depth, answer=answer)
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "trace": str(path), **config}

    async def run():
        async with engine_over(runner, **settings)(lambda progress: None) as engine:
            await work(engine, runner)

    anyio.run(run)


def record(path, work, **more):
    """The lines that `serve` leaves."""
    serve(path, work, **more)
    return replay.read(str(path))


async def many(engine, runner, count=12, **asked):
    """Requests that share a beginning, more than there are seats for."""
    async with anyio.create_task_group() as tasks:
        for number in range(count):
            prompt = f"the same beginning, then {number}" + "!" * number
            tasks.start_soon(partial(engine.generate, prompt, sampling=GREEDY, **asked))


def clean(path):
    (report,) = replay.replay(str(path))
    assert (report.fault, report.unended, report.differences) == ("", [], 0), report
    return report


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("pages", [17, 40])
def test_a_replay_makes_the_recorded_plans_again(path, depth, pages):
    lines = record(path, many, pages=pages, depth=depth)
    report = clean(path)
    assert report.ended == {"length": 12}
    assert report.steps == sum(isinstance(line, Planned) for line in lines)
    assert (report.preemptions > 0) == (pages == 17)
    assert report.longest_wait_s > 0


def test_a_replay_hits_the_prefix_cache_where_the_recorded_core_did(path):
    async def twice(engine, runner):
        """The second prompt continues the first one's answer: pages of prompt and of answer are hit."""
        first = await engine.generate("a prompt of many pages", sampling=GREEDY)
        ids = (*b"a prompt of many pages", *first.token_ids, *b"go on")
        second = await engine.generate(token_ids=ids, sampling=GREEDY)
        assert second.usage.cached_tokens > len("a prompt of many pages")

    record(path, twice)
    clean(path)


def test_aborts_ends_at_a_stop_token_several_answers_and_failed_steps_are_replayed(path):
    def answer(context, sampling):
        return EOS if len(context) % 7 == 0 else 65 + (sum(context) + sampling.seed) % 26

    async def work(engine, runner):
        sampling = SamplingParams(n=3, seed=5, max_tokens=12)
        await many(engine, runner, 3)
        await engine.generate("three answers", sampling=sampling)
        async with engine.stream("cancelled", sampling=SamplingParams(max_tokens=140, ignore_eos=True)) as stream:
            await anext(stream)
            await stream.cancel()
        runner.fail()
        with pytest.raises(Exception, match="kernel panic"):
            await engine.generate("unlucky", sampling=GREEDY)
        await engine.generate("afterwards", sampling=GREEDY)

    lines = record(path, work, answer=answer)
    assert any(isinstance(line, Aborted) for line in lines)
    assert any(isinstance(line, Landed) and line.seconds is None for line in lines)
    report = clean(path)
    assert report.ended["stop"] >= 4
    assert (report.ended["cancelled"], report.ended["error"]) == (1, 1)


def test_priorities_and_tenants_are_replayed(path):
    async def work(engine, runner):
        async with anyio.create_task_group() as tasks:
            for tenant, priority, count in (("alice", 0, 6), ("bob", 0, 2), ("carol", 2, 2)):
                tasks.start_soon(partial(many, engine, runner, count, tenant=tenant, priority=priority))

    record(path, work, max_num_seqs=2)
    clean(path)


def test_a_trace_holds_no_content(path):
    async def work(engine, runner):
        sampling = SamplingParams(max_tokens=5, bad_words=("swear",), logit_bias={77: 3.0})
        await engine.generate("confidential prompt", sampling=sampling, tenant="sk-key")

    record(path, work)
    text = path.read_text()
    assert "sk-key" not in text
    for line in map(json.loads, text.splitlines()):
        assert "tokens" not in line
        if line["kind"] == "submit":
            assert line["request"]["prompt"] == []
            assert line["length"] == len("confidential prompt")
            assert "77" not in json.dumps(line["request"]["sampling"]["logit_bias"])
        if line["kind"] == "result":
            assert all(told[5:] == [[]] for told in line["answers"]), "token ids"


def test_digests_are_equal_as_far_as_two_prompts_are_and_differ_between_traces(path, tmp_path):
    async def work(engine, runner):
        for prompt in ("one two three four", "one two three five", "six two three four"):
            await engine.generate(prompt, sampling=GREEDY)

    def digests(path):
        return [line.pages for line in record(path, work) if isinstance(line, Submitted)]

    first, second, third = digests(path)
    assert first[:3] == second[:3]
    assert first[3] != second[3]
    assert not set(first) & set(third), "a digest is chained: it stands for everything before it"
    assert not set(first) & set(digests(tmp_path / "other")[0])


def test_with_text_the_token_ids_are_there_and_guesses_are_replayed(path):
    def answer(context, sampling):
        return context[len(context) % 6]

    async def work(engine, runner):
        sampling = SamplingParams(temperature=0, max_tokens=40, speculate=4, ignore_eos=True)
        result = await engine.generate("abcdefabcdef", sampling=sampling)
        assert len(result.token_ids) == 40

    lines = record(path, work, answer=answer, trace_text=True)
    (submitted,) = (line for line in lines if isinstance(line, Submitted))
    assert bytes(submitted.tokens) == b"abcdefabcdef"
    assert any(sampled > 1 for line in lines if isinstance(line, Planned) for *_, sampled in line.rows)
    clean(path)


def test_a_line_that_a_kill_cut_off_is_left_out_and_the_unfinished_are_run_to_their_end(path):
    record(path, many)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: len(lines) // 2]) + b'{"kind":"plan","at":1')
    report = clean(path)
    assert sum(report.ended.values()) == report.requests == 12


def test_a_core_that_goes_on_behind_a_line_that_was_cut_off_begins_a_new_one(path):
    record(path, many)
    path.write_bytes(path.read_bytes()[:-7])
    record(path, partial(many, count=3))
    assert [report.requests for report in replay.replay(str(path))] == [12, 3]


def test_each_core_that_wrote_to_a_file_is_a_session_of_its_own(path):
    record(path, many)
    record(path, partial(many, count=3))
    assert [report.requests for report in replay.replay(str(path))] == [12, 3]


def test_a_full_disk_ends_the_trace_and_not_the_core(caplog):
    async def work(engine, runner):
        assert (await engine.generate("hello", sampling=GREEDY)).finish_reason == "length"

    serve("/dev/full", work)
    assert "the trace ends here" in caplog.text


def test_a_trace_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    with pytest.raises(StartupError, match="No such file"):
        record(tmp_path / "no" / "such" / "folder", many)


# what a replay finds


def test_a_difference_is_told_and_is_no_fault(path, capsys):
    record(path, many)
    changed = path.read_text().replace('"max_num_batched_tokens":16', '"max_num_batched_tokens":15')
    path.write_text(changed)
    assert cli.run(["replay", str(path)]) == 0
    out = capsys.readouterr().out
    assert "the first: step 1: " in out
    assert "FAULT" not in out


def test_a_broken_invariant_is_a_fault(path, capsys, monkeypatch):
    record(path, many)
    check, calls = Scheduler.check, []

    def broken(self):
        calls.append(self)
        assert len(calls) < 20, "two owners of page 7"
        check(self)

    monkeypatch.setattr(Scheduler, "check", broken)
    assert cli.run(["replay", str(path)]) == 1
    assert "FAULT        at step 10: AssertionError: two owners of page 7" in capsys.readouterr().out


def test_a_scheduler_that_hangs_is_a_fault_that_names_the_requests(path, capsys, monkeypatch):
    record(path, partial(many, count=3))
    monkeypatch.setattr(Scheduler, "plan", lambda self, now: None)
    assert cli.run(["replay", str(path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert "nothing can be planned" in report["fault"]
    assert report["unended"] == [1, 2, 3]


def test_a_request_that_is_passed_over_for_too_long_is_a_fault(path, capsys):
    record(path, many, max_num_seqs=1)
    assert cli.run(["replay", str(path)]) == 0
    assert cli.run(["replay", str(path), "--patience", "30"]) == 1
    assert "got no token in 30 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "does not begin like a trace"),
        (b"hello\n", "line 1 of"),
        (b'{"kind":"abort","at":1,"request":1,"cause":""}\n', "does not begin like a trace"),
        (b'{"kind":"open"}\n', "line 1 of"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(path, capsys, content, complaint):
    path.write_bytes(content)
    assert cli.run(["replay", str(path)]) == 2
    assert complaint in capsys.readouterr().err


def test_a_trace_of_another_version_and_a_missing_file_are_refused(path, capsys):
    assert cli.run(["replay", str(path)]) == 2
    record(path, partial(many, count=1))
    path.write_text(path.read_text().replace('"version":1', '"version":99'))
    assert cli.run(["replay", str(path)]) == 2
    assert "the trace has version 99, this is 1" in capsys.readouterr().err
