"""Each format, on small files that the tests write; their checksums are those of these files."""

import bz2
import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from hushgrad.data import Images, Split
from hushgrad.data.cifar import RECORD, from_binary
from hushgrad.data.files import PublishedFiles
from hushgrad.data.idx import from_idx, parse_idx
from hushgrad.data.tables import from_libsvm, parse_libsvm
from hushgrad.data.text import e2e_from, parse_csv, parse_tsv, sst2_from


def written(root: Path, contents: dict[str, bytes], name: str = "toy") -> PublishedFiles:
    """Files in a folder of their own, published with their checksums."""
    for file, content in contents.items():
        (root / file).write_bytes(content)
    sums = {file: hashlib.sha256(content).hexdigest() for file, content in contents.items()}
    return PublishedFiles(name, ".", "https://example.org/toy", sums)


def idx(values: np.ndarray) -> bytes:
    sizes = b"".join(n.to_bytes(4, "big") for n in values.shape)
    return gzip.compress(bytes((0, 0, 8, values.ndim)) + sizes + values.tobytes(), mtime=0)


def pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def idx_split(root: Path, images: int = 5, labels: int = 5) -> Split[Images]:
    files = written(
        root,
        {
            "train-images-idx3-ubyte.gz": idx(pixels(images, 4, 3)),
            "train-labels-idx1-ubyte.gz": idx(np.arange(labels, dtype=np.uint8)),
            "t10k-images-idx3-ubyte.gz": idx(pixels(2, 4, 3)),
            "t10k-labels-idx1-ubyte.gz": idx(np.array([9, 0], dtype=np.uint8)),
        },
    )
    return from_idx(files, tuple("0123456789"), root=root)


def test_idx_files_are_read(tmp_path: Path) -> None:
    split = idx_split(tmp_path)
    images, labels = split.train
    assert images.shape == (5, 1, 4, 3) and images.dtype == torch.float32
    torch.testing.assert_close(images[:, 0] * 255, torch.tensor(pixels(5, 4, 3)).float())
    assert labels.dtype == torch.int64 and labels.tolist() == [0, 1, 2, 3, 4]
    assert split.test[0].shape == (2, 1, 4, 3) and split.test[1].tolist() == [9, 0]
    assert (split.name, split.preparation) == ("toy", "pixels ÷ 255")


def test_idx_files_of_different_lengths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"label for each of the 5 images .*, got 4"):
        idx_split(tmp_path, labels=4)


