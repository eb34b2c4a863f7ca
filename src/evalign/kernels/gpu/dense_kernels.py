# Tuples grow by addition: Triton does not unpack them.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"
"""Triton kernels for images (N, C, S), read in place: a thread owns pixels, neighbouring threads neighbouring pixels.

Nothing is saved for the backward pass except the slopes: it derives a pixel's sums again. Up to `KEPT_CLASSES` classes
a pixel's logits stay in registers (KEPT), so that they are read once each way; of more classes a tile is read three
times, twice from a cache.
"""

import triton
import triton.language as tl

from evalign.kernels.gpu import device_functions as fn

KEPT_CLASSES = 24


@triton.jit
def _pixels(y, w, tile, tiles, tiles_per_image, pixels, ignored, WEIGHTED: tl.constexpr, PIXELS: tl.constexpr):
    """Image, pixels within it, which of these exist, and their labels and weights."""
    image = (tile // tiles_per_image).to(tl.int64)
    s = (tile % tiles_per_image) * PIXELS + tl.arange(0, PIXELS)
    inside = s < tl.where(tile < tiles, pixels, 0)
    label, weight = fn.labels_and_weights(y, w, image * pixels + s, inside, ignored, WEIGHTED)
    return image, s, inside, label, weight


@triton.jit
def _kept_logits(start, pixels, counts, CLASSES: tl.constexpr):
    """Logits of every class, zeros for ignored pixels (which may hold nan), and the two largest."""
    xs = (tl.load(start, mask=counts, other=0.0).to(tl.float32),)
    largest = xs[0]
    runner_up = tl.full(largest.shape, float("-inf"), tl.float32)
    for k in tl.static_range(1, CLASSES):
        x = tl.load(start + k * pixels, mask=counts, other=0.0).to(tl.float32)
        xs = xs + (x,)
        runner_up = tl.maximum(runner_up, tl.minimum(largest, x))
        largest = tl.maximum(largest, x)
    return xs, largest, runner_up


@triton.jit
def _top_two(start, pixels, counts, CLASSES: tl.constexpr):
    largest = tl.load(start, mask=counts, other=0.0).to(tl.float32)
    runner_up = tl.full(largest.shape, float("-inf"), tl.float32)
    for k in tl.range(1, CLASSES, loop_unroll_factor=4):
        x = tl.load(start + k * pixels, mask=counts, other=0.0).to(tl.float32)
        runner_up = tl.maximum(runner_up, tl.minimum(largest, x))
        largest = tl.maximum(largest, x)
    return largest, runner_up


@triton.jit
def _add_three(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _add_logit(
    sums, x, is_label, slope_1, first_start, slope_2, second_start, LOSSES: tl.constexpr, SMOOTHING: tl.constexpr
):  # fmt: skip
    """e of an entry of every pixel; the sums of e, h, the label's logit and all logits, including this entry."""
    total, total_h, target, total_z = sums
    e = fn.exponential(x)
    if LOSSES:
        target += tl.where(is_label, x, 0.0)
        if SMOOTHING:
            total_z += x
    return e, (total + e, total_h + fn.step(e, slope_1, first_start, slope_2, second_start), target, total_z)


@triton.jit(**fn.FREE)
def dense_loss_kernel(
    z, y, w, temperature, workspace, counters, counts, loss, saved, low, reach, smoothing, ignored,
    pixels, tiles_per_image, tiles, chunk, width, anchor, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
    ANNEALED: tl.constexpr, WEIGHTED: tl.constexpr, LOSSES: tl.constexpr, SMOOTHING: tl.constexpr, FORM: tl.constexpr,
    CLASSES: tl.constexpr, PIXELS: tl.constexpr, KEPT: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """tp, predicted, actual and the sum of losses of `chunk` tiles to the workspace; the last program adds them up.

    It also computes the loss and its slopes by tp, predicted and losses, to `saved` (2 C + 1); see `value_of_counts`.
    `workspace` holds a vector of `width` for the whole, for each group and for each program. KEPT: a pixel's logits
    stay in registers, and so do the sums of every class for every thread.
    """
    a, b, low, cut, c = fn.numbers(temperature, low, reach, ANNEALED)
    first, first_start, second, second_start, sign = fn.lines(a, b, cut)
    zero = tl.zeros([PIXELS], tl.float32)
    losses = zero
    classes = tl.arange(0, BLOCK)
    if KEPT:
        tp, predicted, actual = (), (), ()
        for k in tl.static_range(CLASSES):  # noqa: B007
            tp, predicted, actual = tp + (zero,), predicted + (zero,), actual + (zero,)
    else:
        tp, predicted = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        actual = tl.zeros([BLOCK], tl.float32)
    for offset in range(0, chunk):
        image, s, inside, label, weight = _pixels(
            y, w, tl.program_id(0) * chunk + offset, tiles, tiles_per_image, pixels, ignored, WEIGHTED, PIXELS
        )
        counted = inside & (weight != 0.0)
        start = z + image * CLASSES * pixels + s
        if KEPT:
            xs, largest, runner_up = _kept_logits(start, pixels, counted, CLASSES)
        else:
            largest, runner_up = _top_two(start, pixels, counted, CLASSES)
        e_second = fn.exponential(runner_up - largest)
        slope_1, slope_2 = first * fn.over_tau(e_second), second * fn.over_tau(e_second)
        sums = (zero, zero, zero, zero)
        if KEPT:
            es = ()
            for k in tl.static_range(CLASSES):
                e, sums = _add_logit(
                    sums, xs[k] - largest, label == k, slope_1, first_start, slope_2, second_start, LOSSES, SMOOTHING
                )
                es = es + (e,)
        else:
            for k in tl.range(0, CLASSES, loop_unroll_factor=4):
                x = tl.load(start + k * pixels, mask=counted, other=0.0).to(tl.float32) - largest
                _, sums = _add_logit(
                    sums, x, label == k, slope_1, first_start, slope_2, second_start, LOSSES, SMOOTHING
                )
        total, total_h, target, total_z = sums
        value, _, _ = fn.top(total, e_second, low, b, c)
        total_h = sign * (total_h - (slope_2 + second_start)) + value  # the top was counted as on the second line
        share, top_value = sign * weight / total_h, sign * value
        if KEPT:
            more_tp, more_predicted, more_actual = (), (), ()
            for k in tl.static_range(CLASSES):
                h = fn.step(es[k], slope_1, first_start, slope_2, second_start)
                h = share * tl.where(es[k] == 1.0, top_value, h)
                more_predicted = more_predicted + (predicted[k] + h,)
                more_tp = more_tp + (tp[k] + tl.where(label == k, h, 0.0),)
                more_actual = more_actual + (actual[k] + tl.where(label == k, weight, 0.0),)
            tp, predicted, actual = more_tp, more_predicted, more_actual
        else:
            for k in tl.range(0, CLASSES, loop_unroll_factor=4):
                x = tl.load(start + k * pixels, mask=counted, other=0.0).to(tl.float32)
                e = fn.exponential(x - largest)
                h = fn.step(e, slope_1, first_start, slope_2, second_start)
                h = share * tl.where(e == 1.0, top_value, h)
                is_label = label == k
                at_label, labels = tl.where(is_label, h, 0.0), tl.where(is_label, weight, 0.0)
                at_label, h, labels = tl.reduce((at_label, h, labels), 0, _add_three)
                tp += tl.where(classes == k, at_label, 0.0)
                predicted += tl.where(classes == k, h, 0.0)
                actual += tl.where(classes == k, labels, 0.0)
        if LOSSES:
            if SMOOTHING:
                target += smoothing * (total_z / CLASSES - target)
            # An ignored pixel counts for nothing, even if its loss is infinite.
            losses += tl.where(weight == 0.0, 0.0, weight * (tl.log(total) - target))
    parts = workspace + (1 + tl.cdiv(tl.num_programs(0), GROUP)) * width
    out, mask = parts + tl.program_id(0) * width, classes < CLASSES
    if KEPT:
        for k in tl.static_range(CLASSES):
            tl.store(out + k, tl.sum(tp[k], 0))
            tl.store(out + CLASSES + k, tl.sum(predicted[k], 0))
            tl.store(out + 2 * CLASSES + k, tl.sum(actual[k], 0))
    else:
        tl.store(out + classes, tp, mask=mask)
        tl.store(out + CLASSES + classes, predicted, mask=mask)
        tl.store(out + 2 * CLASSES + classes, actual, mask=mask)
    tl.store(out + 3 * CLASSES, tl.sum(losses, 0))
    if fn.is_added_up(parts, workspace + width, counts, counters, width, GROUP, WIDE):
        # Rounded like its parts, so that the share of a single class is exactly 1.
        everything = tl.sum(tl.load(counts + 2 * CLASSES + classes, mask=mask, other=0.0), 0)
        tl.store(counts + 3 * CLASSES + 1, everything)
        tl.debug_barrier()
        fn.value_of_counts(
            counts, counts + CLASSES, counts + 2 * CLASSES, counts + 3 * CLASSES + 1, counts + 3 * CLASSES, counts,
            loss, saved, CLASSES, anchor, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3, FORM, LOSSES, False, False,
            BLOCK,
        )  # fmt: skip


@triton.jit
def _add_entry(
    sums, e, slope, is_label, tau_e, e_second, a, b, cut
):  # fmt: skip
    """Add an entry of every pixel to the nine sums that its gradient needs; see `row_slopes`."""
    part, rest = fn.scaled(e, tau_e, a, b, cut)
    return (
        sums[0] + e, sums[1] + rest, sums[2] + rest * slope, sums[3] + part * slope, sums[4] + part,
        sums[5] + tl.where(e == 1.0, slope, 0.0), sums[6] + tl.where(e == e_second, 1.0, 0.0),
        sums[7] + tl.where(is_label, e, 0.0),
    )  # fmt: skip


@triton.jit
def _no_sums(PIXELS: tl.constexpr):
    sums = ()
    for k in tl.static_range(8):  # noqa: B007
        sums = sums + (tl.zeros([PIXELS], tl.float32),)
    return sums


@triton.jit
def _pixel_slopes(
    sums, weight, scale, through_losses, smoothing, e_second, tau_e, at_label, a, b, low, cut, c, CLASSES: tl.constexpr
):  # fmt: skip
    """Coefficients of the gradient of a pixel's entries, from the sums of `_add_entry`."""
    value, _, _ = fn.top(sums[0], e_second, low, b, c)
    total_h = sums[4] + sums[1] - (b * tau_e + 0.5 - b) + value
    return fn.row_slopes(
        weight, scale, through_losses, smoothing, CLASSES, sums[0], total_h, e_second, sums[6], sums[2], sums[3],
        sums[4], sums[5], at_label, sums[7], a, b, low, cut, c,
    )  # fmt: skip


@triton.jit
def _store_slope(
    out, e, slope, is_label, pixel, weight, inside, tau_e, e_second, a, b, cut,
):  # fmt: skip
    part, _ = fn.scaled(e, tau_e, a, b, cut)
    mean, share, factor, top_scaled, at_top, at_second, at_target, elsewhere = pixel
    found = fn.entry_slopes(
        e, e_second, part, slope, is_label, mean, share, factor, top_scaled, at_top, at_second, at_target, elsewhere
    )
    tl.store(out, tl.where(weight == 0.0, 0.0, found), mask=inside)


@triton.jit(**fn.FREE)
def dense_gradient_kernel(
    z, y, w, temperature, saved, by_loss, by_tp, by_predicted, by_losses, out, low, reach, smoothing, ignored,
    pixels, tiles_per_image, tiles,
    ANNEALED: tl.constexpr, WEIGHTED: tl.constexpr, LOSSES: tl.constexpr, CLASSES: tl.constexpr, PIXELS: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """dL/dz of one tile; all slopes are at `by_tp` and are multiplied by `by_loss`. KEPT: logits stay in registers."""
    a, b, low, cut, c = fn.numbers(temperature, low, reach, ANNEALED)
    by_predicted, scale, through_losses = fn.unpacked(by_loss, by_tp, by_predicted, by_losses, CLASSES, LOSSES, True)
    image, s, inside, label, weight = _pixels(
        y, w, tl.program_id(0), tiles, tiles_per_image, pixels, ignored, WEIGHTED, PIXELS
    )
    counted = inside & (weight != 0.0)
    at = image * CLASSES * pixels + s
    start, into = z + at, out + at
    at_label = tl.load(by_tp + label, mask=counted, other=0.0)
    sums = _no_sums(PIXELS)
    if KEPT:
        xs, largest, runner_up = _kept_logits(start, pixels, counted, CLASSES)
        e_second = fn.exponential(runner_up - largest)
        tau_e = fn.over_tau(e_second)
        es = ()
        for k in tl.static_range(CLASSES):
            es = es + (fn.exponential(xs[k] - largest),)
            sums = _add_entry(sums, es[k], tl.load(by_predicted + k), label == k, tau_e, e_second, a, b, cut)
        pixel = _pixel_slopes(
            sums, weight, scale, through_losses, smoothing, e_second, tau_e, at_label, a, b, low, cut, c, CLASSES
        )
        for k in tl.static_range(CLASSES):
            slope = tl.load(by_predicted + k)
            _store_slope(into + k * pixels, es[k], slope, label == k, pixel, weight, inside, tau_e, e_second, a, b, cut)
    else:
        largest, runner_up = _top_two(start, pixels, counted, CLASSES)
        e_second = fn.exponential(runner_up - largest)
        tau_e = fn.over_tau(e_second)
        for k in tl.range(0, CLASSES, loop_unroll_factor=4):
            e = fn.exponential(tl.load(start + k * pixels, mask=counted, other=0.0).to(tl.float32) - largest)
            sums = _add_entry(sums, e, tl.load(by_predicted + k), label == k, tau_e, e_second, a, b, cut)
        pixel = _pixel_slopes(
            sums, weight, scale, through_losses, smoothing, e_second, tau_e, at_label, a, b, low, cut, c, CLASSES
        )
        for k in tl.range(0, CLASSES, loop_unroll_factor=4):
            e = fn.exponential(tl.load(start + k * pixels, mask=counted, other=0.0).to(tl.float32) - largest)
            slope = tl.load(by_predicted + k)
            _store_slope(into + k * pixels, e, slope, label == k, pixel, weight, inside, tau_e, e_second, a, b, cut)
