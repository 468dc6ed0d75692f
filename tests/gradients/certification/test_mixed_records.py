"""Whatever would break the guarantee is refused, with what to do; what would not is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import agree, check, expected, private
from torch import Tensor, nn

from hushgrad import Refused, replace_batchnorm
from hushgrad.gradients import Form, auto, check_optimizer, dense, loop, per_sample, traced

FORMS = pytest.mark.parametrize("form", [auto, dense, loop], ids=["auto", "dense", "loop"])


def untouched(model: nn.Module) -> bool:
    """No gradient was left behind, and no class."""
    return all(p.grad is None and type(p) is nn.Parameter for p in model.parameters())


def squared(model: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    return lambda x: model(x).flatten(1).square().sum(1)


# --- batch norm ---------------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize(
    ("norm", "name"),
    [
        (nn.BatchNorm1d(4), "layer '1' is a BatchNorm1d"),
        (nn.BatchNorm1d(4, affine=False, track_running_stats=False), "layer '1' is a BatchNorm1d"),
        (nn.SyncBatchNorm(4), "layer '1' is a SyncBatchNorm"),
    ],
    ids=["affine", "bare", "sync"],
)
def test_batch_norm_in_training_mode(norm: nn.Module, name: str, form: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), norm)
    message = f"{name} in training mode.*normalises each record by the others.*replace_batchnorm"
    with pytest.raises(Refused, match=message):
        per_sample(squared(model), private(model), torch.randn(8, 3), form=form, modules=(model,))


@FORMS
@pytest.mark.parametrize("modules", [True, False])
def test_batch_norm_without_statistics_couples_in_eval_too(modules: bool, form: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False)).eval()
    with pytest.raises(Refused, match=r"BatchNorm|batch_norm"):
        per_sample(
            squared(model),
            private(model),
            torch.randn(8, 3),
            form=form,
            modules=(model,) if modules else (),
        )


@FORMS
def test_functional_batch_norm(form: Any) -> None:
    layer, scale = nn.Linear(3, 4), nn.Parameter(torch.ones(4))
    params = {**private(layer), "scale": scale}

    def loss(x: Tensor) -> Tensor:
        return F.batch_norm(layer(x), None, None, scale, training=True).square().sum(1)

    with pytest.raises(Refused, match=r"BatchNorm|batch_norm"):
        per_sample(loss, params, torch.randn(8, 3), form=form)


def test_batch_norm_in_eval_mode_is_exact() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model(torch.randn(50, 3))
    model[1].eval()
    check(squared(model), model, torch.randn(9, 3))


def test_replacing_batch_norm_mends_it() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Sequential(nn.BatchNorm2d(6))
    )
    with torch.no_grad():
        for norm in (model[1], model[3][0]):
            norm.weight.normal_()
            norm.bias.normal_()
    before = {k: v.clone() for k, v in model.state_dict().items() if k.endswith(("weight", "bias"))}
    assert replace_batchnorm(model) is model
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[k], v) for k, v in before.items())
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    check(squared(model), model, torch.randn(5, 1, 6, 6))


def test_replacing_keeps_what_was_frozen_and_the_mode() -> None:
    norm = nn.BatchNorm1d(16).eval()
    norm.weight.requires_grad_(False)
    new = replace_batchnorm(norm, max_groups=4)
    assert isinstance(new, nn.GroupNorm)
    assert (new.num_groups, new.training, new.weight.requires_grad) == (2, False, False)
    assert new.bias.requires_grad


# --- samples that are mixed ---------------------------------------------------------------------


def _contrastive(h: Tensor) -> Tensor:
    h = F.normalize(h, dim=1)
    return F.cross_entropy(h @ h.mT, torch.arange(len(h)), reduction="none")


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "centred": lambda h: (h - h.mean(0)).square().sum(1),
    "a little": lambda h: h.square().sum(1) + 0.01 * h.mean(),
    "normalised": lambda h: h.square().sum(1) / h.square().sum(),
    "by a detached sum": lambda h: h.square().sum(1) / h.detach().square().sum(),
    "by the batch size": lambda h: h.square().sum(1) / len(h),
    "contrastive": _contrastive,
    "softmax over the batch": lambda h: -F.log_softmax(h, 0).sum(1),
    "softmax over a swapped dimension": lambda h: h.mT.softmax(1).mT.square().sum(1),
    "largest": lambda h: h.square().sum(1) + h.max(),
    "neighbour": lambda h: (h * h.roll(1, 0)).sum(1),
    "running sum": lambda h: h.cumsum(0).square().sum(1),
    "rank": lambda h: h.square().sum(1) * (1 + h[:, 0].argsort().argsort()),
    "place": lambda h: h.square().sum(1) * torch.arange(1, 1 + len(h)),
}


@pytest.mark.parametrize("size", [1, 2, 8, 9])
@pytest.mark.parametrize("name", MIXING)
def test_mixed_samples(name: str, size: int) -> None:
    layer = nn.Linear(3, 5)
    with pytest.raises(Refused, match=r"depends on other records: in a batch it is not what"):
        per_sample(lambda x: MIXING[name](layer(x)), private(layer), torch.randn(size, 3))
    assert untouched(layer)


@FORMS
def test_mixed_samples_in_every_form(form: Any) -> None:
    layer = nn.Linear(3, 5)
    with pytest.raises(Refused, match="compute each record's loss from that record alone"):
        per_sample(lambda x: _contrastive(layer(x)), private(layer), torch.randn(8, 3), form=form)


@pytest.mark.parametrize("value", [torch.ones(8, 3), torch.zeros(8, 3)], ids=["ones", "zeros"])
def test_mixing_is_seen_when_all_records_are_alike(value: Tensor) -> None:
    layer = nn.Linear(3, 5)

    def loss(x: Tensor) -> Tensor:
        h = layer(x)
        return (h - h.mean(0)).square().sum(1) + h.square().sum(1)

    with pytest.raises(Refused, match="depends on other records"):
        per_sample(loss, private(layer), value)


def test_mixing_is_seen_when_whole_numbers_are_alike() -> None:
    """One token for each record: there is nothing to shuffle within a record."""
    table = nn.Embedding(5, 3)

    def loss(index: Tensor) -> Tensor:
        h = table(index)
        return (h - h.mean(0)).square().sum(1) + h.square().sum(1)

    with pytest.raises(Refused, match=r"depends on other records|alike|differ"):
        per_sample(loss, private(table), torch.full((8,), 2))


def test_mixing_in_the_gradient_only_is_never_silently_wrong() -> None:
    """The value does not depend on the others, the straight-through gradient does."""
    layer = nn.Linear(3, 5)

    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Tensor:
            return h.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0] + gradients[0].mean(0)

    def loss(x: Tensor) -> Tensor:
        return Through.apply(layer(x)).square().sum(1)

    with pytest.raises(Refused, match=r"weight|bias"):
        per_sample(loss, private(layer), torch.randn(8, 3), form=traced)


class Capacity(nn.Module):
    """Drops what exceeds its capacity, as a mixture of experts may."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.layer, self.capacity = nn.Linear(3, 5), capacity

    def forward(self, x: Tensor) -> Tensor:
        kept = (torch.arange(len(x)) < self.capacity).unsqueeze(1)
        return self.layer(x) * kept


