"""The bits of a release do not depend on what computes them."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from numba.core.errors import NumbaError
from torch import Tensor

from hushgrad.noise import Noise, compiled, gaussian, laplace, release, releasing, standard, threads
from hushgrad.noise.mixing import WORTH_COMPILING
from hushgrad.rng import Rng
from hushgrad.types import Bounded

CHUNK, PIECE, SMALL = threads.CHUNK, threads.PIECE, releasing._SMALL
LENGTHS = [0, 1, 2, 3, 7, 8, 15, 16, 17, 1000, 1001, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3]
PLAIN = partial(standard.add_pairs, standard.normal_pair)
DTYPES = [torch.float32, torch.float64]


@pytest.fixture
def machine_code() -> compiled.AddNormals:
    """Part of the development tools, so its absence is a failure and not a reason to skip."""
    found = compiled.compiled_add_normals()
    assert found is not None, "Numba is missing, or its bits differ"
    return found


@pytest.fixture
def threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def numbers(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of all sizes."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, generator=generator, dtype=torch.float64)
    return (x * torch.exp(3 * torch.randn(count, generator=generator))).to(dtype)


def released(total: Bounded, noise: Noise | None = None) -> dict[str, Tensor]:
    return release(total, noise or gaussian(1.3), rng=Rng.fixed(4), step=2).values


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[n].view(torch.int64), other[n].view(torch.int64)) for n in one)


def mixed() -> Bounded:
    """Small tensors between large ones, of odd and even sizes, one of several pieces."""
    sizes = [3, 0, 1, SMALL - 1, 2, SMALL, 5, SMALL + 1, PIECE + 77, 1, 1, 2 * PIECE + 1, 9]
    sums = {f"w{k}": numbers(n, DTYPES[k % 5 == 3]) for k, n in enumerate(sizes)}
    shaped = {"square": numbers(49).view(7, 7), "scalar": numbers(1)[0]}
    return Bounded(sums | shaped, l2=0.7, l1=3.0)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [2.0**-14, 2.0**-70])
def test_machine_code_and_arrays_have_the_same_bits(
    machine_code: compiled.AddNormals, length: int, dtype: torch.dtype, step: float
) -> None:
    """Also every bit of the noise, on a grid so fine that nothing is rounded."""
    words, total = Rng.fixed(length).words(length + length % 2), numbers(length, dtype).numpy()
    found, expected = np.full(length, np.nan), np.full(length, np.nan)
    machine_code(words, total, found, 1.7, step)
    PLAIN(words, total, expected, 1.7, step)
    assert np.array_equal(found.view(np.uint64), expected.view(np.uint64))


def test_machine_code_and_arrays_have_the_same_bits_at_extreme_words(
    machine_code: compiled.AddNormals,
) -> None:
    powers = np.uint64(1) << np.arange(64, dtype=np.uint64)
    ends = np.concatenate([powers, ~powers, np.zeros(1, np.uint64), ~np.zeros(1, np.uint64)])
    words = np.stack(np.meshgrid(ends, ends), axis=-1).reshape(-1)
    found, expected = np.empty(len(words)), np.empty(len(words))
    machine_code(words, np.zeros(len(words)), found, 1.0, 2.0**-200)
    PLAIN(words, np.zeros(len(words)), expected, 1.0, 2.0**-200)
    assert np.array_equal(found.view(np.uint64), expected.view(np.uint64))


NOISES = pytest.mark.parametrize("noise", [gaussian(1.3), laplace(0.5)], ids=str)


@NOISES
@pytest.mark.usefixtures("threads_restored")
def test_the_number_of_threads_does_not_show(noise: Noise) -> None:
    total, found = mixed(), []
    for count in (1, 2, 3, 8):
        torch.set_num_threads(count)
        found.append(released(total, noise))
    assert all(same(found[0], other) for other in found[1:])


@NOISES
@pytest.mark.parametrize(("chunk", "piece"), [(1 << 10, 1 << 12), (5000, 15000), (PIECE, PIECE)])
def test_the_chunks_do_not_show(
    monkeypatch: pytest.MonkeyPatch, noise: Noise, chunk: int, piece: int
) -> None:
    expected = released(mixed(), noise)
    monkeypatch.setattr(threads, "CHUNK", chunk)
    monkeypatch.setattr(threads, "PIECE", piece)
    assert same(released(mixed(), noise), expected)


def test_machine_code_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = released(mixed())
    monkeypatch.setattr(releasing, "compiled_add_normals", lambda: None)
    assert same(released(mixed()), expected)


def test_a_large_release_uses_machine_code_and_a_small_one_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    monkeypatch.setattr(releasing, "is_loaded", lambda: False)
    monkeypatch.setattr(releasing, "compiled_add_normals", lambda: asked.append(True))
    released(Bounded({"w": numbers(1000)}, 1.0))
    assert not asked
    released(Bounded({"w": numbers(WORTH_COMPILING)}, 1.0))
    assert asked


def test_machine_code_with_other_bits_is_not_used() -> None:
    """A fused product and sum, for example, would round once where arrays round twice."""

    def off_by_a_bit(words, total, out, scale, step) -> None:
        PLAIN(words, total, out, scale, step)
        out[-1] = np.nextafter(out[-1], 9.0)

    assert compiled._agrees(PLAIN)
    assert not compiled._agrees(off_by_a_bit)


def test_where_the_code_cannot_be_kept_it_is_compiled_anew(
    monkeypatch: pytest.MonkeyPatch, machine_code: compiled.AddNormals
) -> None:
    import numba

    tried, njit = [], numba.njit

    def unkept(*, cache: bool, **options: object) -> object:
        tried.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(**options)

    monkeypatch.setattr(numba, "njit", unkept)
    assert inspect.unwrap(compiled.compiled_add_normals)() is not None
    assert tried == [True, False]


@pytest.mark.parametrize("problem", [OSError("full"), NumbaError("not understood")])
def test_a_compiler_that_fails_only_costs_time(
    monkeypatch: pytest.MonkeyPatch, machine_code: compiled.AddNormals, problem: Exception
) -> None:
    def fails(**options: object) -> None:
        raise problem

    monkeypatch.setattr("numba.njit", fails)
    assert inspect.unwrap(compiled.compiled_add_normals)() is None


def test_an_entry_gets_the_value_of_its_place() -> None:
    """Entry i of the whole sum, large tensors starting at even places, is word i's."""
    sums = {"a": torch.zeros(3), "b": torch.zeros(SMALL), "c": torch.zeros(2), "d": torch.zeros(4)}
    runs = list(releasing._runs(sums))
    vectors = releasing._noised(runs, gaussian(1.0), 1.0, Rng.fixed(1))
    out = releasing._by_name(runs, sums, vectors)
    drawn = standard.standard_normal(SMALL + 10, Rng.fixed(1))
    expected = (drawn / 2.0**-14).round() * 2.0**-14
    assert torch.equal(out["a"], expected[:3])
    assert torch.equal(out["b"], expected[4 : SMALL + 4])
    assert torch.equal(torch.cat([out["c"], out["d"]]), expected[SMALL + 4 :])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_other_types_are_released_as_the_numbers_they_are(dtype: torch.dtype) -> None:
    x = (8 * numbers(2001, torch.float64).clamp(-9, 9)).to(dtype)
    out = released(Bounded({"w": x, "v": numbers(9)}, 1.0))["w"]
    assert out.dtype == torch.float64
    assert (out - x.double()).std().item() == pytest.approx(1.3, rel=0.1)


