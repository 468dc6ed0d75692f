"""Fail-safes: nothing but the returned gradients may come out of a pass."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hushgrad.numerics import same_bits
from hushgrad.parallel.single import spread_kind
from hushgrad.types import NotCovered, Params, Refused

WatchedKey = tuple[int, str]
"""A watched tensor: the position of its module, or `PRIVATE`, and its name there."""

PRIVATE = -1

Reference = weakref.ReferenceType[Tensor]


Watched = dict[WatchedKey, Tensor]
Mark = tuple[int, int, int]


def _state(params: Params, modules: Sequence[nn.Module]) -> tuple[Watched, Watched]:
    """The parameters, private or not, and the modules' buffers; each tensor once."""
    trained: Watched = {(PRIVATE, name): p for name, p in params.items()}
    buffers: Watched = {}
    # A tied tensor counts once, by the first name that it is found under.
    seen = {id(p) for p in params.values()}
    for i, module in enumerate(modules):
        for prefix, owner in module.named_modules():
            for found, tensors in ((trained, owner._parameters), (buffers, owner._buffers)):
                for name, x in tensors.items():
                    if x is not None and id(x) not in seen:
                        seen.add(id(x))
                        found[i, f"{prefix}.{name}" if prefix else name] = x
    return trained, buffers


def _marks(state: Watched) -> dict[WatchedKey, Mark]:
    return {key: (id(x), x.data_ptr(), x._version) for key, x in state.items()}


# --- at every pass ------------------------------------------------------------------------------


@contextmanager
def guard_pass(
    params: Params,
    modules: Sequence[nn.Module],
    free: frozenset[WatchedKey] = frozenset(),
    held: Iterable[object] = (),
) -> Iterator[None]:
    """Refuse the pass inside if it trained a parameter unseen, or wrote anything but `free`.

    Nor may it write a tensor that a module has as an attribute, or one of those in `held`: what it
    keeps there reaches the records of later batches. `.grad` is lent to the pass and given back.
    """
    trained, buffers = _state(params, modules)
    before = _marks(trained | buffers)
    kept = {k: x for k, x in (trained | buffers | _kept(modules, held)).items() if k not in free}
    versions = {key: _version(x) for key, x in kept.items()}
    digests = {key: _digest(x) for key, x in kept.items()}
    # `.grad` may hold gradients of public data that somebody adds up: it is lent, not lost.
    gradients = {key: p.grad for key, p in trained.items()}
    try:
        for p in trained.values():
            p.grad = None
        yield
        for key, p in trained.items():
            if p.grad is not None:
                refusal_of = _unseen_use_refusal if key[0] == PRIVATE else _stranger_refusal
                raise refusal_of(key[1])
        now, buffers = _state(params, modules)
        after = _marks(now | buffers)
        # The versions say so in most cases, for the price of a comparison of numbers.
        if after != before:
            for key in before.keys() | after.keys():
                if key not in free and before.get(key) != after.get(key):
                    raise write_refusal(key)
        for key, x in kept.items():
            if _version(x) != versions[key]:
                raise _memory_refusal_of(key)
            # A write through `.data` leaves no other mark.
            if not all(map(same_bits, _digest(x), digests[key])):
                raise write_refusal(key) if key in before else _memory_refusal_of(key)
    finally:
        for key, p in trained.items():
            p.grad = gradients[key]


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


_FEW = 1024  # entries; so few are simply copied
_SHARES = 16  # a sum over the whole of a tensor would miss what only moves within it


def _digest(x: Tensor) -> tuple[Tensor, ...]:
    """What changes when a tensor's bits do: sums of whole numbers, at the speed of memory."""
    if type(x) not in (Tensor, nn.Parameter) or x.layout != torch.strided or x.is_meta:
        return ()
    whole = x.detach()
    if whole.numel() <= _FEW:
        return (whole.clone(),)
    flat = whole.contiguous().view(-1)
    # A view as 64-bit words wants memory that begins at a word.
    if flat.storage_offset() * flat.itemsize % 8:
        flat = flat.clone()
    rest = flat.numel() % (8 * _SHARES)
    words = flat[: flat.numel() - rest].view(torch.int64)
    sums = words.view(_SHARES, -1).sum(1)
    return (sums, flat[flat.numel() - rest :].clone()) if rest else (sums,)


def _kept(modules: Sequence[nn.Module], held: Iterable[object]) -> Watched:
    """Tensors that are no parameters and no buffers, and outlive a pass all the same."""
    found: Watched = {}
    for i, module in enumerate(modules):
        for prefix, owner in module.named_modules():
            for name, value in vars(owner).items():
                parts = enumerate(value) if isinstance(value, list | tuple) else (("", value),)
                for number, x in parts:
                    if isinstance(x, Tensor):
                        found[i, f"{prefix}.{name} {number}".strip(". ")] = x
    for number, x in enumerate(held):
        if isinstance(x, Tensor):
            found[_HELD, f"tensor {number} that the loss refers to"] = x
    return found


