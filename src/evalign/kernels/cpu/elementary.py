"""exp, log, log1p and sigmoid of float32 in plain arithmetic, which compiles to vector instructions, unlike libm."""

import numpy as np

from evalign.kernels.cpu.compilation import loop

F = np.float32
LOG2_E, LN2_HIGH, LN2_LOW = F(1.4426950408889634), F(0.693359375), F(-2.12194440e-4)
SMALLEST = F(-87.33654)  # exp of less is not a normal number, and counts as 0
C2, C3, C4, C5, C6, C7 = (F(c) for c in (0.5, 1.6666666e-1, 4.1665796e-2, 8.3334519e-3, 1.3981999e-3, 1.9875691e-4))
SQRT_HALF = F(0.707106781186547524)
L1, L2, L3, L4, L5, L6, L7, L8, L9 = (
    F(c)
    for c in (3.3333331174e-1, -2.4999993993e-1, 2.0000714765e-1, -1.6668057665e-1, 1.4249322787e-1,
              -1.2420140846e-1, 1.1676998740e-1, -1.1514610310e-1, 7.0376836292e-2)
)  # fmt: skip
ONE, HALF, ZERO = F(1), F(0.5), F(0)
BIAS = np.int32(127)


@loop()
def exp(t: F) -> F:
    """exp(t) for t <= 0, within 2 ulp; nan stays nan.

    As in Cephes: t = n ln 2 + r with |r| <= ln 2 / 2, a polynomial for exp(r), and 2^n by its bits.
    """
    x = t if t > SMALLEST else SMALLEST
    n = np.floor(x * LOG2_E + HALF)
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    power = (((((C7 * r + C6) * r + C5) * r + C4) * r + C3) * r + C2) * r * r + r + ONE
    scaled: np.float32 = power * np.int32((np.int32(n) + BIAS) << np.int32(23)).view(np.float32)
    if t >= SMALLEST:
        return scaled
    return ZERO if t < SMALLEST else t


@loop()
def log(x: F) -> F:
    """log(x) of a normal x > 0, within 2 ulp; nan stays nan.

    As in Cephes: x = 2^n m with m between sqrt(1/2) and sqrt(2), and a polynomial in m - 1.
    """
    bits = np.float32(x).view(np.int32)
    n = F((bits >> np.int32(23)) - np.int32(126))
    m = np.int32((bits & np.int32(0x007FFFFF)) | np.int32(0x3F000000)).view(np.float32)
    small = m < SQRT_HALF
    n = n - ONE if small else n
    m = (m + m if small else m) - ONE
    power = ((((((((L9 * m + L8) * m + L7) * m + L6) * m + L5) * m + L4) * m + L3) * m + L2) * m + L1) * m * m * m
    found: np.float32 = (power + n * LN2_LOW - HALF * m * m) + m + n * LN2_HIGH
    return found if x == x else x


# log(1 + e) = 2 artanh(e / (2 + e)): a series in at most (1/3)^2, of e = a / b by one division
S1, S3, S5, S7, S9, S11, S13 = (F(2 / k) for k in (1, 3, 5, 7, 9, 11, 13))
S15 = F(2 / 15)


@loop()
def log1p(a: F, b: F) -> F:
    """log(1 + a / b) for 0 <= a <= b."""
    s = a / (b + b + a)
    q = s * s
    return s * (S1 + q * (S3 + q * (S5 + q * (S7 + q * (S9 + q * (S11 + q * (S13 + q * S15)))))))


@loop()
def sigmoid(z: F) -> tuple[F, F]:
    """p and 1 - p, neither as a difference."""
    e = exp(-abs(z))
    large = ONE / (ONE + e)
    small = e * large
    return (large if z >= ZERO else small), (small if z >= ZERO else large)