def test_a_release_does_not_touch_its_sum_or_share_its_memory() -> None:
    for sigma in (0.0, 1.0):
        sums = {"w": numbers(SMALL, torch.float64), "v": numbers(5, torch.float64)}
        before = {n: x.clone() for n, x in sums.items()}
        out = released(Bounded(sums, 1.0), gaussian(sigma))
        for name in sums:
            out[name].zero_()
            assert torch.equal(sums[name], before[name])


def test_a_sum_that_requires_a_gradient_is_released_without_one() -> None:
    weight = numbers(9).requires_grad_()
    out = released(Bounded({"w": weight * 2, "v": weight}, 1.0))
    assert not out["w"].requires_grad


RELEASE = """
import hashlib, os, sys, torch
from hushgrad.noise import gaussian, release
from hushgrad.rng import Rng
from hushgrad.types import Bounded

def total(size):
    return Bounded({"w": torch.arange(size) / 7, "b": torch.arange(5.0)}, 1.0)

def released(total):
    out = release(total, gaussian(1.3), rng=Rng.fixed(0), step=0)
    return hashlib.sha256(b"".join(x.numpy().tobytes() for x in out.values.values())).hexdigest()
"""


def output(program: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return done.stdout.strip()


@pytest.mark.parametrize("without_numba", [False, True])
def test_the_bits_are_those_of_the_last_version(without_numba: bool) -> None:
    """A run that is resumed after an update replays its noise; a change here breaks that."""
    hidden = "import sys; sys.modules['numba'] = None\n" if without_numba else ""
    loaded = "; print(bool(sys.modules.get('numba')))"
    digest, compiled = output(hidden + RELEASE + "print(released(total(70001)))" + loaded).split()
    assert digest == "b3bd21308cdec876dbfb7f5916b5e541a2b1a0e10dc8b2ec9cd6d6362b20c288"
    assert compiled == str(not without_numba)


def test_a_small_release_does_not_import_numba() -> None:
    assert output(RELEASE + "released(total(9000)); print('numba' in sys.modules)") == "False"


def test_a_forked_process_releases_too() -> None:
    """Threads do not outlive a release, so the child misses none."""
    fork = """
large = total(600_000)
before, child = released(large), os.fork()
if child == 0:
    os._exit(released(large) != before)
print(os.waitpid(child, 0)[1])
"""
    assert output(RELEASE + fork) == "0"
