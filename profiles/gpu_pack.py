"""One archive with what a bare machine with a GPU lacks for `profiles/gpu_check.py`: FlashInfer and its modules.

    pip install --no-deps --target SITE flashinfer-python==0.7.4 apache-tvm-ffi nvidia-ml-py
    PYTHONPATH=SITE streamengine kernels build --model FOLDER --arch 9.0a --out MODULES
    python profiles/gpu_pack.py --flashinfer SITE --modules MODULES       # writes .gpu/site.tar.gz
    # there: tar xzf .gpu/site.tar.gz -C /tmp/site; python3 profiles/gpu_check.py --path /tmp/site

FlashInfer is cut down to its Python: its headers and sources, nine tenths of it, are for compiling, which is done. The
library that loads the modules, and those of the scheduler, are fetched for the other machine's Python.
"""

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from compiled.attention.modules import list_built  # noqa: E402 (found through the line above)

KEPT = {".py", ".json", ".txt", ".typed"}
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
SCHEDULER = ("msgspec", "jsonschema", "jsonschema-specifications", "referencing", "rpds-py")
"""What the engine's scheduler imports beside what comes with torch and transformers."""

LIMIT = 64 * 2**20
"""Bytes that are easily carried."""


def version_in(site: Path, distribution: str) -> str:
    found = sorted(site.glob(f"{distribution}-*.dist-info"))
    if not found:
        sys.exit(f"error: {site} has no {distribution}; see --help")
    return found[-1].name.removeprefix(f"{distribution}-").removesuffix(".dist-info")


def python_files(site: Path) -> Iterator[tuple[Path, str]]:
    """``(file, its name in the archive)`` of FlashInfer without what only a compiler reads. Templates and sources of
    its attention are read to name a module."""
    data = site / "flashinfer" / "data"
    for path in sorted((site / "flashinfer").rglob("*")):
        if path.is_file() and path.suffix in KEPT and data not in path.parents:
            yield path, str(path.relative_to(site))
    named = (*data.glob("csrc/*.jinja"), *data.glob("csrc/batch_prefill*"))
    others = (*site.glob("flashinfer_python-*.dist-info/METADATA"), *site.glob("pynvml.py"))
    for path in dict.fromkeys((*named, *others)):
        yield path, str(path.relative_to(site))


def modules(folder: Path, version: str) -> Iterator[tuple[Path, str]]:
    found = list_built(folder)
    if not found:
        sys.exit(f"error: {folder} has no NAME/NAME.so; see --help")
    for library, built in found:
        if built.flashinfer != version:
            sys.exit(f"error: {library} was built by flashinfer {built.flashinfer}, not {version}")
        for path in sorted(library.parent.iterdir()):
            yield path, f"flashinfer/data/aot/{library.parent.name}/{path.name}"


def wheels(wanted: list[str], python: str) -> Iterator[tuple[zipfile.ZipFile, str]]:
    """The files of distributions for ``python``, without what they depend on."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", python, "--implementation", "cp", "--dest", folder]
        command += [part for platform in PLATFORMS for part in ("--platform", platform)]
        subprocess.run([*command, *wanted], check=True)
        for wheel in sorted(Path(folder).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    yield archive, name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flashinfer", type=Path, required=True, help="folder that FlashInfer was installed into")
    parser.add_argument("--modules", type=Path, required=True, help="what `streamengine kernels build --out` wrote")
    parser.add_argument("--python", default="3.12", help="the other machine's")
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu")
    arguments = parser.parse_args()
    flashinfer = version_in(arguments.flashinfer, "flashinfer_python")
    arguments.out.mkdir(exist_ok=True)
    target = arguments.out / "site.tar.gz"
    with tarfile.open(target, "w:gz", compresslevel=6) as archive:
        for path, name in (*python_files(arguments.flashinfer), *modules(arguments.modules, flashinfer)):
            archive.add(path, name)
        loader = f"apache-tvm-ffi=={version_in(arguments.flashinfer, 'apache_tvm_ffi')}"
        for wheel, name in wheels([loader, *(f"{name}=={version(name)}" for name in SCHEDULER)], arguments.python):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = wheel.getinfo(name).file_size, 0o644
            archive.addfile(entry, io.BytesIO(wheel.read(name)))
    size = target.stat().st_size
    print(f"{target}: {size / 2**20:.1f} MiB, flashinfer {flashinfer} for Python {arguments.python}")
    if size > LIMIT:
        sys.exit(f"error: more than {LIMIT >> 20} MiB; build fewer modules")


if __name__ == "__main__":
    main()
