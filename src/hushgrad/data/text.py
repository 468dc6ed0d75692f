"""SST-2 and E2E, as lists of strings."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor

from hushgrad.data.files import PublishedFiles
from hushgrad.data.split import Split

Sentences = tuple[list[str], Int64[Tensor, " record"]]
"""Sentences, and the class of each."""

Pairs = tuple[list[str], list[str]]
"""Meanings (attributes with values), and a text for each."""

SST2 = PublishedFiles(
    name="SST-2",
    folder="sst2/SST-2",
    source="https://gluebenchmark.com/tasks",
    sha256={
        "train.tsv": "48eac26399f8456935f81dd9e3a745c1430adb6c62e233ccfe22db4a0d15d1d1",
        "dev.tsv": "54a9c12c77e402fc14d6a66a506f24d999f596b0176eb777c972cccc2f9cc4b0",
    },
)
E2E = PublishedFiles(
    name="E2E",
    folder="e2e",
    source="https://github.com/tuetschek/e2e-dataset",
    sha256={
        "trainset.csv": "f27d48df45815288ab15619d47a79028c300fbb7f42e373668aba0b98c1d57c6",
        "devset.csv": "fc26b78cdb849c80545f513b223d1e051138b43882eeb79e3eb153e689c864f9",
        "testset_w_refs.csv": "edc8db685e39bb9824d5bd70c18b1c9b0412d14b527aa960e2d1c8251ee15ccd",
    },
)


def sst2(root: Path | None = None) -> Split[Sentences]:
    """Load SST-2 as in GLUE: 67 349 training phrases and 872 test sentences.

    The test records are GLUE's development set, because its test set has no public labels. Many
    training phrases are parts of one sentence, so a guarantee for one record does not protect a
    whole sentence (see `accounting.group_epsilon`).

    Args:
        root: the folder of the data sets; if None, the one that `HUSHGRAD_DATA` names.

    Raises:
        ValueError: if a file is missing, or is not the published one.

    Example:
        >>> sst2().classes  # doctest: +SKIP
        ('negative', 'positive')

    Reference: Socher et al. 2013, Recursive Deep Models for Semantic Compositionality.
    """
    return sst2_from(SST2, root=root)


def sst2_from(files: PublishedFiles, *, root: Path | None) -> Split[Sentences]:
    """Load a data set whose files are in SST-2's format."""

    def part(file: str) -> Sentences:
        return parse_tsv(files.read(file, root=root), file=file)

    return Split(
        name=files.name,
        source=files.source,
        train=part("train.tsv"),
        test=part("dev.tsv"),
        preparation="sentences as published",
        classes=("negative", "positive"),
    )


def e2e(root: Path | None = None) -> Split[Pairs]:
    """Load E2E: 42 061 training texts about restaurants, 4 672 for validation, 4 693 for tests.

    Each record pairs a restaurant's attributes with a text. The same attributes occur in several
    records, so a guarantee for one record does not protect everything about a restaurant.

    Args:
        root: the folder of the data sets; if None, the one that `HUSHGRAD_DATA` names.

    Raises:
        ValueError: if a file is missing, or is not the published one.

    Example:
        >>> meanings, texts = e2e().train  # doctest: +SKIP

    Reference: Novikova, Dušek and Rieser 2017, The E2E Dataset.
    """
    return e2e_from(E2E, root=root)


def e2e_from(files: PublishedFiles, *, root: Path | None) -> Split[Pairs]:
    """Load a data set whose files are in E2E's format."""

    def part(file: str) -> Pairs:
        return parse_csv(files.read(file, root=root), file=file)

    return Split(
        name=files.name,
        source=files.source,
        train=part("trainset.csv"),
        test=part("testset_w_refs.csv"),
        preparation="texts as published",
        validation=part("devset.csv"),
    )


def parse_tsv(content: bytes, *, file: str) -> Sentences:
    """Parse a header and lines of a sentence, a tab, and 0 or 1.

    Quotes and further tabs are part of the sentence; only a newline ends a line.
    """
    header, *lines = _decode(content, file).removesuffix("\n").split("\n")
    rows = [line.rpartition("\t") for line in lines]
    wrong = [i for i, (_, tab, label) in enumerate(rows, 2) if not tab or label not in ("0", "1")]
    if header != "sentence\tlabel" or wrong:
        line = 1 if header != "sentence\tlabel" else wrong[0]
        raise ValueError(
            f"expected a header and lines of a sentence, a tab and 0 or 1 in {file}, got another "
            f"line {line}; download it again"
        )
    labels = torch.tensor([int(label) for _, _, label in rows], dtype=torch.int64)
    return [sentence for sentence, _, _ in rows], labels


def parse_csv(content: bytes, *, file: str) -> Pairs:
    """Parse rows of the two fields `mr` and `ref`; quoted newlines are part of the text."""
    text = io.StringIO(_decode(content, file), newline="")
    try:
        header, *rows = csv.reader(text, strict=True)
        if header != ["mr", "ref"]:
            raise ValueError(f"header {header}")
        return [meaning for meaning, _ in rows], [reference for _, reference in rows]
    except (csv.Error, ValueError) as e:
        raise ValueError(
            f"expected a header and rows of the fields mr and ref in {file}, got: {e}; "
            "download it again"
        ) from None


def _decode(content: bytes, file: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"expected UTF-8 in {file}, got: {e}; download it again") from None
