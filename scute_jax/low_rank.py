"""The closest product of two thin factors to a matrix, plain or weighted by what enters it.

    A B = argmin |D - A B|                  plain: the SVD of D (Eckart and Young)
    A B = argmin E |x D - x A B|            weighted, with M = E[x^T x] the second moments of x

With a root M = K K^T the weighted error is |K^T D - K^T A B|, so A = K^-T U S^1/2 and B = S^1/2 V^T
of the SVD of K^T D. K is the Cholesky factor of M, as in SVD-LLM (arXiv:2403.07378). The scales of
ASVD (arXiv:2312.05821) are this with M cut to its diagonal: an (IA)3 of SmolLM2 at rank 32 misses
67 % of its effect on log-probabilities with the diagonal, 41 % with all of M, 76 % without weights.
A vector stands for a diagonal M, which is what the one-hot rows of an embedding have.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.linalg import solve_triangular

from scute_jax.delta import Delta

EXACT = 1024  # up to this shorter side, a dense matrix is decomposed in full
OVERSAMPLED, SETTLED, MOST = 16, 1e-7, 40  # of the iteration for larger ones
NEGLIGIBLE = 1e-10  # share of the largest singular value
RIDGE = 1e-2  # share of the mean second moment that is added to all: directions no data has shown

Moments = Float[np.ndarray, "d_in d_in"] | Float[np.ndarray, "d_in"]
Root = Float[np.ndarray, "d_in d_in"] | Float[np.ndarray, "d_in"]  # lower triangular, or diagonal


@dataclass(frozen=True)
class Fit:
    """A B ~ D, |D|^2, and the share of it that is left: plain, and weighted by moments."""

    A: Float[np.ndarray, "d_in r"]
    B: Float[np.ndarray, "r d_out"]
    squared_norm: float
    share: float
    weighted_share: float | None  # None without moments


def fit(delta: Delta, rank: int, moments: Moments | None = None) -> Fit:
    """The closest factors of at most `rank`, fewer where D itself has less, in float32.

    Shares are of the factors as they are returned; for D = 0 they are 0.
    """
    root = None if moments is None else root_of(moments)
    U, s, Vt = leading(_times_root(root, delta.left), delta.right, rank)
    kept = int((s > NEGLIGIBLE * s[0]).sum()) if len(s) and s[0] > 0 else 0
    U, Vt, balance = U[:, :kept], Vt[:kept], np.sqrt(s[:kept])
    A = np.float32(_through_root(root, U * balance))
    B = np.float32(balance[:, None] * Vt)
    whole, rest = _errors(None, delta, A, B)
    weighted = None if root is None else _share(*_errors(root, delta, A, B))
    return Fit(A, B, whole, _share(whole, rest), weighted)


def root_of(moments: Moments) -> Root:
    """K with K K^T = M, made regular."""
    M = np.asarray(moments, np.float64)
    if M.ndim == 1:
        return np.sqrt(M + RIDGE * M.mean())
    return np.linalg.cholesky(M + RIDGE * np.diag(M).mean() * np.eye(len(M)))


def leading(
    left: Float[np.ndarray, "n k"], right: Float[np.ndarray, "k m"] | None, rank: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first `rank` singular triplets of left right (or of left), in float64."""
    if right is not None:
        Q, S = np.linalg.qr(left)
        P, T = np.linalg.qr(right.T)
        U, s, Vt = np.linalg.svd(S @ T.T)
        r = min(rank, len(s))
        return Q @ U[:, :r], s[:r], Vt[:r] @ P.T
    if min(left.shape) <= max(EXACT, rank + OVERSAMPLED):
        U, s, Vt = np.linalg.svd(left, full_matrices=False)
        return U[:, :rank], s[:rank], Vt[:rank]
    return _iterated(left, rank)


def _iterated(D: Float[np.ndarray, "n m"], rank: int):
    """The same by iteration on a random subspace, until the energy that it holds is settled.

    Source: algorithm 4.4 of Halko, Martinsson and Tropp (arXiv:0909.4061).
    """
    width = rank + OVERSAMPLED
    Q = np.linalg.qr(D @ np.random.default_rng(0).standard_normal((D.shape[1], width)))[0]
    U, s, Vt = np.linalg.svd(Q.T @ D, full_matrices=False)
    for _ in range(MOST):
        held = _squared(s[:rank])
        Q = np.linalg.qr(D @ Vt.T)[0]
        U, s, Vt = np.linalg.svd(Q.T @ D, full_matrices=False)
        if _squared(s[:rank]) - held <= SETTLED * held:
            break
    return (Q @ U)[:, :rank], s[:rank], Vt[:rank]


def _times_root(root: Root | None, left: np.ndarray) -> np.ndarray:
    """K^T left."""
    if root is None:
        return left
    return root[:, None] * left if root.ndim == 1 else root.T @ left


def _through_root(root: Root | None, U: np.ndarray) -> np.ndarray:
    """K^-T U."""
    if root is None:
        return U
    return U / root[:, None] if root.ndim == 1 else solve_triangular(root, U, trans="T", lower=True)


def _errors(root: Root | None, delta: Delta, A: np.ndarray, B: np.ndarray) -> tuple[float, float]:
    """|K^T D|^2 and |K^T (D - A B)|^2."""
    left, A = (_times_root(root, np.asarray(a, np.float64)) for a in (delta.left, A))
    if delta.right is None:
        return _squared(left), _squared(left - A @ B)
    both = np.hstack([left, -A]), np.vstack([delta.right, B])
    return _squared_product(left, delta.right), _squared_product(*both)


def _share(whole: float, rest: float) -> float:
    return rest / whole if whole else 0.0


def _squared(D: np.ndarray) -> float:
    return float(np.vdot(D, D))


def _squared_product(left: np.ndarray, right: np.ndarray) -> float:
    """|left right|^2 without the product."""
    S, T = np.linalg.qr(left)[1], np.linalg.qr(right.T)[1]
    return _squared(S @ T.T)
