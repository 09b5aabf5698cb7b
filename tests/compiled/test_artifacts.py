"""What was compiled once is found again, by whoever may trust it, and a miss says why it is one."""

import logging
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from compiled import inductor, store
from compiled.artifacts import differences
from compiled.store import Store
from tests.compiled import small_piece
from tests.compiled.small_piece import CONFIG, KEY, RECIPE, arguments, compute, fill, find, open_cache

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> inductor.Generated:
    return small_piece.generate(tmp_path_factory.mktemp("workshop"))


@pytest.fixture(scope="module")
def filled(made: inductor.Generated, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with one model in it, to be copied."""
    folder = tmp_path_factory.mktemp("cache") / "compiled"
    fill(open_cache(folder), made)
    return folder


@pytest.fixture
def folder(filled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled, tmp_path / "compiled"))


def entry(folder: Path, kind: str) -> Path:
    (found,) = folder.glob(f"{kind}-*")
    return found


def start(command: str, folder: Path) -> "subprocess.Popen[str]":
    script = [sys.executable, "-m", "tests.compiled.small_piece", command, str(folder)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'sdk'}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(script, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: "subprocess.Popen[str]") -> str:
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return out


def test_a_saved_model_comes_back_whole(folder: Path) -> None:
    loaded = find(open_cache(folder))
    assert loaded is not None
    constants = asdict(loaded.recipe).pop("constants"), asdict(RECIPE).pop("constants")
    assert torch.equal(*(torch.stack(tensors) for tensors in constants))
    assert loaded.recipe.calls == RECIPE.calls
    assert loaded.recipe.sources == RECIPE.sources
    assert loaded.recipe.held == RECIPE.held
    assert loaded.recipe.model == RECIPE.model
    assert loaded.notes == {"selfcheck": 0.5}


@pytest.mark.parametrize("rows", [2, 3, 17])
def test_a_loaded_piece_computes_what_its_graph_says_for_any_number_of_rows(folder: Path, rows: int) -> None:
    loaded = find(open_cache(folder))
    assert loaded is not None
    given = arguments(rows)
    made, view, count = loaded.pieces[KEY](given)
    want = compute(*arguments(rows))  # type: ignore[arg-type]
    assert given == []  # it owns its inputs, so that they are freed as soon as it is done with them
    torch.testing.assert_close((made, view, count), want)


@pytest.mark.slow
def test_another_process_loads_the_same_bits_and_imports_no_compiler(tmp_path: Path) -> None:
    cold, warm = finish(start("fill", tmp_path / "c")), finish(start("find", tmp_path / "c"))
    assert cold.split(" ")[0] == warm.split(" ")[0]
    assert cold.endswith("['torch._dynamo', 'torch._inductor']\n")
    assert warm.endswith("[]\n")


@pytest.mark.slow
def test_two_processes_fill_one_cache_at_once(tmp_path: Path) -> None:
    first, second = (start("fill", tmp_path / "c") for _ in range(2))
    assert finish(first) == finish(second)
    assert sorted(path.name.partition("-")[0] for path in (tmp_path / "c").iterdir()) == ["piece", "recipe"]


def test_two_threads_that_write_one_entry_at_once_leave_one_whole_entry(tmp_path: Path) -> None:
    kept = Store(tmp_path / "c")
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            for done in [pool.submit(kept.write, "a", {}, {"data": bytes(100_000)}) for _ in range(8)]:
                done.result()
            found = kept.read("a")
            assert found is not None and found.files == {"data": bytes(100_000)}
            kept.remove("a")
    assert os.listdir(tmp_path / "c") == []


def test_nothing_in_the_cache_is_a_pickle_or_names_a_place(folder: Path) -> None:
    kinds = {path.suffix for kind in ("piece", "recipe") for path in entry(folder, kind).iterdir()}
    assert kinds == {".json", ".py", ".so", ".safetensors"}
    for path in folder.glob("*-*/*"):
        if path.suffix != ".so":
            assert str(folder).encode() not in path.read_bytes(), path
    moved = folder.rename(folder.with_name("elsewhere"))
    assert find(open_cache(moved)) is not None


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing", "no manifest", "foreign manifest", "outside"])
@pytest.mark.parametrize("kind", ["recipe", "piece"])
def test_a_damaged_entry_is_named_and_replaced(
    made: inductor.Generated, kind: str, damage: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = entry(folder, kind)
    file = max((path / name for name in os.listdir(path) if name != store.MANIFEST), key=lambda p: p.stat().st_size)
    manifest = path / store.MANIFEST
    match damage:
        case "truncated":
            file.write_bytes(file.read_bytes()[:-1])
        case "changed":
            file.write_bytes(file.read_bytes()[:-1] + b"?")
        case "missing":
            file.unlink()
        case "no manifest":
            manifest.write_bytes(manifest.read_bytes()[:100])
        case "foreign manifest":
            manifest.write_text('{"files": {}}')
        case "outside":
            manifest.write_text(manifest.read_text().replace(file.name, "../" + file.name))
    cache = open_cache(folder)
    with caplog.at_level(logging.INFO):
        assert find(cache) is None
    assert str(path) in caplog.text
    fill(cache, made)
    assert find(cache) is not None


def test_a_folder_that_others_can_write_is_neither_read_nor_written(
    made: inductor.Generated, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.chmod(0o775)
    before = sorted(os.listdir(folder))
    cache = open_cache(folder)
    assert f"{folder} can be written by others (mode 775)" in caplog.text
    assert find(cache) is None
    assert cache.piece(KEY) is None
    fill(cache, made)
    assert find(cache) is None
    assert sorted(os.listdir(folder)) == before


@pytest.mark.parametrize("part", ["piece", "piece.py", "cpp_"])
def test_an_entry_that_others_can_write_is_not_loaded(
    part: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = entry(folder, "piece")
    inside = [path / name for name in os.listdir(path) if name.startswith(part) and part != "piece"]
    (inside or [path])[0].chmod(0o777)
    with caplog.at_level(logging.INFO):
        assert find(open_cache(folder)) is None
    assert f"{(inside or [path])[0]} can be written by others (mode 777)" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_not_loaded(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.chown(folder, 12345, 12345)
    assert find(open_cache(folder)) is None
    assert f"{folder} belongs to user 12345" in caplog.text


def test_a_symbolic_link_in_place_of_the_folder_is_not_followed(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert find(open_cache(link)) is None
    assert "is a symbolic link" in caplog.text


def test_what_the_umask_would_give_to_the_group_is_still_loaded(made: inductor.Generated, tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        fill(open_cache(tmp_path / "c"), made)
    finally:
        os.umask(before)
    assert find(open_cache(tmp_path / "c")) is not None


def test_a_cache_that_cannot_be_written_still_gives_what_was_compiled(
    made: inductor.Generated, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    cache = open_cache(tmp_path / "file" / "c")
    fill(cache, made)
    assert "what was compiled is not saved" in caplog.text
    assert find(cache) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "bfloat16"}, "dtype: float32 → bfloat16"),
        ({"hidden_size": 16}, "config.hidden_size: 8 → 16"),
        ({"rope": {"theta": 500000.0}}, "config.rope.theta: 10000.0 → 500000.0"),
        ({"layer_types": ["full"]}, "config.layer_types: None → ['full']"),
    ],
)
def test_a_miss_names_the_factor_that_changed(
    changes: dict[str, object], reason: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = open_cache(folder)
    dtype = changes.pop("dtype", "float32")
    factors = cache.factors(CONFIG | changes, dtype=dtype)
    with caplog.at_level(logging.INFO):
        assert cache.load("tiny", factors) is None
    assert caplog.messages == [f"compiling tiny, which is not in the cache: {reason}"]
    assert cache.explain("tiny", factors) == reason


def test_a_change_of_torch_of_the_cpu_and_of_threads_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    monkeypatch.setattr("compiled.artifacts._cpu", lambda: ("a CPU", "sse4_2 " * 9 + "new_feature"))
    cache = open_cache(folder, threads=3)
    reason = cache.explain("tiny", cache.factors(CONFIG, dtype="float32")) or ""
    assert "+new_feature" in reason
    assert " → 9.9.9" in reason
    assert "threads: 1 → 3" in reason
    assert cache.piece(KEY) is None


def test_what_changes_no_graph_changes_no_key(folder: Path) -> None:
    cache = open_cache(folder)
    factors = cache.factors(CONFIG | {"_name_or_path": "there", "transformers_version": "1"}, dtype="float32")
    assert cache.explain("tiny", factors) is None


def test_models_share_pieces(folder: Path) -> None:
    cache = open_cache(folder)
    assert find(cache, dtype="bfloat16") is None
    assert cache.piece(KEY) is not None
    cache.save("deeper", cache.factors(CONFIG | {"layers": 9}), RECIPE, {})
    assert cache.load("deeper", cache.factors(CONFIG | {"layers": 9})) is not None


def test_a_recipe_whose_piece_is_gone_is_made_again(made: inductor.Generated, folder: Path) -> None:
    cache = open_cache(folder)
    cache.store.remove(entry(folder, "piece").name)
    factors = cache.factors(CONFIG, dtype="float32")
    assert (cache.explain("tiny", factors) or "").endswith("is not there any more")
    fill(cache, made)
    assert cache.explain("tiny", factors) is None


def test_the_first_compile_of_a_model_has_nothing_to_compare_with(tmp_path: Path) -> None:
    cache = open_cache(tmp_path / "c")
    assert cache.explain("tiny", cache.factors(CONFIG)) == "nothing is saved for it yet"


def test_a_listing_tells_size_model_and_pieces(folder: Path) -> None:
    told = {listed.told()["kind"]: listed.told() for listed in Store(folder).entries()}
    assert told["recipe"]["what"] == "1 layers of 1 pieces"
    assert told["piece"]["what"] == "layers.0: norm+qkv"
    assert {line["model"] for line in told.values()} == {"tiny"}
    size = sum(file.stat().st_size for file in entry(folder, "piece").iterdir())
    assert told["piece"]["size_bytes"] == size


def test_clearing_removes_everything(folder: Path) -> None:
    assert Store(folder).clear() > 1000
    assert not folder.exists()
    assert Store(folder).clear() == 0


def test_the_least_recently_used_entries_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Store(tmp_path / "c")
    monkeypatch.setattr(store, "MAX_BYTES", 2500)
    for name in ("a", "b"):
        kept.write(name, {}, {"data": bytes(1000)})
        os.utime(tmp_path / "c" / name / store.MANIFEST, (1, 1 if name == "a" else 2))
    assert kept.read("a") is not None  # a use
    kept.write("c", {}, {"data": bytes(1000)})
    assert {entry.name for entry in kept.entries()} == {"a", "c"}


def test_what_a_killed_process_left_behind_is_removed_after_an_hour(tmp_path: Path) -> None:
    kept = Store(tmp_path / "c")
    kept.write("a", {}, {})
    old, young = (tmp_path / "c" / f".unfinished-{name}" for name in ("old", "young"))
    for path in (old, young):
        path.mkdir()
    os.utime(old, (1, 1))
    kept.write("b", {}, {})
    assert (old.exists(), young.exists()) == (False, True)


def test_the_compiler_works_in_a_folder_of_this_process_which_goes_with_the_cache(tmp_path: Path) -> None:
    cache, other = open_cache(tmp_path / "c"), open_cache(tmp_path / "c")
    workshop = cache.workshop
    assert workshop == cache.workshop != other.workshop
    assert workshop.stat().st_mode & 0o777 == 0o700
    del cache
    assert not workshop.exists()


def test_a_whole_entry_is_kept_when_it_is_saved_again(made: inductor.Generated, folder: Path) -> None:
    before = entry(folder, "piece").stat().st_ino
    fill(open_cache(folder), made)
    assert entry(folder, "piece").stat().st_ino == before


def test_differences_of_long_texts_are_words() -> None:
    old, new = " ".join("abcdefghij"), " ".join("abcdefghik")
    assert list(differences({"flags": old, "same": 1}, {"flags": new, "same": 1})) == ["flags: -j +k"]


def test_code_that_needs_what_is_not_in_it_is_not_kept() -> None:
    with pytest.raises(inductor.NotPortable, match="it needs helper"):
        inductor.prune("def call(args):\n    return helper(args)\n", {}, {})


def test_code_that_would_compile_when_it_is_loaded_is_not_kept() -> None:
    with pytest.raises(inductor.NotPortable, match="it compiles when it is loaded"):
        inductor.prune("k = async_compile.cutlass('')\ndef call(args):\n    return k(args)\n", {}, {})


def test_tritons_kernels_are_kept_as_text_and_all_that_is_not_needed_is_not() -> None:
    kernel = "k = async_compile.triton('k', '''\n@triton.jit\ndef k(x): pass\n''', device_str='cuda')\n"
    call = "def call(args):\n    return k.run(args)\n"
    source = f"import os\nasync_compile = AsyncCompile()\n{kernel}async_compile.wait(globals())\n{call}"
    assert inductor.prune(source, {}, {}) == kernel + call


def test_tritons_kernels_are_compiled_when_a_piece_is_loaded_and_what_comes_of_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    compiled: list[tuple[str, str | None, int]] = []

    class Doubled:
        run = staticmethod(lambda given: [2 * one for one in given])

    def triton(_: AsyncCompile, name: str, source: str, device_str: str) -> type[Doubled]:
        compiled.append((name, os.environ.get("TORCHINDUCTOR_CACHE_DIR"), config.compile_threads))
        return Doubled

    monkeypatch.setattr(AsyncCompile, "triton", triton)
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    source = "k = async_compile.triton('k', '', device_str='cuda')\ndef call(args):\n    return k.run(args)\n"
    call = inductor.load(inductor.Generated(source, None, {}), tmp_path / "triton")
    assert list(call([1, 2])) == [2, 4]
    assert compiled == [("k", str(tmp_path / "triton"), 1)]
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before
    assert (tmp_path / "triton").stat().st_mode & 0o077 == 0, "nobody else may write code there"


def test_a_kernel_that_does_not_load_here_is_a_reason_to_compile_again(made: inductor.Generated, folder: Path) -> None:
    cache = open_cache(folder)
    assert made.library is not None
    torn = made.library.with_name("torn.so")
    torn.write_bytes(b"not a library")
    cache.store.remove(entry(folder, "piece").name)
    cache.save("tiny", cache.factors(CONFIG), RECIPE, {KEY: inductor.Generated(made.source, torn, made.constants)})
    reason = cache.explain("tiny", cache.factors(CONFIG, dtype="float32"))
    assert "does not load: ImportError" in (reason or "")
