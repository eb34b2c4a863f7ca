"""Compile every Triton kernel for an H100 or H200, on a machine without one; run as a script, not interpreted."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from evalign.kernels import triton_column_kernels, triton_metric, triton_row_kernels

FLOATS = ("low", "reach", "smoothing", *(f"{letter}{k}" for letter in "tbw" for k in range(4)))
NUMBERS = ("n", "d", "stride", "chunk", "columns", "thresholds", "row_stride", "column_stride")
SPECIAL = {"y": "*i64", "places": "*i32", "temperature": "*fp64", "present": "*i1"}
STEP = {"ANNEALED": True}
KERNELS = [
    (triton_row_kernels.stats_kernel, {**STEP, "LOSSES": True, "SMOOTHING": True, "ROWS": 1, "BLOCK": 2048}),
    (triton_row_kernels.columns_kernel, {**STEP, "ROWS": 4, "BLOCK": 256}),
    (triton_row_kernels.whole_rows_kernel, {**STEP, "LOSSES": True, "SMOOTHING": True, "ROWS": 1, "BLOCK": 512}),
    (triton_row_kernels.gradient_kernel, {**STEP, "LOSSES": True, "ROWS": 1, "BLOCK": 1024}),
    (triton_column_kernels.counts_kernel, {**STEP, "LOSSES": True, "BLOCK": 1024}),
    (triton_column_kernels.gradient_kernel, {**STEP, "LOSSES": True, "BLOCK": 1024}),
    (triton_metric.quotient_kernel, {"AVERAGE": 0, "MASKED": True, "PER_LABEL": False, "BLOCK": 16}),
    (triton_metric.quotient_kernel, {"AVERAGE": 2, "MASKED": False, "PER_LABEL": True, "BLOCK": 16}),
]


def kind(name, constants):
    if name in constants:
        return "constexpr"
    return "fp32" if name in FLOATS else "i32" if name in NUMBERS else SPECIAL.get(name, "*fp32")


def main():
    for kernel, constants in KERNELS:
        names = kernel.arg_names
        signature = {name: kind(name, constants) for name in names}
        given = {(names.index(name),): value for name, value in constants.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=given)
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        print(kernel.__name__, len(built.asm["ptx"]) > 1000)


if __name__ == "__main__":  # collecting tests imports every module, and must compile nothing
    main()
