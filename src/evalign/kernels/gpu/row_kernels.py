# Tuples grow by addition: Triton unpacks none.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"
"""Triton kernels for rows (M, C) whose classes fit into a tile; `long_row_kernels` has those for any number.

There are two: `loss_kernel` reads the batch and ends with the loss, `tile_gradient_kernel` writes the gradient. A tile
is a tuple of PIECES, each of as many classes as the threads of a warp load at once: a row belongs to one warp, and its
sums need no shared memory. For 257 classes there are nine pieces of 32. `loss_kernel` saves the data of a row that the
other needs.

Sums are taken in float32 in a fixed order, or in whole numbers: the same batch always gives the same bits.
"""

import triton
import triton.language as tl

from evalign.kernels.gpu import device_functions as fn

MINUS = tl.constexpr(float("-inf"))
ONE = tl.constexpr(2.0**36)  # in integers, whose sums do not depend on the order; for up to 2^27 rows


@triton.jit
def saved_offset(d):
    """Offset of the rows in the saved data: 2 d + 1 slopes, padded to a multiple of 16."""
    return (2 * d + 16) // 16 * 16


@triton.jit
def _pieces(z, rows, inside, counts, d, stride, BEYOND: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr):
    """The entries of rows, and `BEYOND` the classes. An ignored row is all zeros, whatever it holds."""
    lane = tl.arange(0, WIDTH)[None, :]
    start = z + rows[:, None] * stride + lane
    found = ()
    for k in tl.static_range(PIECES):
        if k < PIECES - 1:
            x = tl.load(start + k * WIDTH, mask=inside[:, None])
        else:
            x = tl.load(start + k * WIDTH, mask=inside[:, None] & (k * WIDTH + lane < d), other=BEYOND)
        found = found + (tl.where(counts[:, None], x.to(tl.float32), 0.0),)
    return found


@triton.jit
def _shares(y, w, rows, inside, d, ALIGNED: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr):
    """Class probabilities of rows (n, d) over their sum, which is part of the returned weight."""
    if ALIGNED:
        y = tl.multiple_of(y, 16)
    weight = tl.load(w + rows, mask=inside, other=0.0).to(tl.float32)
    parts = _pieces(y, rows, inside, weight != 0.0, d, d, 0.0, PIECES, WIDTH)
    sums = parts[0]
    for k in tl.static_range(1, PIECES):
        sums += parts[k]
    mass, found = tl.sum(sums, 1), ()
    for k in tl.static_range(PIECES):
        found = found + (parts[k] / tl.where(mass == 0.0, 1.0, mass)[:, None],)
    return found, weight * mass


