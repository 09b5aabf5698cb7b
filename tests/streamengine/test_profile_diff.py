"""What the comparison of two profiles finds, says and lets pass."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamengine.cli import run
from streamengine.errors import InvalidRequest
from streamengine.profile.diff import Change, compare, lines
from streamengine.profile.record import Ceilings, Compile, Hardware, Profile, decode, encode
from tests.profiles import AFTER, BEFORE, LAST, MIDDLE, burning, profile


def slower(before: Profile, after: Profile, threshold: float = 0.05) -> dict[str, Change]:
    return {change.name: change for change in compare(before, after, threshold).changes if change.slower}


def with_calls(document: Profile, edit: Callable[[Any], Any]) -> Profile:
    return msgspec.structs.replace(document, calls=tuple(edit(call) for call in document.calls))


def test_two_runs_of_one_version_differ_in_nothing() -> None:
    difference = compare(profile(), profile())
    assert not difference.slower
    assert difference.notes == ()
    assert {change.growth_s for change in difference.changes} == {0.0}


def test_a_piece_that_became_slower_is_found_by_its_name_and_the_rest_is_not_blamed() -> None:
    found = slower(profile(), profile(burning("norm+lm_head", 0.9e-3)))
    assert found.keys() == {LAST}
    assert found[LAST].growth_s == pytest.approx(0.9e-3, rel=0.02)
    assert compare(profile(), profile(burning("norm+lm_head", 0.9e-3))).changes[0].name == LAST


def test_a_piece_between_all_layers_is_one_line_and_the_step_is_slower_too() -> None:
    difference = compare(profile(), profile(burning(BEFORE, 0.1e-3)))
    assert difference.step.slower
    change = next(change for change in difference.changes if change.name == MIDDLE)
    assert change.slower and change.growth_s == pytest.approx(29 * 0.1e-3, rel=0.02)
    assert not any("most of it" in reason for reason in change.why)


def test_one_place_among_many_is_named_where_it_holds_most_of_the_loss() -> None:
    place = f"layers.7: {AFTER} | layers.8: {BEFORE}"
    (change,) = slower(profile(), profile(burning(place, 2e-3))).values()
    assert change.name == MIDDLE
    assert any(reason.startswith(f"most of it at {place}: ") for reason in change.why)


def test_time_of_the_host_is_a_part_like_any_other() -> None:
    assert slower(profile(), profile(host_s=2e-3)).keys() == {"host/other"}


def test_bursts_that_the_fastest_call_does_not_know_are_told_but_are_no_alarm() -> None:
    def burst(call: Any) -> Any:
        return msgspec.structs.replace(call, mean_s=call.mean_s * 3) if call.piece == "last" else call

    difference = compare(profile(), with_calls(profile(), burst))
    assert not difference.slower
    (told,) = (change for change in difference.changes if change.name == LAST)
    assert any(reason.startswith("in bursts: the mean 2.31 → 6.93 ms") for reason in told.why)


def test_what_is_too_small_to_matter_is_no_alarm() -> None:
    assert slower(profile(), profile(burning("q_proj+k_proj+v_proj", 20e-6)), 0.2) == {}
    doubled = burning("layers.0: input_layernorm+q_proj+k_proj+v_proj", 70e-6)
    assert slower(profile(), profile(doubled)) == {}  # 92 → 162 µs, of a step of 15 ms


def test_profiles_without_medians_are_compared_by_their_means() -> None:
    def bare(document: Profile) -> Profile:
        return with_calls(document, lambda call: msgspec.structs.replace(call, p50_s=None, min_s=None))

    assert slower(bare(profile()), bare(profile(burning("lm_head", 1e-3)))).keys() == {LAST}


def test_more_calls_and_more_bytes_are_given_as_reasons() -> None:
    def grown(call: Any) -> Any:
        if call.kind != "attention":
            return call
        return msgspec.structs.replace(call, calls=2 * call.calls, bytes=6 * call.bytes)

    (change,) = slower(profile(), with_calls(profile(), grown)).values()
    assert change.name == "attention"
    assert "30 → 60 calls a step" in change.why
    assert "0.79 → 2.37 MB a call" in change.why


def test_a_piece_that_was_compiled_anew_says_which_factor_missed() -> None:
    missed = Compile(cache="miss", factor="torch 2.13.0 → 2.14.0")

    def rename(key: str | None) -> str | None:
        return "other" if key == "middle" else key

    after = with_calls(
        profile(burning(BEFORE, 1e-3)), lambda call: msgspec.structs.replace(call, piece=rename(call.piece))
    )
    pieces = tuple(
        msgspec.structs.replace(
            piece, key=rename(piece.key), compile=missed if piece.key == "middle" else piece.compile
        )
        for piece in after.pieces
    )
    change = slower(profile(), msgspec.structs.replace(after, pieces=pieces))[MIDDLE]
    assert "another graph" in change.why
    assert "cache hit → miss, torch 2.13.0 → 2.14.0" in change.why


def test_another_machine_or_a_slower_one_is_noted() -> None:
    after = profile(
        hardware=Hardware(cpu="AMD EPYC 9R14", cores=2, threads=1), ceilings=Ceilings(read_gbps=20, product_gflops=428)
    )
    notes = compare(profile(), after).notes
    assert notes[0] == "not the same machine: threads 2 → 1"
    assert "read 31 → 20 GB/s" in notes[1]


@pytest.mark.parametrize("field", [{"model": "other"}, {"dtype": "float32"}, {"scenario": "prefill"}, {"eager": True}])
def test_unlike_profiles_are_refused_by_the_field(field: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compare(profile(), profile(**field))
    assert caught.value.param == next(iter(field))


def test_the_lines_begin_with_the_step_and_name_what_is_slower() -> None:
    shown = list(lines(compare(profile(), profile(burning("lm_head", 1e-3)))))
    assert shown[0].startswith("SLOWER    +6.6 %") and shown[0].endswith("the step")
    assert shown[1].startswith("SLOWER   +43.3 %") and shown[1].endswith(f"{LAST} @T≤8")
    assert shown[2].strip() == "2.29 → 3.28 ms a call, the fastest 2.19 → 3.14 ms"


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    for name, document in (("a", profile()), ("b", profile(burning("lm_head", 1e-3)))):
        (tmp_path / f"{name}.json").write_bytes(encode(document))
    return str(tmp_path / "a.json"), str(tmp_path / "b.json")


def test_a_document_survives_its_file() -> None:
    assert decode(encode(profile())) == profile()


@pytest.mark.parametrize(("threshold", "status"), [("5%", 1), ("0.5", 0), ("60 percent", 2)])
def test_the_command_ends_with_1_past_the_threshold(
    files: tuple[str, str], capfd: pytest.CaptureFixture[str], threshold: str, status: int
) -> None:
    assert run(["profile", "diff", *files, "--threshold", threshold]) == status
    told = capfd.readouterr()
    assert (LAST in told.out) == (status < 2)
    assert ("threshold" in told.err) == (status == 2)


def test_the_command_prints_json_for_programs(files: tuple[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "diff", *files, "--json"]) == 1
    told = json.loads(capfd.readouterr().out)
    assert [change["name"] for change in told["changes"] if change["slower"]] == [LAST]


def test_what_is_no_profile_is_refused(
    tmp_path: Path, files: tuple[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"version": 1}')
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    empty = tmp_path / "empty.json"
    empty.write_bytes(encode(msgspec.structs.replace(profile(), steps=0)))
    refused = tmp_path / "refused.json"
    refused.write_text('{"error": {"message": "no step was measured"}}')
    nowhere = tmp_path / "nowhere.json"
    wrong = {other: "no profile", deep: "no profile", empty: "steps", refused: "no step was", nowhere: "cannot read"}
    for path, complaint in wrong.items():
        assert run(["profile", "diff", files[0], str(path)]) == 2
        assert complaint in capfd.readouterr().err


def test_a_report_is_made_of_a_document_alone(files: tuple[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "report", files[0]]) == 0
    path = Path(capfd.readouterr().out.strip())
    assert path == Path(files[0]).with_suffix(".html")
    assert "http" not in path.read_text().replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