@FORMS
def test_a_capacity_shows_at_the_largest_batch_only(form: Any) -> None:
    model = Capacity(30)
    loss, params = squared(model), private(model)
    per_sample(loss, params, torch.randn(8, 3), form=form, modules=(model,))
    per_sample(loss, params, torch.randn(24, 3), form=form, modules=(model,))
    with pytest.raises(Refused, match=r"depends on other records.*in a batch it .*a limit over"):
        per_sample(loss, params, torch.randn(40, 3), form=form, modules=(model,))


# --- re-tests -----------------------------------------------------------------------------------


class Switch:
    """What a certificate does not know of: the attribute of an object that the loss reads."""

    mixing = False


@FORMS
@pytest.mark.parametrize(("clean", "caught"), [(1, 0), (2, 0), (3, 1), (5, 3), (6, 2)])
def test_a_model_that_starts_mixing_is_caught_at_the_next_test(
    clean: int, caught: int, form: Any
) -> None:
    """Call 1 certifies; the calls after it are numbered 1, 2, ... and 1, 2, 4, 8 are tested."""
    switch, layer = Switch(), nn.Linear(3, 5)

    def loss(x: Tensor) -> Tensor:
        h = layer(x)
        return (h - h.mean(0) if switch.mixing else h).square().sum(1)

    for _ in range(clean):
        per_sample(loss, private(layer), torch.randn(8, 3), form=form)
    switch.mixing = True
    for _ in range(caught):
        per_sample(loss, private(layer), torch.randn(8, 3), form=form)
    with pytest.raises(Refused, match="depends on other records"):
        per_sample(loss, private(layer), torch.randn(8, 3), form=form)


