"""Files are found, verified, and named when they are missing or not the published ones."""

import gzip
import hashlib
from pathlib import Path

import pytest

from hushgrad.data import DATASETS, digits, mnist
from hushgrad.data.files import PublishedFiles, data_root
from hushgrad.data.idx import MNIST

CONTENT = b"some records"
FILES = PublishedFiles(
    "toy", "toys", "https://example.org/toy", {"a": hashlib.sha256(CONTENT).hexdigest()}
)


def stored(root: Path, content: bytes, files: PublishedFiles = FILES, file: str = "a") -> Path:
    path = root / files.folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_a_published_file_is_read(tmp_path: Path) -> None:
    stored(tmp_path, CONTENT)
    assert FILES.read("a", root=tmp_path) == CONTENT


@pytest.mark.parametrize("content", [b"", CONTENT[:-1], CONTENT + b"\n", b"s0me records"], ids=repr)
def test_another_content_is_refused_by_its_checksum(tmp_path: Path, content: bytes) -> None:
    path = stored(tmp_path, content)
    with pytest.raises(ValueError, match="expected SHA-256") as refusal:
        FILES.read("a", root=tmp_path)
    told = str(refusal.value)
    assert str(path) in told and FILES.source in told
    assert FILES.sha256["a"] in told and hashlib.sha256(content).hexdigest() in told


@pytest.mark.parametrize("name", sorted(DATASETS.keys() - {"digits"}))
def test_a_missing_file_is_named_with_its_place_and_source(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="expected a file of") as refusal:
        DATASETS[name](tmp_path)
    told = str(refusal.value)
    assert f" {tmp_path / name}/" in told and "; download it from http" in told


def test_a_loader_never_parses_a_file_that_is_not_the_published_one(tmp_path: Path) -> None:
    """A well-formed file of one image is refused all the same."""
    header = bytes((0, 0, 8, 3)) + b"".join(n.to_bytes(4, "big") for n in (1, 28, 28))
    content = gzip.compress(header + bytes(784))
    path = stored(tmp_path, content, MNIST, "train-images-idx3-ubyte.gz")
    with pytest.raises(ValueError, match="expected SHA-256") as refusal:
        mnist(tmp_path)
    assert str(path) in str(refusal.value)


def test_the_root_is_the_argument_then_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUSHGRAD_DATA", "/somewhere")
    assert data_root(tmp_path) == tmp_path
    assert data_root(None) == Path("/somewhere")


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_root_the_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("HUSHGRAD_DATA", raising=False)
    if value is not None:
        monkeypatch.setenv("HUSHGRAD_DATA", value)
    with pytest.raises(ValueError, match="or set the environment variable HUSHGRAD_DATA"):
        mnist()
    assert len(digits().train[1]) == 1437