@triton.jit
def _zeros(PIECES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    found = ()
    for _ in tl.static_range(PIECES):
        found = found + (tl.zeros([ROWS, WIDTH], tl.float32),)
    return found


@triton.jit
def _first_two(xs, PIECES: tl.constexpr):
    """The largest and second largest entry of every row; every thread tracks its own two."""
    best = xs[0]
    runner_up = tl.full(best.shape, float("-inf"), tl.float32)
    for k in tl.static_range(1, PIECES):
        runner_up = tl.maximum(runner_up, tl.minimum(best, xs[k]))
        best = tl.maximum(best, xs[k])
    largest = tl.max(best, 1)
    has_it = best == largest[:, None]
    tied = tl.sum(tl.where(has_it, 1.0, 0.0), 1) > 1.0
    return largest, tl.where(tied, largest, tl.max(tl.where(has_it, runner_up, best), 1))


@triton.jit(**fn.FREE)
def loss_kernel(
    z, y, w, temperature, workspace, counters, counts, loss, saved, low, reach, smoothing, ignored,
    n, d, stride, chunk, width, anchor, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
    ANNEALED: tl.constexpr, WEIGHTED: tl.constexpr, LOSSES: tl.constexpr, SMOOTHING: tl.constexpr,
    FORM: tl.constexpr, SCATTERED: tl.constexpr, SOFT: tl.constexpr, ALIGNED: tl.constexpr, PIECES: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """tp, predicted and actual of all rows, the sum of their losses and of their weights to `counts` (3 d + 2).

    `workspace` has space for such a vector, and of `width` for the whole, for each group and for each program. Unless
    FORM is below 0, the loss of these counts and its slopes follow; see `value_of_counts`. To `saved`: the slopes,
    then from `saved_offset` on a row's maximum, e of its second place, sums of e and of h, (n, 4).

    Where SCATTERED, a row adds what it has for its label's class to whole numbers behind the counters, 2 d of them,
    rather than each of its threads to sums of all classes, two thirds of all there are. Weights have no such numbers.
    Where SOFT, `y` has class probabilities (n, d), and there are weights.
    """
    a, b, low, cut, c = fn.numbers(temperature, low, reach, ANNEALED)
    first, first_start, second, second_start, sign = fn.lines(a, b, cut)
    if ALIGNED:  # so that four logits are read at once
        d, stride = d // 4 * 4, stride // 4 * 4
    beyond = tl.maximum(first_start, second_start) * (PIECES * WIDTH - d)  # as which those places are counted
    lane = tl.arange(0, WIDTH)[None, :]
    begin = tl.program_id(0).to(tl.int64) * chunk
    stats = saved + saved_offset(d)
    losses = tl.zeros([ROWS], tl.float32)
    groups = tl.cdiv(tl.num_programs(0), GROUP)
    by_label = counters + 1 + groups
    predicted = _zeros(PIECES, ROWS, WIDTH)
    if not SCATTERED:
        tp, actual = _zeros(PIECES, ROWS, WIDTH), _zeros(PIECES, ROWS, WIDTH)
    for offset in range(0, chunk, ROWS):
        rows = begin + offset + tl.arange(0, ROWS)
        inside = rows < n
        if SOFT:
            shares, weight = _shares(y, w, rows, inside, d, ALIGNED, PIECES, WIDTH)
        else:
            label, weight = fn.labels_and_weights(y, w, rows, inside, ignored, WEIGHTED)
        xs = _pieces(z, rows, inside, weight != 0.0, d, stride, MINUS, PIECES, WIDTH)
        largest, second_largest = _first_two(xs, PIECES)
        e_second = fn.exponential(second_largest - largest)
        slope_1, slope_2 = (first * fn.over_tau(e_second))[:, None], (second * fn.over_tau(e_second))[:, None]
        es, totals, totals_h = (), tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
        for k in tl.static_range(PIECES):
            e = fn.exponential(xs[k] - largest[:, None])
            es = es + (e,)
            totals += e
            totals_h += fn.step(e, slope_1, first_start, slope_2, second_start)
        total = tl.sum(totals, 1)
        value, _, _ = fn.top(total, e_second, low, b, c)
        on_line = second * fn.over_tau(e_second) + second_start  # which the top was counted as
        total_h = sign * (tl.sum(totals_h, 1) - on_line - beyond) + value
        share, top_value = (sign * weight / total_h)[:, None], (sign * value)[:, None]
        if SCATTERED:
            more = ()
            for k in tl.static_range(PIECES):
                h = tl.where(es[k] == 1.0, top_value, fn.step(es[k], slope_1, first_start, slope_2, second_start))
                more = more + (predicted[k] + h * share,)
            predicted = more
            at_label = (z + rows * stride + label)[:, None] + tl.zeros([1, WIDTH], tl.int32)
            inside_label = (weight != 0.0) & (label >= 0) & (label < d)
            is_first = inside_label[:, None] & (lane < 2)
            e = fn.exponential(tl.load(at_label, mask=is_first, other=0.0).to(tl.float32) - largest[:, None])
            h = tl.where(e == 1.0, top_value, fn.step(e, slope_1, first_start, slope_2, second_start))
            whole = tl.where(lane == 0, h * share * ONE, 1.0).to(tl.int64)
            tl.atomic_add(by_label + label[:, None] + lane * d, whole, mask=is_first, sem="relaxed")
        else:
            more_tp, more_predicted, more_actual = (), (), ()
            for k in tl.static_range(PIECES):
                h = tl.where(es[k] == 1.0, top_value, fn.step(es[k], slope_1, first_start, slope_2, second_start))
                more_predicted = more_predicted + (predicted[k] + h * share,)
                if SOFT:
                    more_tp = more_tp + (tp[k] + h * share * shares[k],)
                    more_actual = more_actual + (actual[k] + weight[:, None] * shares[k],)
                else:
                    is_label = k * WIDTH + lane == label[:, None]
                    more_tp = more_tp + (tp[k] + tl.where(is_label, h * share, 0.0),)
                    more_actual = more_actual + (actual[k] + tl.where(is_label, weight[:, None], 0.0),)
            tp, predicted, actual = more_tp, more_predicted, more_actual
        # By the threads of the row's warp, without shared memory.
        four = tl.where(lane < 2, tl.where(lane == 0, largest[:, None], e_second[:, None]), total[:, None])
        four = tl.where(lane == 3, total_h[:, None], four)
        tl.store(stats + 4 * rows[:, None] + lane, four, mask=inside[:, None] & (lane < 4))
        if LOSSES:
            if SOFT:
                expected = tl.zeros([ROWS, WIDTH], tl.float32)
                for k in tl.static_range(PIECES):
                    expected += tl.where(shares[k] == 0.0, 0.0, shares[k] * (xs[k] - largest[:, None]))
                target = tl.sum(expected, 1)
            else:  # read again, which is faster than finding it in the tile
                target = tl.load(z + rows * stride + label, mask=weight != 0.0, other=0.0).to(tl.float32) - largest
            if SMOOTHING:
                totals_z = tl.zeros([ROWS, WIDTH], tl.float32)
                for k in tl.static_range(PIECES):
                    totals_z += tl.where(k * WIDTH + lane < d, xs[k], 0.0)
                target += smoothing * (tl.sum(totals_z, 1) / d - largest - target)
            # An ignored row counts for nothing, even if its loss is infinite.
            losses += tl.where(weight == 0.0, 0.0, weight * (tl.log(total) - target))
    classes = tl.arange(0, BLOCK)
    if SCATTERED:
        sums = workspace + (3 * d + 17) // 16 * 16
        out = sums + (1 + groups + tl.program_id(0)) * width
        for k in tl.static_range(PIECES):
            j = k * WIDTH + tl.arange(0, WIDTH)
            tl.store(out + j, tl.sum(predicted[k], 0), mask=j < d)
        tl.store(out + d, tl.sum(losses, 0))
        if fn.is_added_up(sums + (1 + groups) * width, sums + width, sums, counters, width, GROUP, WIDE):
            found = tl.load(by_label + classes, mask=classes < d, other=0, cache_modifier=".cg")
            seen = tl.load(by_label + d + classes, mask=classes < d, other=0, cache_modifier=".cg").to(tl.float32)
            tl.store(by_label + classes, tl.zeros([BLOCK], tl.int64), mask=classes < d)
            tl.store(by_label + d + classes, tl.zeros([BLOCK], tl.int64), mask=classes < d)
            tl.store(counts + classes, found.to(tl.float32) / ONE, mask=classes < d)
            tl.store(counts + 2 * d + classes, seen, mask=classes < d)
            tl.store(counts + 3 * d + 1, tl.sum(seen, 0))
            tl.debug_barrier()
            fn.value_of_counts(
                counts, sums, counts + 2 * d, counts + 3 * d + 1, sums + d, counts, loss, saved, d, anchor,
                t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3, FORM, LOSSES, False, False, BLOCK,
            )  # fmt: skip
    else:
        parts = workspace + (1 + groups) * width
        out = parts + tl.program_id(0) * width
        for k in tl.static_range(PIECES):
            j = k * WIDTH + tl.arange(0, WIDTH)
            tl.store(out + j, tl.sum(tp[k], 0), mask=j < d)
            tl.store(out + d + j, tl.sum(predicted[k], 0), mask=j < d)
            tl.store(out + 2 * d + j, tl.sum(actual[k], 0), mask=j < d)
        tl.store(out + 3 * d, tl.sum(losses, 0))
        if fn.is_added_up(parts, workspace + width, counts, counters, width, GROUP, WIDE):
            # Rounded like its parts, so that the share of a single class is exactly 1.
            everything = tl.sum(tl.load(counts + 2 * d + classes, mask=classes < d, other=0.0), 0)
            tl.store(counts + 3 * d + 1, everything)
            if FORM >= 0:
                tl.debug_barrier()
                fn.value_of_counts(
                    counts, counts + d, counts + 2 * d, counts + 3 * d + 1, counts + 3 * d, counts, loss, saved, d,
                    anchor, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3, FORM, LOSSES, False, False, BLOCK,
                )  # fmt: skip


@triton.jit(**fn.FREE)
def tile_gradient_kernel(
    z, y, w, temperature, saved, by_loss, by_tp, by_predicted, by_losses, out, low, reach, smoothing, ignored, n, d,
    stride,
    ANNEALED: tl.constexpr, WEIGHTED: tl.constexpr, LOSSES: tl.constexpr, PACKED: tl.constexpr, SOFT: tl.constexpr,
    ALIGNED: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """dL/dz of TILES times ROWS rows; if PACKED, all slopes are at `by_tp` and are multiplied by `by_loss`."""
    a, b, low, cut, c = fn.numbers(temperature, low, reach, ANNEALED)
    if ALIGNED:
        d, stride = d // 4 * 4, stride // 4 * 4
    by_predicted, scale, through_losses = fn.unpacked(by_loss, by_tp, by_predicted, by_losses, d, LOSSES, PACKED)
    stats = saved + saved_offset(d)
    lane = tl.arange(0, WIDTH)[None, :]
    # The same for every row, but read for each, so that it reaches the threads that need it.
    of_all, of_own = (), ()
    for k in tl.static_range(PIECES):
        offset = k * WIDTH + lane + tl.zeros([ROWS], tl.int32)[:, None]
        of_all = of_all + (tl.load(by_predicted + offset, mask=k * WIDTH + lane < d, other=0.0),)
        if SOFT:
            of_own = of_own + (tl.load(by_tp + offset, mask=k * WIDTH + lane < d, other=0.0),)
    begin = tl.program_id(0).to(tl.int64) * ROWS * TILES
    for tile in range(0, TILES):
        rows = begin + tile * ROWS + tl.arange(0, ROWS)
        inside = rows < n
        slopes = ()
        if SOFT:
            shares, weight = _shares(y, w, rows, inside, d, ALIGNED, PIECES, WIDTH)
            for k in tl.static_range(PIECES):
                slopes = slopes + (of_all[k] + of_own[k] * shares[k],)
        else:
            label, weight = fn.labels_and_weights(y, w, rows, inside, ignored, WEIGHTED)
            slopes = of_all
        counts = weight != 0.0
        xs = _pieces(z, rows, inside, counts, d, stride, MINUS, PIECES, WIDTH)
        largest = tl.load(stats + 4 * rows, mask=inside, other=0.0)
        e_second = tl.load(stats + 4 * rows + 1, mask=inside, other=1.0)
        total = tl.load(stats + 4 * rows + 2, mask=inside, other=1.0)
        total_h = tl.load(stats + 4 * rows + 3, mask=inside, other=1.0)
        if SOFT:
            at_label, label_z = tl.zeros([ROWS], tl.float32), tl.full([ROWS], MINUS, tl.float32)
        else:
            at_label = tl.load(by_tp + label, mask=counts, other=0.0)
            label_z = tl.load(z + rows * stride + label, mask=counts, other=0.0).to(tl.float32)
        tau_e = fn.over_tau(e_second)[:, None]
        es, parts = (), ()
        dots_rest, dots_scaled = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
        sums_scaled, tops = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
        seconds = tl.zeros([ROWS, WIDTH], tl.float32)
        for k in tl.static_range(PIECES):
            e = fn.exponential(xs[k] - largest[:, None])
            part, rest = fn.scaled(e, tau_e, a, b, cut)
            dots_rest += rest * slopes[k]
            dots_scaled += part * slopes[k]
            sums_scaled += part
            tops += tl.where(e == 1.0, slopes[k], 0.0)
            seconds += tl.where(e == e_second[:, None], 1.0, 0.0)
            es, parts = es + (e,), parts + (part,)
        mean, share, factor, top_scaled, at_top, at_second, at_target, elsewhere = fn.row_slopes(
            weight, scale, through_losses, smoothing, d, total, total_h, e_second, tl.sum(seconds, 1),
            tl.sum(dots_rest, 1), tl.sum(dots_scaled, 1), tl.sum(sums_scaled, 1), tl.sum(tops, 1), at_label,
            fn.exponential(label_z - largest), a, b, low, cut, c,
        )  # fmt: skip
        for k in tl.static_range(PIECES):
            if SOFT:
                is_target, target = shares[k] != 0.0, at_target[:, None] * shares[k]
            else:
                is_target, target = k * WIDTH + lane == label[:, None], at_target[:, None]
            found = fn.entry_slopes(
                es[k], e_second[:, None], parts[k], slopes[k], is_target, mean[:, None], share[:, None],
                factor[:, None], top_scaled[:, None], at_top[:, None], at_second[:, None], target, elsewhere[:, None],
            )  # fmt: skip
            at = out + rows[:, None] * d + (k * WIDTH + lane)
            tl.store(at, found, mask=inside[:, None] & (k * WIDTH + lane < d))