def test_a_nan_record_neither_stops_a_test_nor_counts() -> None:
    layer = nn.Linear(3, 5)
    for _ in range(5):
        batch = torch.randn(4, 3)
        batch[1] = torch.nan
        found = per_sample(squared(layer), private(layer), batch)
        assert found.sq_norms()["weight"].isfinite().tolist() == [True, False, True, True]
        weights = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
        sums = found.weighted_sum(dict.fromkeys(("weight", "bias"), weights))
        alone = per_sample(squared(layer), private(layer), batch[[0, 2, 3]])
        ones = torch.ones(3, dtype=torch.float64)
        exact = alone.weighted_sum(dict.fromkeys(("weight", "bias"), ones))
        torch.testing.assert_close(sums, exact)


# --- the loss -----------------------------------------------------------------------------------

SHAPES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "scalar": (lambda h: h.sum(), r"float32 tensor of 0 dimensions, as after a mean"),
    "mean": (lambda h: h.mean(), r"float32 tensor of 0 dimensions, as after a mean"),
    "too short": (lambda h: h.sum(1)[1:], r"tensor of 1 dimension, not as long as the batch"),
    "too long": (lambda h: h.flatten(), r"tensor of 1 dimension, not as long as the batch"),
    "two dimensions": (lambda h: h, r"tensor of 2 dimensions, as long as the batch"),
    "a column": (lambda h: h.sum(1, keepdim=True), r"tensor of 2 dimensions, as long as the batch"),
    "whole numbers": (
        lambda h: h.sum(1).long(),
        r"int64 tensor of 1 dimension, as long as the batch",
    ),
    "a list": (lambda h: list(h.sum(1)), "got a list"),
    "a number": (lambda h: float(h.detach().sum()), "got a float"),
    "nothing": (lambda h: None, "got a NoneType"),
}


@FORMS
@pytest.mark.parametrize(("reduce", "came"), SHAPES.values(), ids=SHAPES)
def test_a_loss_that_is_not_one_value_for_each_record(
    reduce: Callable[[Tensor], Any], came: str, form: Any
) -> None:
    layer = nn.Linear(3, 5)
    message = rf"one loss for each record.*{came}.*; use reduction='none'"
    with pytest.raises(Refused, match=message):
        per_sample(lambda x: reduce(layer(x)), private(layer), torch.randn(8, 3), form=form)


# --- buffers ------------------------------------------------------------------------------------


class Writes(nn.Module):
    """A linear layer whose forward pass writes a buffer."""

    def __init__(self, write: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(3, 5), write
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.write(self, x.detach())
        return self.layer(x)


def _replace(m: Any, x: Tensor) -> None:
    m.seen = 0.9 * m.seen + x.mean(0)


def _through_data(m: Any, x: Tensor) -> None:
    m.seen.data.add_(x.mean(0))


def _new_data(m: Any, x: Tensor) -> None:
    m.seen.data = x.mean(0)


def _count_some(m: Any, x: Tensor) -> None:
    m.count += (x[:, 0] > 0).sum()


WRITES: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "in place": (lambda m, x: m.seen.add_(x.mean(0)), "seen"),
    "moving average": (lambda m, x: m.seen.lerp_(x.mean(0), 0.01), "seen"),
    "replaced": (_replace, "seen"),
    "through data": (_through_data, "seen"),
    "new data": (_new_data, "seen"),
    "one entry": (lambda m, x: m.seen[:1].copy_(x[0, :1]), "seen"),
    "a count of some records": (_count_some, "count"),
    "a count of the records": (lambda m, x: m.count.add_(len(x)), "count"),
    "a new buffer": (lambda m, x: m.register_buffer("late", x.mean(0)), "late"),
}


