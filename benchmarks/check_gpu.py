"""Fused losses against the eager ones on a GPU: values, gradients, CUDA graphs, torch.compile, bits.

    python benchmarks/check_gpu.py --out check_gpu.json

Needs no pytest. The eager form is computed in float64 from the same logits; errors are relative to the largest
gradient. One entry in 50,000 is exempt: at a kink of the step, float32 and float64 probabilities may fall on different
sides, and both slopes are right. The last line counts failed checks; the exit status is 1 if any failed.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evalign import MetricLoss, membership
from evalign.storage.atomic import write_atomically

CLASSES = [2, 3, 41, 257, 1024, 1271, 50257]
ROWS = [1, 37, 1000, 100_000]
AT_KINKS = 50_000


def value_and_gradient(
    loss: MetricLoss, logits: Tensor, target: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    x = logits.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    value = loss(x, target, weight)
    (gradient,) = torch.autograd.grad(-1.7 * value, x)
    return value.detach(), gradient


def errors(
    metric: Any, logits: Tensor, target: Tensor, sample_weight: Tensor | None = None, **options: Any
) -> list[float]:
    """|loss - eager loss|, and the largest difference of a gradient, but for kinks, over the largest gradient."""
    fused = MetricLoss(metric, **options).to(logits.device)
    eager = MetricLoss(metric, backend="eager", **options).to(logits.device)
    value, gradient = value_and_gradient(fused, logits, target, sample_weight)
    expected, slope = value_and_gradient(eager, logits.double(), target, sample_weight)
    off = (gradient.double() - slope).abs().flatten()
    difference = off.topk(1 + off.numel() // AT_KINKS).values[-1] if off.numel() else slope.sum()
    size = slope.abs().max() if slope.numel() else slope.sum()
    return [abs(value.item() - expected.item()), (difference / (size + 1e-12)).item()]


def batch(n: int, d: int, task: str = "multiclass") -> tuple[Tensor, Tensor, Tensor]:
    shape = (n,) if task == "binary" else (n, d)
    labels = (n,) if task == "multiclass" else shape
    target = torch.randint(0, d if task == "multiclass" else 2, labels, device="cuda")
    target[torch.rand(labels, device="cuda") < 0.1] = -100
    return 2 * torch.randn(shape, device="cuda"), target, torch.rand(labels, device="cuda")


def sizes() -> dict[str, list[float]]:
    """Labels as they come, at the sizes of the benchmark."""
    found = {}
    for n, d in ((8192, 1000), (65_536, 257), (1024, 10), (600, 32_768), (5000, 1271), (70_000, 10)):
        z, y, _ = batch(n, d)
        found[f"{n} x {d}"] = errors("f1", z, y)
    return found


def all_classes_at_once() -> dict[str, list[float]]:
    """Metrics that are no average over classes: one node of autograd all the same, unless remembered."""
    found = {}
    for metric in ("mcc", "cohen_kappa", "accuracy", "balanced_accuracy"):
        many = ((8192, 1000), (65_536, 257), (600, 32_768)) if metric == "mcc" else ()  # each is compiled for long
        for n, d in (*many, (1024, 10), (70_000, 10), (5000, 1271)):
            z, y, _ = batch(n, d)
            found[f"{metric} {n} x {d}"] = errors(metric, z, y)
        z, y, w = batch(70_000, 10)
        y[torch.rand(y.shape, device="cuda") < 0.99] = 0  # next to all labels are of one class
        z = z + 2 * torch.nn.functional.one_hot(y.clamp_min(0), 10)
        found[f"{metric}, rare classes"] = errors(metric, z, y)
        found[f"{metric}, weights and more"] = errors(metric, z, y, w, anchor=1.0, label_smoothing=0.1)
        found[f"{metric}, remembered"] = errors(metric, z, y, memory=0.9)
        node = MetricLoss(metric).cuda()(z.requires_grad_(), y).grad_fn
        found[f"{metric}, one node"] = [float(type(node).__name__ != "FusedNodeBackward")]
        for n in (300_000, 5):
            z, y, _ = batch(n, 1, "binary")
            found[f"{metric} binary {n}"] = errors(metric, z, y, task="binary", anchor=1.0)
        found[f"{metric} multilabel"] = errors(metric, *batch(10_000, 6, "multilabel"), task="multilabel")
    return found


def shapes() -> dict[str, list[float]]:
    found = {}
    for d in CLASSES:
        for n in ROWS:
            if n * d <= 60_000_000:
                found[f"rows {n} x {d}"] = errors("f1", *batch(n, d), anchor=0.5, label_smoothing=0.1)
    # Labels as they come, large and small batches in turn: each kernel leaves its counters as it found them.
    for n, d in ((70_000, 10), (3, 10), (8192, 1000), (65_536, 257), (1, 2), (600, 32_768), (70_000, 10)):
        z, y, _ = batch(n, d)
        found[f"labels {n} x {d}, {len(found)}"] = errors("f1", z, y, anchor=1.0)
    for task in ("binary", "multilabel"):
        for n in (300_000, 5):
            z, y, _ = batch(n, 6, task)
            found[f"{task} labels {n}"] = errors("f1", z, y, task=task, anchor=1.0)
    for average in ("micro", "weighted"):
        z, y, _ = batch(2000, 41)
        found[average] = errors("jaccard", z, y, average=average)
    for name, metric in (("gmean", "gmean"), ("jaccard", "jaccard"), ("function", lambda c: c.tp[1] / c.predicted[1])):
        found[name] = errors(metric, *batch(3000, 12))
    for temperature in (0.05, 0.3, 0.39):
        found[f"temperature {temperature}"] = errors("f1", *batch(2000, 20), temperature=temperature)
    for task in ("binary", "multilabel"):
        for threshold in (None, 0.3, membership.BTG_GRID):
            data = batch(10_000, 6, task)
            found[f"{task} {threshold}"] = errors("f1", *data, task=task, threshold=threshold, anchor=1.0)
    z, y, w = batch(500, 300)
    found["transposed"] = errors("f1", z.t().contiguous().t(), y, w)
    found["part of rows"] = errors("f1", torch.cat([z, z], 1)[:, :300], y, w)
    return found


def images(*shapes: tuple[int, ...]) -> dict[str, list[float]]:
    """Images in place, up to and beyond the classes that stay in registers; multilabel ones; in other formats."""
    found = {}
    for shape in shapes:
        z, target = 2 * torch.randn(shape, device="cuda"), torch.randint(0, shape[1], (shape[0], *shape[2:])).cuda()
        target[torch.rand(target.shape, device="cuda") < 0.1] = -100
        weight = torch.rand(target.shape, device="cuda")
        found[f"{shape}"] = errors("jaccard", z, target)
        found[f"{shape} weighted"] = errors("f1", z, target, weight, anchor=0.5, label_smoothing=0.1)
        found[f"{shape} mcc linear"] = errors("mcc", z, target, step="linear", anchor=1.0)
        found[f"{shape} channels last"] = errors("f1", z.movedim(1, -1).contiguous().movedim(-1, 1), target)
        yes = (target > 0).long()
        yes = yes[:, None].expand(shape).contiguous()
        yes[torch.rand(shape, device="cuda") < 0.1] = -100
        found[f"{shape} multilabel"] = errors("f1", z, yes, task="multilabel", anchor=1.0)
        found[f"{shape} binary"] = errors("f1", z, yes, task="binary", anchor=1.0)
    z, target = torch.randn(8, 19, 128, 128, device="cuda"), torch.randint(0, 19, (8, 128, 128)).cuda()
    loss = MetricLoss("jaccard", anchor=1.0).cuda()
    first, second = (value_and_gradient(loss, z, target, None) for _ in range(2))
    found[f"the same bits twice, {len(found)}"] = [
        float(not torch.equal(a, b)) for a, b in zip(first, second, strict=True)
    ]
    return found


def soft_targets() -> dict[str, list[float]]:
    """Class probabilities of rows and images: short and long rows, aligned or not, weighted, ignored, in half."""
    found = {}
    for shape in ((37, 2), (70_000, 10), (8192, 100), (5000, 257), (3000, 600), (2000, 1000), (999, 1024), (50, 1271),
                  (2, 19, 100, 101)):  # fmt: skip
        z, y = (2 * torch.randn(shape, device="cuda") for _ in range(2))
        y, weight = y.softmax(1), torch.rand(shape[:1] + shape[2:], device="cuda")
        weight[: shape[0] // 3] = 0
        found[f"{shape}"] = errors("f1", z, y)
        found[f"{shape} weighted"] = errors("mcc", z, y, weight, anchor=1.0, label_smoothing=0.1)
        found[f"{shape} class weights"] = errors("jaccard", z, y, weight=torch.rand(shape[1]).cuda(), step="linear")
    z, y = torch.randn(512, 100, device="cuda"), torch.randn(512 * 100 + 1, device="cuda")[1:].view(512, 100).softmax(1)
    moved = torch.empty(512 * 100 + 1, device="cuda")[1:].view(512, 100).copy_(y)
    found["labels off 16 bytes"] = errors("f1", z, moved)
    found["logits of twice the classes"] = errors("f1", torch.cat([z, z], 1)[:, :100], y)
    found["in bfloat16"] = [x / 200 for x in errors("f1", z.bfloat16(), y, anchor=1.0)]  # bound 2e-2, as in "half"
    loss = MetricLoss("f1", anchor=1.0).cuda()
    first, second = (value_and_gradient(loss, z, y, None) for _ in range(2))
    found["the same bits twice"] = [float(not torch.equal(a, b)) for a, b in zip(first, second, strict=True)]
    return found


def second_order() -> dict[str, list[float]]:
    """hvp of the fused loss against that of the eager one, for every layout; the second call is by a launch plan."""
    found = {}
    shapes = {"rows": (200, 7), "soft": (200, 7), "long rows": (20, 1500), "images": (2, 5, 16, 16), "binary": (300,)}
    for name, shape in {**shapes, "multilabel": (100, 6), "remembered": (200, 7)}.items():
        task = name if name in ("binary", "multilabel") else "multiclass"
        labels = (shape[0], *shape[2:]) if task == "multiclass" else shape
        z, y = torch.randn(shape, device="cuda"), torch.randint(0, 2, labels, device="cuda")
        y = torch.randn(shape, device="cuda").softmax(1) if name == "soft" else y
        both = []
        for backend in ("auto", "eager"):
            memory = 0.5 if name == "remembered" else None
            loss = MetricLoss("f1", task=task, anchor=1.0, memory=memory, backend=backend).cuda()  # type: ignore[arg-type]
            for _ in range(2):
                w = torch.ones((), device="cuda", requires_grad=True)
                (first,) = torch.autograd.grad(loss(w * z, y), w, create_graph=True)
                (second,) = torch.autograd.grad(first, w)
            both.append((first.item(), second.item()))
        found[name] = [abs(a - b) / (abs(b) + 1e-3) for a, b in zip(*both, strict=True)]
    return found


def half_precision() -> dict[str, list[float]]:
    found = {}
    for dtype in (torch.float16, torch.bfloat16):
        z, y, w = batch(2000, 300)
        # Of many at second place, which rounding makes, the eager form takes one, and the fused one all of them.
        first, second, third = z.to(dtype).topk(3).values.unbind(1)
        unique = (first > second) & (second > third)
        found[str(dtype)] = errors("f1", z.to(dtype)[unique], y[unique], w[unique], anchor=1.0)
    return found


def graph_errors(metric: str) -> list[float]:
    """A recorded step, replayed on another batch at another temperature, equals that step run eagerly."""
    loss = MetricLoss(metric, anchor=1.0).cuda()
    z, y, _ = batch(4096, 100)
    x = z.clone().requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        value = loss(x, y)
        (gradient,) = torch.autograd.grad(value, x)
        return value, gradient

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value, gradient = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    loss.temperature = 0.1
    graph.replay()
    torch.cuda.synchronize()
    expected, slope = step()
    return [(value - expected).abs().item(), ((gradient - slope).abs().max() / slope.abs().max()).item()]


def compiled_errors() -> dict[str, list[float]]:
    """A compiled graph, which holds the fused loss as one operator, against the fused loss; weights, and half.

    The same kernels run. In bfloat16 many classes tie, and there the eager form has another gradient: one that was
    traced in its place fails.
    """
    found = {}
    for name, shape in {"rows": (1000, 50), "long rows": (64, 1500), "images": (2, 19, 40, 40), "binary": (3000,),
                        "multilabel": (500, 12), "bfloat16": (1000, 50), "soft": (1000, 50)}.items():  # fmt: skip
        task: Any = name if name in ("binary", "multilabel") else "multiclass"
        labels = (shape[0], *shape[2:]) if task == "multiclass" else shape
        z = torch.randn(shape, device="cuda", dtype=torch.bfloat16 if name == "bfloat16" else torch.float32)
        y = torch.randint(0, 2 if task != "multiclass" else shape[1], labels, device="cuda")
        y = torch.randn(shape, device="cuda").softmax(1) if name == "soft" else y
        plain = MetricLoss("f1", task=task, anchor=1.0).cuda()
        torch.compiler.reset()
        built: Any = torch.compile(plain, fullgraph=True)
        for weight in (None, torch.rand(labels, device="cuda")):
            value, gradient = value_and_gradient(built, z, y, weight)
            expected, slope = value_and_gradient(plain, z, y, weight)
            worst = (gradient - slope).abs().max() / slope.abs().max()
            found[f"{name}, weights: {weight is not None}"] = [(value - expected).abs().item(), worst.item()]
    return found


def stream_errors() -> list[float]:
    """Two concurrent streams, each with its own counters."""
    loss = MetricLoss("f1").cuda()
    batches = [batch(70_000, 10)[:2], batch(50_000, 20)[:2]]
    wanted = [value_and_gradient(loss, *given, None) for given in batches]
    streams = [torch.cuda.Stream() for _ in batches]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    worst = [0.0, 0.0]
    for _ in range(20):
        found = []
        for stream, given in zip(streams, batches, strict=True):
            with torch.cuda.stream(stream):
                found.append(value_and_gradient(loss, *given, None))
        torch.cuda.synchronize()
        for ours, theirs in zip(found, wanted, strict=True):
            worst = [max(w, (a - b).abs().max().item()) for w, a, b in zip(worst, ours, theirs, strict=True)]
    return worst


def bits() -> list[float]:
    z, y, w = batch(70_000, 33)
    loss = MetricLoss("f1", anchor=1.0).cuda()
    first, second = (value_and_gradient(loss, z, y, w) for _ in range(2))
    return [float(not torch.equal(a, b)) for a, b in zip(first, second, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("check_gpu.json"))
    parser.add_argument("--quick", action="store_true", help="a few sizes, bits and graphs alone: half a minute less")
    parser.add_argument("--checks", nargs="*", help="those of these names alone")
    options = parser.parse_args()
    torch.manual_seed(0)
    checks: list[tuple[str, float, Callable[[], Any]]] = [
        ("sizes", 1e-4, sizes),
        ("all classes at once", 1e-4, all_classes_at_once),
        ("images of few classes", 1e-4, lambda: images((4, 5, 16, 16), (1, 2, 7))),
        ("images of 19 classes", 1e-4, lambda: images((2, 19, 300, 301), (3, 24, 64, 64))),
        ("images of many classes", 1e-4, lambda: images((2, 25, 33, 33), (2, 150, 64, 65))),
        ("shapes", 1e-4, shapes),
        ("soft targets", 1e-4, soft_targets),
        ("half", 2e-2, half_precision),
        ("the same bits twice", 1e-30, lambda: {"bits": bits()}),
        ("two streams", 1e-30, lambda: {"streams": stream_errors()}),
        ("CUDA graph", 1e-5, lambda: {metric: graph_errors(metric) for metric in ("f1", "mcc")}),
        ("torch.compile", 1e-4, compiled_errors),
        ("second order", 1e-2, second_order),
    ]
    if options.quick:
        checks = [
            check for check in checks if check[0] in ("sizes", "the same bits twice", "CUDA graph", "second order")
        ]
    if options.checks is not None:
        checks = [check for check in checks if check[0] in options.checks]
    found: dict[str, Any] = {}
    failed = 0
    for name, bound, check in checks:
        try:
            for case, error in check().items():
                right = all(e <= bound for e in error)
                failed += not right
                found[f"{name}: {case}"] = {"errors": error, "right": right}
                if not right:
                    print("WRONG", name, case, error, flush=True)
        except Exception as error:  # still report the others
            failed += 1
            found[name] = {"error": f"{type(error).__name__}: {error}"[:2000], "right": False}
            print("FAILED", name, found[name]["error"], flush=True)
        write_atomically(options.out, json.dumps(found, indent=1))
        print("done", name, flush=True)
    print(f"{len(found)} checks, {failed} failed", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
