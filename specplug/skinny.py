"""x @ w.T for a few rows of x, compiled by numba: each weight is read from memory once, whatever the number of rows.

Up to FEW rows, one row of weights at a time: the first two rows of x are multiplied while it comes in, the others find it
in the nearest cache. Above, arithmetic is what takes time, so after the first row of x four rows of weights and four of x
are multiplied together, which halves what has to be loaded per product.
"""

import ctypes

import numba
import numpy as np
from numba import types

FEW = 8


@numba.njit("void(float32[:, ::1], float32[:, ::1], float32[:, ::1])", fastmath=True, nogil=True, cache=True)
def product(x, w, out):  # type: ignore[no-untyped-def]
    """x: (M, K), w: (N, K), out: (M, N), all C-contiguous fp32."""
    num_rows, num_in = x.shape
    num_out = w.shape[0]
    tiled = num_out - num_out % 4 if num_rows > FEW else 0
    for n in range(0, tiled, 4):
        for i in range(n, n + 4):
            first = np.float32(0)
            for k in range(num_in):
                first += w[i, k] * x[0, k]
            out[0, i] = first
        m = 1
        while m + 4 <= num_rows:
            a00 = a01 = a02 = a03 = np.float32(0)
            a10 = a11 = a12 = a13 = np.float32(0)
            a20 = a21 = a22 = a23 = np.float32(0)
            a30 = a31 = a32 = a33 = np.float32(0)
            for k in range(num_in):
                x0, x1, x2, x3 = x[m, k], x[m + 1, k], x[m + 2, k], x[m + 3, k]
                w0, w1, w2, w3 = w[n, k], w[n + 1, k], w[n + 2, k], w[n + 3, k]
                a00 += w0 * x0
                a01 += w0 * x1
                a02 += w0 * x2
                a03 += w0 * x3
                a10 += w1 * x0
                a11 += w1 * x1
                a12 += w1 * x2
                a13 += w1 * x3
                a20 += w2 * x0
                a21 += w2 * x1
                a22 += w2 * x2
                a23 += w2 * x3
                a30 += w3 * x0
                a31 += w3 * x1
                a32 += w3 * x2
                a33 += w3 * x3
            out[m, n], out[m + 1, n], out[m + 2, n], out[m + 3, n] = a00, a01, a02, a03
            out[m, n + 1], out[m + 1, n + 1], out[m + 2, n + 1], out[m + 3, n + 1] = a10, a11, a12, a13
            out[m, n + 2], out[m + 1, n + 2], out[m + 2, n + 2], out[m + 3, n + 2] = a20, a21, a22, a23
            out[m, n + 3], out[m + 1, n + 3], out[m + 2, n + 3], out[m + 3, n + 3] = a30, a31, a32, a33
            m += 4
        while m < num_rows:
            b0 = b1 = b2 = b3 = np.float32(0)
            for k in range(num_in):
                b0 += w[n, k] * x[m, k]
                b1 += w[n + 1, k] * x[m, k]
                b2 += w[n + 2, k] * x[m, k]
                b3 += w[n + 3, k] * x[m, k]
            out[m, n], out[m, n + 1], out[m, n + 2], out[m, n + 3] = b0, b1, b2, b3
            m += 1
    for n in range(tiled, num_out):
        m = 0
        while m + 2 <= num_rows:
            a = b = np.float32(0)
            for k in range(num_in):
                a += w[n, k] * x[m, k]
                b += w[n, k] * x[m + 1, k]
            out[m, n] = a
            out[m + 1, n] = b
            m += 2
        if m < num_rows:
            a = np.float32(0)
            for k in range(num_in):
                a += w[n, k] * x[m, k]
            out[m, n] = a


_FLOATS = types.CPointer(types.float32)


@numba.cfunc(types.void(_FLOATS, _FLOATS, _FLOATS, types.intp, types.intp, types.intp), cache=True)
def _at(x, w, out, num_rows, num_in, num_out):  # type: ignore[no-untyped-def]
    rows = numba.carray(x, (num_rows, num_in))
    product(rows, numba.carray(w, (num_out, num_in)), numba.carray(out, (num_rows, num_out)))


# By addresses (x, w, out) and sizes (M, K, N): arrays made of tensors cost more than a small layer's arithmetic.
product_at = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, *[ctypes.c_ssize_t] * 3)(_at.address or 0)