@FORMS
@pytest.mark.parametrize(("write", "name"), WRITES.values(), ids=WRITES)
def test_a_buffer_that_holds_records(
    write: Callable[[Any, Tensor], None], name: str, form: Any
) -> None:
    model = Writes(write)
    # Four records, two of a sign: no test of all of them can take the count for a constant.
    batch = torch.randn(4, 3).abs() * torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    message = f"forward pass wrote {name}.*leaves without noise.*track_running_stats=False"
    with pytest.raises(Refused, match=message):
        per_sample(squared(model), private(model), batch, form=form, modules=(model,))
    assert model.seen.tolist() == [0.0, 0.0, 0.0]
    assert int(model.count) == 0


def test_a_buffer_that_holds_records_which_are_all_alike() -> None:
    model = Writes(WRITES["in place"][0])
    with pytest.raises(Refused, match="forward pass wrote seen"):
        per_sample(squared(model), private(model), torch.ones(8, 3), modules=(model,))


def test_a_buffer_that_is_written_later() -> None:
    wait = {"calls": 0}

    def write(m: Any, x: Tensor) -> None:
        if wait["calls"] >= 4:
            m.seen.add_(x.mean(0))

    model = Writes(write)
    for _ in range(4):
        per_sample(squared(model), private(model), torch.randn(8, 3), modules=(model,))
    wait["calls"] = 4
    with pytest.raises(Refused, match="forward pass wrote seen"):
        per_sample(squared(model), private(model), torch.randn(8, 3), modules=(model,))


@pytest.mark.parametrize("name", ["running_mean", "running_var"])
def test_instance_norm_that_tracks_statistics(name: str) -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.InstanceNorm1d(4, track_running_stats=True))
    with pytest.raises(Refused, match=r"forward pass wrote 1.running_.*track_running_stats=False"):
        per_sample(squared(model), private(model), torch.randn(8, 2, 9), modules=(model,))
    fresh = {"running_mean": torch.zeros(4), "running_var": torch.ones(4)}
    assert torch.equal(getattr(model[1], name), fresh[name])


def test_instance_norm_without_statistics_is_exact() -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.InstanceNorm1d(4, affine=True))
    check(lambda x: model(x).sigmoid().flatten(1).square().sum(1), model, torch.randn(8, 2, 9))


def _tick(m: Any, x: Tensor) -> None:
    m.count += 1


def _tick_anew(m: Any, x: Tensor) -> None:
    m.count = m.count + 1


FREE: dict[str, Callable[[], nn.Module]] = {
    "a counter in place": lambda: Writes(_tick),
    "a counter replaced": lambda: Writes(_tick_anew),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 5)),
}


@FORMS
@pytest.mark.parametrize("make", FREE.values(), ids=FREE)
def test_a_buffer_without_records_is_allowed_at_every_step(
    make: Callable[[], nn.Module], form: Any
) -> None:
    model = make()
    for _ in range(5):  # steps 1, 2 and 4 are tested again
        per_sample(squared(model), private(model), torch.randn(8, 3), form=form, modules=(model,))
    per_sample(squared(model), private(model), torch.randn(17, 3), form=form, modules=(model,))


def test_a_counter_counts_passes_and_not_tests() -> None:
    model = Writes(_tick)
    for _ in range(3):
        per_sample(squared(model), private(model), torch.randn(8, 3), modules=(model,))
    assert int(model.count) == 3


def test_two_modules_may_have_buffers_and_parameters_of_one_name() -> None:
    one, other = Writes(lambda m, x: None), Writes(lambda m, x: None)
    other.layer = nn.Linear(5, 5)
    one.seen.fill_(1.0)
    other.seen.fill_(2.0)
    params = {f"one.{n}": p for n, p in one.named_parameters()}
    params |= {f"other.{n}": p for n, p in other.named_parameters()}
    for _ in range(3):
        per_sample(
            squared(lambda x: other(one(x))), params, torch.randn(8, 3), modules=(one, other)
        )
    assert one.seen.tolist() == [1.0] * 3
    assert other.seen.tolist() == [2.0] * 3


@pytest.mark.parametrize("writer", [0, 1])
def test_each_of_two_modules_with_one_name_is_watched(writer: int) -> None:
    modules = [Writes(lambda m, x: None), Writes(lambda m, x: None)]
    modules[1].layer = nn.Linear(5, 5)
    modules[writer].write = lambda m, x: m.seen.add_(x.sum())
    params = {f"{i}.{n}": p for i, m in enumerate(modules) for n, p in m.named_parameters()}
    with pytest.raises(Refused, match=r"forward pass wrote .*seen"):
        per_sample(
            squared(lambda x: modules[1](modules[0](x))), params, torch.randn(8, 3), modules=modules
        )


