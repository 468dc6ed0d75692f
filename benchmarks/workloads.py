"""The models and batches that are timed: random data, the same at every build."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hushgrad_recipes.networks import tanh_cnn
from zoo import small
from zoo.sequences import Encoder, LastStep
from zoo.vision import resnet

Batch = tuple[Tensor, ...]


class Workload(NamedTuple):
    """A model, a batch, and `loss(batch) -> [batch]`, which closes over the model.

    `loss(batch, reduction="mean")` is the number that a plain training loop would compute.
    """

    model: nn.Module
    loss: Callable[..., Tensor]
    batch: Batch


def classifier(model: nn.Module, x: Tensor, classes: int) -> Workload:
    """Cross-entropy of `model(x)` against random labels."""

    def loss(batch: Batch, reduction: str = "none") -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction=reduction)

    return Workload(model, loss, (x, torch.randint(classes, (len(x),))))


def mlp(*, dropout: bool) -> Workload:
    """MLP 784-1024-1024-10 with ReLU, batch 256."""
    return classifier(small.mlp(784, 1024, 1024, 10, act=nn.ReLU), torch.rand(256, 784), 10)


def cnn(*, dropout: bool) -> Workload:
    """The MNIST network of the papers, 26 010 parameters, batch 512."""
    return classifier(tanh_cnn(), torch.rand(512, 1, 28, 28), 10)


def resnet20(*, dropout: bool) -> Workload:
    """ResNet-20 with GroupNorm on 3×32×32, about 270 000 parameters, batch 128."""
    return classifier(resnet(), torch.rand(128, 3, 32, 32), 10)


def positions(ids: Tensor) -> Tensor:
    """One row of positions per record.

    Left to themselves the models look up one row for the whole batch, in which Opacus finds no
    batch dimension; given as data, every library can run.
    """
    return torch.arange(ids.shape[1]).expand_as(ids).contiguous()


def bert(*, dropout: bool) -> Workload:
    """Hugging Face BERT for classification, 6 layers of 384, sequence 64, batch 32."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        num_hidden_layers=6, hidden_size=384, num_attention_heads=6, intermediate_size=1536
    )
    if not dropout:
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    model = BertForSequenceClassification(config)
    ids = torch.randint(config.vocab_size, (32, 64))
    types = torch.zeros_like(ids)
    labels = torch.randint(2, (32,))

    def loss(batch: Batch, reduction: str = "none") -> Tensor:
        ids, types, places, labels = batch
        logits = model(input_ids=ids, token_type_ids=types, position_ids=places).logits
        return F.cross_entropy(logits, labels, reduction=reduction)

    return Workload(model, loss, (ids, types, positions(ids), labels))


def tied_gpt2(
    *, dropout: bool, layers: int = 6, width: int = 384, length: int = 100, batch: int = 16
) -> Workload:
    """Hugging Face GPT-2 with its tied head, in heads of 64."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_embd=width, n_head=width // 64, use_cache=False)
    if not dropout:
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    ids = torch.randint(config.vocab_size, (batch, length))

    def loss(batch: Batch, reduction: str = "none") -> Tensor:
        ids, places = batch
        logits = model(input_ids=ids, position_ids=places).logits[:, :-1]
        # Flattened: with the classes in dimension 1 the same loss takes several times as long.
        words = ids[:, 1:].flatten()
        tokens = F.cross_entropy(logits.flatten(0, 1), words, reduction=reduction)
        return tokens if reduction == "mean" else tokens.view(len(ids), -1).mean(dim=1)

    return Workload(model, loss, (ids, positions(ids)))


def gpt2(*, dropout: bool) -> Workload:
    """GPT-2 with 6 layers of 384, sequence 100, batch 16."""
    return tied_gpt2(dropout=dropout)


def gpt2_small(*, dropout: bool) -> Workload:
    """GPT-2 small, 124 million parameters, sequence 128, batch 2."""
    return tied_gpt2(dropout=dropout, layers=12, width=768, length=128, batch=2)


def logistic(*, dropout: bool) -> Workload:
    """Logistic regression on 123 features, batch 1024."""
    model = nn.Linear(123, 1)
    x, y = torch.rand(1024, 123), torch.randint(2, (1024,)).float()

    def loss(batch: Batch, reduction: str = "none") -> Tensor:
        x, y = batch
        return F.binary_cross_entropy_with_logits(model(x).squeeze(1), y, reduction=reduction)

    return Workload(model, loss, (x, y))


def lstm(*, dropout: bool) -> Workload:
    """LSTM 128 on 128 features, sequence 50, batch 64."""
    return classifier(LastStep(128, 128, 10), torch.rand(64, 50, 128), 10)


def vit_small(*, dropout: bool) -> Workload:
    """Hugging Face ViT, 12 layers of 384 on 224×224 pictures in patches of 16, batch 8."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=384, num_attention_heads=6, intermediate_size=1536)
    model = ViTForImageClassification(config)
    labels = torch.randint(2, (8,))

    def loss(batch: Batch, reduction: str = "none") -> Tensor:
        pixels, labels = batch
        return F.cross_entropy(model(pixels).logits, labels, reduction=reduction)

    return Workload(model, loss, (torch.rand(8, 3, 224, 224), labels))


def tiny(*, dropout: bool) -> Workload:
    """Softmax regression on 20 features, batch 16: only to try the benchmark out."""
    return classifier(nn.Linear(20, 3), torch.rand(16, 20), 3)


WIDTH = 128  # of the encoder whose sizes `benchmarks.growth` varies
SIZES: dict[str, Sequence[int]] = {
    "batch": (8, 16, 32, 64, 128),
    "sequence": (16, 32, 64, 128, 256),
    "depth": (1, 2, 4, 8, 12),
}
USUAL = {"batch": 32, "sequence": 64, "depth": 4}


def encoder(what: str, size: int, *, dropout: bool) -> Workload:
    """An encoder of the usual sizes but for one."""
    sizes = USUAL | {what: size}
    x = torch.rand(sizes["batch"], sizes["sequence"], WIDTH)
    return classifier(Encoder(WIDTH, sizes["depth"]), x, 10)


WORKLOADS: dict[str, Callable[..., Workload]] = {
    build.__name__: build for build in (mlp, cnn, resnet20, bert, gpt2, logistic, lstm)
}
SCALE: dict[str, Callable[..., Workload]] = {
    build.__name__: build for build in (vit_small, gpt2_small)
}
"""Larger models, which `--workloads all` leaves out."""
GROWTH: dict[str, Callable[..., Workload]] = {
    f"{what}-{size}": partial(encoder, what, size) for what in SIZES for size in SIZES[what]
}
BY_NAME = WORKLOADS | SCALE | GROWTH | {"tiny": tiny}


def title(name: str) -> str:
    """A workload in words, for tables."""
    words = " ".join((BY_NAME[name].__doc__ or "").split()).rstrip(".")
    return words if name in WORKLOADS | SCALE else name


def build(name: str, *, dropout: bool = True) -> Workload:
    """Build a workload in training mode from a fixed seed; `dropout=False` sets it to 0."""
    torch.manual_seed(0)
    workload = BY_NAME[name](dropout=dropout)
    workload.model.train()
    return workload