_HELD = -2


def _memory_refusal_of(key: WatchedKey) -> Refused:
    return Refused(
        f"the forward pass wrote {key[1]}, and what it keeps there reaches the records of later "
        "batches; compute each record's loss from that record and the parameters alone, and make a "
        "counter of passes a buffer"
    )


def refuse_strangers(losses: Tensor, params: Params, known: Iterable[Tensor]) -> list[Reference]:
    """Refuse a loss that would train any parameter but the `known` tensors.

    A private parameter, or a tensor made from some (it has their `names`), is never part of the
    graph unless an operation used it that was not intercepted. Returns the other leaves of it: they
    may be activations that a hook made require a gradient, as checkpointing asks for ahead of
    frozen layers, and `refuse_kept` tells.
    """
    expected = {id(x) for x in known}
    names = {id(p): name for name, p in params.items()}
    others = []
    for leaf, consumer in _leaves(losses):
        if id(leaf) not in expected:
            made_from = leaf.__dict__.get("names", ())
            if id(leaf) in names or made_from:
                raise _unseen_use_refusal(
                    names.get(id(leaf), ", ".join(made_from)), _name_of_consumer(consumer)
                )
            if isinstance(leaf, nn.Parameter) or leaf.grad is not None:
                raise _stranger_refusal(_shape_in_words(leaf))
            others.append(weakref.ref(leaf))
    return others


def refuse_kept(leaves: Iterable[Reference]) -> None:
    """Refuse leaves that outlive the pass: what nobody holds is trained by nobody."""
    # Cycles keep tensors alive for a while; only what outlives a collection is kept.
    if any(leaf() is not None for leaf in leaves):
        gc.collect()
    for leaf in leaves:
        kept = leaf()
        if kept is not None:
            kept.grad = None
            raise _stranger_refusal(_shape_in_words(kept))


def _leaves(losses: Tensor) -> Iterator[tuple[Tensor, Any]]:
    """The tensors that a backward pass would train, each with the node that consumed it."""
    seen: set[Any] = set()
    stack: list[tuple[Any, Any]] = [(losses.grad_fn, None)]
    while stack:
        node, consumer = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # Autograd's own name for the tensor that a backward pass would add a gradient to.
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf, consumer
        stack += [(following, node) for following, _ in node.next_functions]


def _name_of_consumer(consumer: Any) -> str:
    return "the loss" if consumer is None else str(consumer.name()).removesuffix("Backward")


def _unseen_use_refusal(name: str, consumer: str = "an operation") -> Refused:
    return NotCovered(
        f"{consumer} used the parameter {name} in an operation that hushgrad cannot intercept "
        "(a custom autograd.Function or kernel?); write it with torch operations, wrap it as "
        "hushgrad.gradients.operation with a rule (hushgrad.gradients.rule), or use form=loop"
    )


def _shape_in_words(leaf: Tensor) -> str:
    """A parameter by its shape; of another tensor that would tell the size of the batch."""
    if isinstance(leaf, nn.Parameter):
        return f"of shape {tuple(leaf.shape)}"
    return f"(a tensor of {leaf.dim()} dimensions that requires a gradient)"


def _stranger_refusal(name: str) -> Refused:
    return Refused(
        f"the loss also trains the parameter {name}, which is not among the private parameters; "
        "add it to params, or freeze it with requires_grad_(False)"
    )


def write_refusal(key: WatchedKey) -> Refused:
    """The refusal of a tensor that the forward pass wrote."""
    return Refused(
        f"the forward pass wrote {key[1]}, which then leaves without noise through the state dict; "
        "do not track statistics of the records there (track_running_stats=False, eval() that "
        "module), or compute them in the loss"
    )


# --- at certification ---------------------------------------------------------------------------


@contextmanager
def restored(params: Params, modules: Sequence[nn.Module]) -> Iterator[dict[WatchedKey, Tensor]]:
    """Give parameters and buffers back as they were, and tell what the block wrote.

    Values are compared too: a write through `.data` leaves no other mark.

    Args:
        params: private parameters by name; none are kept if it is empty.
        modules: modules whose parameters and buffers are kept, too.

    Yields:
        A dictionary that has, after the block, the new value of each tensor that was written.

    >>> norm = nn.BatchNorm1d(2)
    >>> with restored({}, [norm]) as written:
    ...     _ = norm(torch.randn(8, 2))
    >>> sorted(name for _, name in written)
    ['num_batches_tracked', 'running_mean', 'running_var']
    >>> norm.running_mean.tolist()
    [0.0, 0.0]
    """
    trained, buffers = _state(params, modules)
    state = trained | buffers
    marks = _marks(state)
    before = {key: (x, x.data, x.detach().clone(), marks[key]) for key, x in state.items()}
    registered = [(m, dict(m._buffers)) for module in modules for m in module.modules()]
    changed: dict[WatchedKey, Tensor] = {}
    try:
        yield changed
    finally:
        trained, buffers = _state(params, modules)
        after = trained | buffers
        marks = _marks(after)
        for key in before.keys() | after.keys():
            now, then = after.get(key), before.get(key)
            if now is None:
                changed[key] = torch.empty(0)
            elif then is None or marks[key] != then[3] or not same_bits(now, then[2]):
                changed[key] = now.detach().clone()
        for owner, own in registered:
            if _identities(owner._buffers) != _identities(own):
                owner._buffers.clear()
                owner._buffers.update(own)
        for key in changed.keys() & before.keys():
            x, data, value, _ = before[key]
            # Another storage may have been put behind the tensor, with the old version number.
            x.data = data
            if not same_bits(x, value):
                data.copy_(value)