# --- parameters that are written ----------------------------------------------------------------


class Holder(nn.Module):
    """A layer beside a frozen parameter, and a forward pass that writes one of them."""

    def __init__(self, write: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(3, 5), write
        self.kept = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.write(self, x.detach())
        return self.layer(x)


def _in_place(m: Any, x: Tensor) -> None:
    with torch.no_grad():
        m.layer.bias.add_(1e-7 * x.mean())


def _by_data(m: Any, x: Tensor) -> None:
    m.layer.bias.data.add_(1e-7 * x.mean())


def _by_new_data(m: Any, x: Tensor) -> None:
    m.layer.bias.data = m.layer.bias.data + 1e-7 * x.mean()


def _frozen_by_data(m: Any, x: Tensor) -> None:
    m.kept.data.add_(x.mean(0))


def _frozen_in_place(m: Any, x: Tensor) -> None:
    m.kept.copy_(x.mean(0))


WRITTEN: dict[str, tuple[Callable[[Any, Tensor], None], str]] = {
    "private, in place": (_in_place, "layer.bias"),
    "private, through data": (_by_data, "layer.bias"),
    "private, new data": (_by_new_data, "layer.bias"),
    "frozen, through data": (_frozen_by_data, "kept"),
    "frozen, in place": (_frozen_in_place, "kept"),
}


@FORMS
@pytest.mark.parametrize(("write", "name"), WRITTEN.values(), ids=WRITTEN)
def test_a_parameter_that_the_forward_pass_writes(
    write: Callable[[Any, Tensor], None], name: str, form: Any
) -> None:
    """The steps are too small to show in the loss: what is written must be seen itself."""
    model = Holder(write)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(
        Refused, match=f"forward pass wrote {name}|{name} .*written|writes .*{name}"
    ):
        per_sample(squared(model), private(model), torch.randn(8, 3), form=form, modules=(model,))
    for n, p in model.named_parameters():
        assert torch.equal(p, before[n]), n


def test_writing_a_parameter_into_a_tensor() -> None:
    """`h[:, 0] = token` and `out=`: refused, or exact in another form."""
    token = nn.Parameter(torch.randn(3))

    def loss(x: Tensor) -> Tensor:
        h = x.clone()
        h[:, 0] = token
        return h.square().sum((1, 2)) + (h[:, 0] * h[:, 1]).sum(1)

    with pytest.raises(Refused, match=r"__setitem__ writes the parameter token.*torch\.cat"):
        per_sample(loss, {"token": token}, torch.randn(8, 2, 3), form=traced)
    check(loss, {"token": token}, torch.randn(8, 2, 3), form=loop)


def test_an_out_argument_under_no_grad_changes_nothing() -> None:
    scale = nn.Parameter(torch.randn(3))

    def loss(x: Tensor) -> Tensor:
        with torch.no_grad():
            out = torch.empty_like(x)
            torch.mul(x, scale, out=out)
        return (out * (x * scale)).sum(1)

    check(loss, {"scale": scale}, torch.randn(8, 3), form=auto)


# --- embeddings ---------------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_norm": 0.1}, "max_norm"),
        ({"max_norm": 1e6}, "max_norm"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq|depends on other records|differs"),
    ],
    ids=["max_norm", "large max_norm", "scale_grad_by_freq"],
)
def test_an_embedding_that_couples_its_records(
    options: dict[str, Any], message: str, form: Any
) -> None:
    table = nn.Embedding(10, 3, **options)
    before = table.weight.detach().clone()
    with pytest.raises(Refused, match=message):
        per_sample(
            squared(table), private(table), torch.randint(10, (8, 4)), form=form, modules=(table,)
        )
    assert torch.equal(table.weight, before)


# --- parameters and optimizers ------------------------------------------------------------------