WHOLE = gzip.decompress(idx(pixels(5, 4, 3)))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (idx(pixels(5, 4, 3))[:-9], "expected images to decompress"),
        (idx(pixels(5, 4, 3))[:5], "expected images to decompress"),
        (WHOLE, "expected images to decompress"),
        (
            gzip.compress(WHOLE[:-1], mtime=0),
            "expected 60 bytes after the header of images, got 59",
        ),
        (
            gzip.compress(WHOLE + b"0", mtime=0),
            "expected 60 bytes after the header of images, got 61",
        ),
        (gzip.compress(WHOLE[:16], mtime=0), "expected 60 bytes after the header of images, got 0"),
        (gzip.compress(WHOLE[:15], mtime=0), "expected images to start with 0 0 8 3 and 3 sizes"),
        (gzip.compress(b"", mtime=0), "got nothing"),
        (idx(pixels(5)), "got 00 00 08 01"),
    ],
)
def test_a_damaged_idx_file_is_refused(content: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_idx(content, file="images", dimensions=3)


def test_cifar_files_are_read_in_their_order(tmp_path: Path) -> None:
    """The files are joined in their order, and a record is its class and three planes."""
    raw = pixels(7, RECORD)
    raw[:, 0] = np.arange(7)
    parts = {"data_batch_1.bin": raw[:3], "data_batch_2.bin": raw[3:5], "test_batch.bin": raw[5:]}
    files = written(tmp_path, {file: part.tobytes() for file, part in parts.items()})
    split = from_binary(files, root=tmp_path)
    images, labels = split.train
    assert labels.tolist() == [0, 1, 2, 3, 4] and split.test[1].tolist() == [5, 6]
    assert images.shape == (5, 3, 32, 32)
    green = raw[4, 1 + 1024 : 1 + 2048].reshape(32, 32)
    assert round(float(images[4, 1, 30, 2]) * 255) == green[30, 2]
    assert float(images.min()) >= 0 and float(images.max()) <= 1


def test_a_truncated_cifar_file_is_refused(tmp_path: Path) -> None:
    files = written(tmp_path, {"data_batch_1.bin": bytes(RECORD + 5), "test_batch.bin": b""})
    with pytest.raises(ValueError, match=r"3073 bytes in data_batch_1.bin, got 5 bytes at its end"):
        from_binary(files, root=tmp_path)


LINES = b"+1 1:0.5 3:-2\n-1 2:1 \n-1\n"


@pytest.mark.parametrize("suffix", ["", ".bz2"])
def test_libsvm_files_compressed_or_not(tmp_path: Path, suffix: str) -> None:
    """Indices count from 1, absent ones are 0, and the largest need not occur."""
    files = written(tmp_path, {"toy": LINES, "toy.t": b"-1 2:7\n"})
    if suffix:
        for file in files.sha256:
            plain = tmp_path / file
            (tmp_path / f"{file}.bz2").write_bytes(bz2.compress(plain.read_bytes()))
            plain.unlink()
    split = from_libsvm(files, 4, classes=("no", "yes"), root=tmp_path)
    features, labels = split.train
    assert features.tolist() == [[0.5, 0, -2, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert features.dtype == torch.float32 and labels.tolist() == [1, 0, 0]
    assert split.test[0].tolist() == [[0, 7, 0, 0]]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (bz2.compress(LINES)[:-4], "expected toy.bz2 to decompress"),
        (LINES, "expected toy.bz2 to decompress"),
        (bz2.compress(LINES[:-3]), r"expected SHA-256 [0-9a-f]{64} for \S*toy\.bz2, got"),
    ],
)
def test_a_damaged_libsvm_file_is_refused(tmp_path: Path, content: bytes, told: str) -> None:
    files = written(tmp_path, {"toy": LINES, "toy.t": LINES})
    (tmp_path / "toy").unlink()
    (tmp_path / "toy.bz2").write_bytes(content)
    with pytest.raises(ValueError, match=told):
        from_libsvm(files, 4, classes=("no", "yes"), root=tmp_path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"+1 1:0.5 5:1\n", "with 4 features, got:"),
        (b"+1 0:1\n", "got:"),
        (b"+1 1:x\n", "got:"),
        (b"2 1:1\n", "expected labels -1 and [+]1 in toy, got"),
    ],
)
def test_a_malformed_libsvm_text_is_refused(text: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_libsvm(text, 4, file="toy")


def test_sst2_files_are_read(tmp_path: Path) -> None:
    """Quotes, further tabs and exotic line ends belong to the sentence."""
    rows = ['"quoted \t1', "a\ttab\t0", "a\x85line\u2028end\t1", "\t0"]
    train = "\n".join(["sentence\tlabel", *rows, ""]).encode()
    files = written(tmp_path, {"train.tsv": train, "dev.tsv": b"sentence\tlabel\nfine\t1"})
    split = sst2_from(files, root=tmp_path)
    assert split.train[0] == ['"quoted ', "a\ttab", "a\x85line\u2028end", ""]
    assert split.train[1].tolist() == [1, 0, 1, 0] and split.train[1].dtype == torch.int64
    assert split.test[0] == ["fine"] and split.classes == ("negative", "positive")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"sentence\tlabel\nfine\t1\ncut of", "got another line 3"),
        (b"sentence\tlabel\nfine\t2\n", "got another line 2"),
        (b"fine\t1\n", "got another line 1"),
        (b"", "got another line 1"),
        (b"sentence\tlabel\n\xff\t1\n", "expected UTF-8 in dev.tsv"),
    ],
)
def test_a_malformed_tsv_is_refused(content: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_tsv(content, file="dev.tsv")


def test_e2e_files_are_read(tmp_path: Path) -> None:
    """Quoted commas, newlines and doubled quotes belong to the text."""
    train = 'mr,ref\r\n"name[A], near[B]","A is\nnear ""B""."\r\nname[C],C £5\r\n'.encode()
    files = written(
        tmp_path,
        {
            "trainset.csv": train,
            "devset.csv": b"mr,ref\nx,y\n",
            "testset_w_refs.csv": b'"mr","ref"\n"u","v"\n',
        },
    )
    split = e2e_from(files, root=tmp_path)
    assert split.train == (["name[A], near[B]", "name[C]"], ['A is\nnear "B".', "C £5"])
    assert split.validation == (["x"], ["y"]) and split.test == (["u"], ["v"])
    assert split.classes == ()


@pytest.mark.parametrize(
    "content",
    [b"", b"x,y\n", b"mr,ref\nx\n", b"mr,ref\nx,y,z\n", b'mr,ref\n"x,y\n'],
    ids=["empty", "no header", "one field", "three fields", "open quote"],
)
def test_a_malformed_csv_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="rows of the fields mr and ref in toy, got: "):
        parse_csv(content, file="toy")
