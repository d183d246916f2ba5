"""From the rotation R of an OFT back to the skew-symmetric Q that PEFT stores.

Both transforms are functions of Q, so R and Q have common eigenvectors: with eigenvalues i t of Q,
those of R are p(i t), and t is found from them. Each inverse is checked by computing R anew.
"""

import numpy as np
from jaxtyping import Complex, Float

from scute_jax.peft.oft import neumann
from scute_jax.peft.oft_blocks import Blocks, cayley

CLOSE, ROUNDING = 1e-5, 5e-7  # share of R - I, and float32 rounding of numbers near 1


def cayley_inverse(R: Blocks) -> Blocks | None:
    """Q with R = (I - Q) (I + Q)^-1; None if R is not orthogonal, or turns a plane by pi."""
    eye = np.eye(R.shape[-1])
    try:
        Q = np.linalg.solve(np.swapaxes(eye + R, 1, 2), np.swapaxes(eye - R, 1, 2))
    except np.linalg.LinAlgError:
        return None
    Q = (np.swapaxes(Q, 1, 2) - Q) / 2
    return Q if _gives(cayley(Q), R) else None


def neumann_inverse(R: Blocks, coefficients: tuple[float, ...]) -> Blocks | None:
    """Q with R = sum_n coefficients[n] Q^n, or None if there is none."""
    odd, even = (R - np.swapaxes(R, 1, 2)) / 2, (R + np.swapaxes(R, 1, 2)) / 2
    # i odd and even are Hermitian and commute; a mix of both tells eigenvectors apart by both.
    _, U = np.linalg.eigh(1j * odd + np.sqrt(0.5) * even)
    values = np.einsum("npi,npq,nqi->ni", U.conj(), R, U)
    angles = _angles(values, coefficients)
    if angles is None:
        return None
    Q = np.einsum("npi,ni,nqi->npq", U, 1j * angles, U.conj()).real
    Q = (Q - np.swapaxes(Q, 1, 2)) / 2
    return Q if _gives(neumann(Q, coefficients), R) else None


def _angles(
    values: Complex[np.ndarray, "n k"], coefficients: tuple[float, ...]
) -> Float[np.ndarray, "n k"] | None:
    """The real t nearest to 0 with p(i t) = value, for every eigenvalue of R.

    Candidates are the roots of Im p(i t) = Im value; the real part chooses among them.
    """
    powers = np.array(coefficients) * 1j ** np.arange(len(coefficients))  # p(i t) by powers of t
    imaginary = np.trim_zeros(powers.imag, "b")
    if imaginary.size < 2:
        return np.zeros(values.shape) if np.allclose(values, 1) else None
    degree = imaginary.size - 1
    companion = np.zeros((*values.shape, degree, degree))
    companion[..., np.arange(1, degree), np.arange(degree - 1)] = 1
    companion[..., :, -1] = -imaginary[:-1] / imaginary[-1]
    companion[..., 0, -1] += np.imag(values) / imaginary[-1]
    roots = np.linalg.eigvals(companion)
    t = roots.real
    reached = np.polynomial.polynomial.polyval(t, powers)
    # Of two that reach the value, the smaller: where the powers end in t, both do at t = 0.
    misfit = np.abs(reached - values[..., None]) + np.abs(np.imag(roots)) + 1e-9 * np.abs(t)
    best = np.argmin(misfit, axis=-1)
    return np.take_along_axis(t, best[..., None], axis=-1)[..., 0]


def _gives(again: Blocks, R: Blocks) -> bool:
    effect = np.abs(R - np.eye(R.shape[-1])).max()
    return bool(np.abs(again - R).max() <= CLOSE * effect + ROUNDING)