def test_an_optimizer_with_a_tensor_that_is_neither_private_nor_frozen() -> None:
    layer, other = nn.Linear(3, 5), nn.Parameter(torch.zeros(2, 7))
    groups = [{"params": [layer.weight]}, {"params": [layer.bias, other]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with pytest.raises(
        Refused, match=r"tensor 1 of group 1, shape \(2, 7\).*requires_grad_\(False"
    ):
        check_optimizer(optimizer, private(layer))
    check_optimizer(optimizer, {**private(layer), "other": other})
    other.requires_grad_(False)
    check_optimizer(optimizer, private(layer))


@FORMS
def test_a_parameter_on_no_path(form: Any) -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 5), "spare": nn.Linear(2, 2, bias=False)})
    loss = squared(model["used"])
    batch = torch.randn(8, 3)
    with pytest.raises(Refused, match=r"spare\.weight is trainable but on no path.*idle"):
        per_sample(loss, private(model), batch, form=form, modules=(model,))
    found = check(loss, model, batch, form=form, idle=("spare.weight",))
    assert not found.sq_norms()["spare.weight"].any()
    ones = dict.fromkeys(private(model), torch.ones(8, dtype=torch.float64))
    assert found.weighted_sum(ones)["spare.weight"].tolist() == [[0.0, 0.0], [0.0, 0.0]]


@FORMS
@pytest.mark.parametrize("watched", [True, False], ids=["modules", "closure"])
def test_a_parameter_outside_the_set(watched: bool, form: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    modules = (model,) if watched else ()
    with pytest.raises(Refused, match="not among the private parameters; add it to params"):
        per_sample(squared(model), private(model[0]), torch.randn(8, 3), form=form, modules=modules)
    assert untouched(model), "a gradient without noise was left where an optimizer finds it"


@pytest.mark.parametrize("watched", [True, False], ids=["modules", "closure"])
def test_a_parameter_that_is_unfrozen_later(watched: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5).requires_grad_(False))
    params, modules = private(model[0]), (model,) if watched else ()
    for _ in range(4):
        per_sample(squared(model), params, torch.randn(8, 3), modules=modules)
    model[1].requires_grad_(True)
    with pytest.raises(Refused, match="not among the private parameters"):
        per_sample(squared(model), params, torch.randn(8, 3), modules=modules)


class Special(nn.Parameter):
    """Some library's own kind of parameter."""


def _no_parameters() -> dict[str, nn.Parameter]:
    return {}


def _subclass() -> dict[str, nn.Parameter]:
    return {"w": Special(torch.zeros(3))}


def _frozen() -> dict[str, nn.Parameter]:
    return {"w": nn.Parameter(torch.zeros(3), requires_grad=False)}


def _twice() -> dict[str, nn.Parameter]:
    w = nn.Parameter(torch.zeros(3))
    return {"w": w, "v": w}


def _hooked() -> dict[str, nn.Parameter]:
    w = nn.Parameter(torch.zeros(3))
    w.register_hook(lambda g: None)
    return {"w": w}


def _hooked_after() -> dict[str, nn.Parameter]:
    w = nn.Parameter(torch.zeros(3))
    w.register_post_accumulate_grad_hook(lambda p: None)
    return {"w": w}


@FORMS
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_no_parameters, "at least one private parameter, got none"),
        (_subclass, "parameter w is a Special, and only plain nn.Parameter.*leave it frozen"),
        (_frozen, "parameter w is frozen; leave it out"),
        (_twice, "parameters w and v are one tensor; name it once"),
        (_hooked, "parameter w has a gradient hook.*remove the hook"),
        (_hooked_after, "parameter w has a gradient hook.*remove the hook"),
    ],
)
def test_parameters_that_cannot_be_private(
    make: Callable[[], dict[str, nn.Parameter]], message: str, form: Any
) -> None:
    params = make()

    def loss(x: Tensor) -> Tensor:
        return sum(((x * p).sum(1) for p in params.values()), x.sum(1))

    with pytest.raises(ValueError, match=message):
        per_sample(loss, params, torch.randn(8, 3), form=form)


def test_a_hook_that_comes_later_sees_no_record() -> None:
    layer, seen = nn.Linear(3, 5), []
    per_sample(squared(layer), private(layer), torch.randn(8, 3), form=loop)
    layer.weight.register_hook(lambda g: seen.append(g))
    with pytest.raises(Refused, match="parameter weight has a gradient hook"):
        per_sample(squared(layer), private(layer), torch.randn(8, 3), form=loop)
    assert seen == []