@contextmanager
def undo_on_failure(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Give back random states and buffers if the block raises: another way is tried after it."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    cpu, others = torch.get_rng_state(), [torch.cuda.get_rng_state(i) for i in devices]
    # Buffers can be put in each other's place, so names and values are both kept.
    owners = [m for module in modules for m in module.modules()]
    before = [(m, k, b, b.clone()) for m in owners for k, b in m.named_buffers(recurse=False)]
    try:
        yield
    except BaseException:
        torch.set_rng_state(cpu)
        for i, state in zip(devices, others, strict=True):
            torch.cuda.set_rng_state(state, i)
        for owner, name, b, value in before:
            owner._buffers[name] = b
            b.data.copy_(value)
        raise


def _identities(buffers: Any) -> dict[str, int]:
    """Of a dictionary, or what a scripted module has in its place."""
    return {name: id(b) for name, b in buffers.items()}


# --- what may be private ------------------------------------------------------------------------


def check_parameters(params: Mapping[str, Tensor]) -> None:
    """Refuse parameters that cannot be private as they are.

    Args:
        params: the private parameters by name.

    Raises:
        Refused: if there is none, or one is frozen, complex, of a class of its own, named twice,
            has a gradient hook, or has its values in several processes.

    >>> check_parameters(dict(nn.Linear(2, 1).named_parameters()))
    """
    if not params:
        raise Refused(
            "expected at least one private parameter, got none; pass "
            "dict(model.named_parameters()), and freeze what is not to be trained"
        )
    seen: dict[int, str] = {}
    for name, p in params.items():
        if kind := spread_kind(p):
            raise Refused(
                f"the parameter {name} is a {kind}, whose values lie in several processes (FSDP, "
                "tensor parallelism); build the model without it and train it in one process"
            )
        if type(p) is not nn.Parameter:
            raise Refused(
                f"the parameter {name} is a {type(p).__name__}, and only plain nn.Parameter can be "
                "private; unwrap or dequantise it, or leave it frozen"
            )
        if not p.is_floating_point():
            raise Refused(
                f"the parameter {name} is {p.dtype}, and only real parameters can be private; keep "
                "real and imaginary parts in a parameter each, and join them with torch.complex"
            )
        if not p.requires_grad:
            raise Refused(f"the parameter {name} is frozen; leave it out of params")
        if id(p) in seen:
            raise Refused(f"the parameters {seen[id(p)]} and {name} are one tensor; name it once")
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise Refused(
                f"the parameter {name} has a gradient hook, which would see one record's gradient; "
                "remove the hook"
            )
        seen[id(p)] = name


def check_optimizer(optimizer: torch.optim.Optimizer, params: Params) -> None:
    """Refuse an optimizer that holds a tensor which is neither private nor frozen, or misses one.

    The former would be trained on gradients without noise; the latter would get noise, and a share
    of each record's bound, and would not be trained.

    Args:
        optimizer: any of torch's, or one with their `param_groups`.
        params: the private parameters by name.

    Raises:
        Refused: with the tensor, and how to mend it.

    >>> layer = nn.Linear(2, 1)
    >>> check_optimizer(torch.optim.SGD(layer.parameters()), dict(layer.named_parameters()))
    """
    private = {id(p) for p in params.values()}
    for number, group in enumerate(optimizer.param_groups):
        for position, p in enumerate(group["params"]):
            if id(p) not in private and p.requires_grad:
                raise Refused(
                    f"the optimizer's tensor {position} of group {number}, shape "
                    f"{tuple(p.shape)}, is neither private nor frozen; add it to the private "
                    "parameters, or freeze it with requires_grad_(False)"
                )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missed = [name for name, p in params.items() if id(p) not in held]
    if missed:
        more = f" and {len(missed) - 3} more" * (len(missed) > 3)
        raise Refused(
            "expected the optimizer to hold every trainable parameter, got none of its groups "
            f"with {', '.join(missed[:3])}{more}; freeze what is not to be trained with "
            "requires_grad_(False), or pass it to the optimizer"
        )
