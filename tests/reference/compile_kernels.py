"""Compile every Triton kernel for an H100 or H200, on a machine without one; run as a script, not interpreted."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from evalign.kernels.gpu import column_kernels as triton_column_kernels
from evalign.kernels.gpu import device_functions, loss_plans
from evalign.kernels.gpu import gpu_loss as triton_rows
from evalign.kernels.gpu import long_row_kernels as triton_long_row_kernels
from evalign.kernels.gpu import row_kernels as triton_row_kernels

FLOATS = ("tau", "low", "reach", "smoothing", "anchor", *(f"{letter}{k}" for letter in "tbw" for k in range(4)))
NUMBERS = ("n", "d", "stride", "chunk", "columns", "thresholds", "width", "ignored", "rows", "row_stride",
           "column_stride", "image_stride", "tiles_per_image", "tiles", "inner", "pixels")  # fmt: skip
SPECIAL = {"y": "*i64", "counters": "*i64", "temperature": "*fp64", "present": "*i1"}
ROWS = {"ANNEALED": True, "WEIGHTED": False, "LOSSES": True}
SUMS = {"GROUP": 16, "WIDE": 128}
SOFT = {"ANNEALED": True, "WEIGHTED": True, "LOSSES": True, "SMOOTHING": True, "FORM": 0}
BACK = {"ANNEALED": True, "WEIGHTED": True, "LOSSES": True, "PACKED": True}


def tiles(d, aligned=False, scattered=False, soft=False):
    pieces, rows, width, warps, _ = loss_plans.tile(d, aligned, scattered)
    shape = {"SCATTERED": scattered, "SOFT": soft, "ALIGNED": aligned, "PIECES": pieces, "ROWS": rows, "WIDTH": width}
    block = triton.next_power_of_2(d)
    return {**shape, "GROUP": 16, "WIDE": 64 * warps, "BLOCK": block, "num_warps": warps}


def back_tiles(d, aligned=False, soft=False):
    pieces, rows, width, warps, tiles = loss_plans.back_tile(d, aligned)
    shape = {"SOFT": soft, "ALIGNED": aligned, "PIECES": pieces, "ROWS": rows, "WIDTH": width}
    return {**shape, "TILES": tiles, "num_warps": warps}


def streams(d):
    """The three kernels of rows of d classes, as `gpu_loss` launches them."""
    (block, warps), even = triton_rows.along(d), {"EVEN": True}
    stats = {**ROWS, "SMOOTHING": True, **even, "BLOCK": block, "num_warps": warps}
    tiles = triton_rows.down(d), triton_rows.back_along(d)
    columns, back = (dict(zip(("ROWS", "BLOCK", "num_warps"), tile, strict=True)) for tile in tiles)
    return [
        (triton_long_row_kernels.stats_kernel, stats),
        (triton_long_row_kernels.row_columns_kernel, {"ANNEALED": True, "WEIGHTED": False, **even, **columns}),
        (triton_long_row_kernels.row_gradient_kernel, {**BACK, **even, **back}),
    ]


def dense(d, form=0):
    """Both kernels of images of d classes, as `loss_plans` launches them."""
    kept, pixels, warps, _ = loss_plans.dense_tile(d)
    front, back = loss_plans.launch_dense.kernel, loss_plans.launch_dense_gradient.kernel
    shape = {"CLASSES": d, "PIXELS": pixels, "num_warps": warps}
    ending = {"SMOOTHING": d == 3, "FORM": form, **SUMS, "BLOCK": triton.next_power_of_2(d)}
    flags = {name: value for name, value in BACK.items() if name != "PACKED"}
    return [(front, {**ROWS, **ending, **shape, "KEPT": kept}), (back, {**flags, **shape, "KEPT": kept})]


KERNELS = [
    *dense(3),
    *dense(19, form=4),
    *dense(150),
    (triton_row_kernels.loss_kernel, {**ROWS, "SMOOTHING": True, "FORM": 0, **tiles(10)}),
    (triton_row_kernels.loss_kernel, {**ROWS, "SMOOTHING": False, "FORM": 2, **tiles(1000, aligned=True)}),
    (triton_row_kernels.loss_kernel, {**ROWS, "SMOOTHING": False, "FORM": -1, **tiles(257)}),
    (triton_row_kernels.loss_kernel, {**ROWS, "SMOOTHING": False, "FORM": 4, **tiles(1000, aligned=True)}),
    (triton_row_kernels.loss_kernel, {**ROWS, "SMOOTHING": True, "FORM": 0, **tiles(1000, True, scattered=True)}),
    (triton_row_kernels.loss_kernel, {**ROWS, "SMOOTHING": False, "FORM": 4, **tiles(603, scattered=True)}),
    *((triton_row_kernels.tile_gradient_kernel, {**BACK, **back_tiles(d, d == 1000)}) for d in (10, 257, 1000)),
    *((triton_row_kernels.loss_kernel, {**SOFT, **tiles(d, d == 1000, soft=True)}) for d in (10, 257, 1000)),
    *((triton_row_kernels.tile_gradient_kernel, {**BACK, **back_tiles(d, d == 1000, True)}) for d in (10, 257, 1000)),
    *streams(2000),
    *streams(131072),
    (triton_column_kernels.column_counts_kernel, {**ROWS, **SUMS, "FORM": 3, "TWO": True, "ROWS": 1024, "COLS": 1}),
    (triton_column_kernels.column_counts_kernel, {**ROWS, **SUMS, "FORM": 5, "TWO": True, "ROWS": 1024, "COLS": 1}),
    (triton_column_kernels.column_counts_kernel, {**ROWS, **SUMS, "FORM": 0, "TWO": False, "ROWS": 8, "COLS": 128}),
    (triton_column_kernels.column_gradient_kernel, {**BACK, "BLOCK": 1024}),
    *(
        (
            device_functions.value_of_counts,
            {"FORM": form, "LOSSES": True, "MASKED": form == 0, "PER_LABEL": form == 2, "BLOCK": 16},
        )
        for form in range(6)
    ),
]


HALF = [  # their logits and gradients are of half precision
    (triton_row_kernels.loss_kernel, {**ROWS, "SMOOTHING": True, "FORM": 0, **tiles(10)}),
    (triton_row_kernels.tile_gradient_kernel, {**BACK, **back_tiles(10)}),
    *streams(2000),
    *dense(19),
    (triton_column_kernels.column_counts_kernel, {**ROWS, **SUMS, "FORM": 3, "TWO": True, "ROWS": 1024, "COLS": 1}),
    (triton_column_kernels.column_gradient_kernel, {**BACK, "BLOCK": 1024}),
]


def kind(name, constants, half):
    if name in constants:
        return "constexpr"
    if half and name in ("z", "out"):
        return "*bf16"
    if name == "y" and constants.get("SOFT"):
        return "*fp32"
    return "fp32" if name in FLOATS else "i32" if name in NUMBERS else SPECIAL.get(name, "*fp32")


def build(kernel, constants, half):
    names = kernel.arg_names
    constants = dict(constants)
    options = {"num_warps": constants.pop("num_warps", 4)}
    signature = {name: kind(name, constants, half) for name in names}
    given = {(names.index(name),): value for name, value in constants.items()}
    free = ("n", "chunk", "ignored", "y", "w", "temperature", "by_loss", "by_losses")
    wide = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if signature[name] not in ("fp32", "constexpr") and name not in free
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=given, attrs=wide)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main():
    for half, kernels in ((False, KERNELS), (True, HALF)):
        for kernel, constants in kernels:
            print(kernel.__name__, len(build(kernel, constants, half).asm["ptx"]) > 1000)


if __name__ == "__main__":  # collecting tests imports every module, and must compile nothing
    main()