# --- operations out of sight --------------------------------------------------------------------


class Product(torch.autograd.Function):
    """`x @ w` with a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return gradients[0] @ w.mT, x.mT @ gradients[0]


CUSTOM: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the parameter": lambda x, w: Product.apply(x, w),
    "a view of it": lambda x, w: Product.apply(x, w.mT).tanh() @ w,
    "a function of it": lambda x, w: Product.apply(x, w.exp()),
    "beside an operation": lambda x, w: Product.apply(x, w) + (x @ w).tanh(),
}


@pytest.mark.parametrize("use", CUSTOM.values(), ids=CUSTOM)
def test_a_custom_function_is_never_silently_wrong(use: Callable[..., Tensor]) -> None:
    weight = nn.Parameter(torch.randn(3, 3))

    def loss(x: Tensor) -> Tensor:
        return use(x, weight).square().sum(1)

    params, batch = {"weight": weight}, torch.randn(8, 3)
    want = expected(loss, params, batch)
    with pytest.raises(Refused, match="weight"):
        per_sample(loss, params, batch, form=traced)
    assert weight.grad is None
    try:
        found = per_sample(loss, params, batch)
    except Refused as refusal:
        assert "weight" in str(refusal)  # noqa: PT017
        assert "form=loop" in str(refusal)  # noqa: PT017
    else:
        agree(found, want, params)
    agree(per_sample(loss, params, batch, form=loop), want, params)
    assert weight.grad is None
    assert type(weight) is nn.Parameter


# --- batches ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(8, 3), torch.zeros(7)), "tensors of different lengths"),
        ({"x": torch.zeros(8, 3), "t": torch.zeros(())}, "a tensor without dimensions"),
        (torch.zeros(()), "a tensor without dimensions"),
        ([1, 2, 3], "no tensor in a list"),
        ({}, "no tensor in a dict"),
        (None, "no tensor in a NoneType"),
    ],
    ids=["uneven", "0-dim among others", "0-dim", "list", "dict", "None"],
)
def test_a_batch_without_records_in_front(batch: Any, message: str) -> None:
    layer = nn.Linear(3, 5)
    with pytest.raises(ValueError, match=f"in their first dimension, got {message}.*to the front"):
        per_sample(lambda x: layer(x).sum(1), private(layer), batch)


# --- sequence first, as long as the batch -------------------------------------------------------


class SequenceFirst(nn.Module):
    """Time comes first inside; a recurrent step, a bare parameter and a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)
        self.shift = nn.Parameter(torch.randn(4))
        self.recurrent = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.inner(x.transpose(0, 1))) + self.shift
        state = torch.zeros_like(h[0])
        for step in h:
            state = torch.tanh(step + self.recurrent(state))
        return state + h.flatten(0, 1).unflatten(0, h.shape[:2]).mean(0)


@pytest.mark.parametrize("length", [3, 8, 16])
@pytest.mark.parametrize("form", [traced, dense, loop], ids=str)
def test_a_sequence_as_long_as_the_batch_is_exact(form: Form, length: int) -> None:
    model = SequenceFirst()
    for size in (5, 3, 8, 16):
        check(squared(model), model, torch.randn(size, length, 3), form=form)


# --- the cache ----------------------------------------------------------------------------------


def test_two_forms_of_one_name_are_two_forms() -> None:
    layer, calls = nn.Linear(3, 5), []

    def named(label: str) -> Form:
        def run(*args: Any) -> Any:
            calls.append(label)
            return loop.run(*args)

        return Form("mine", run)

    loss, batch = squared(layer), torch.randn(8, 3)
    per_sample(loss, private(layer), batch, form=named("one"))
    calls.clear()
    per_sample(loss, private(layer), batch, form=named("other"))
    assert set(calls) == {"other"}


def test_gradients_of_two_forms_add_up() -> None:
    """The traced form pads its batch, the others do not."""
    layer, batch = nn.Linear(3, 5), torch.randn(5, 3)
    one, other = (
        per_sample(squared(layer), private(layer), batch, form=form) for form in (traced, loop)
    )
    for both in (one + other, other + one):
        for name, square in both.sq_norms().items():
            torch.testing.assert_close(square, 4 * other.sq_norms()[name], rtol=1e-3, atol=0)
