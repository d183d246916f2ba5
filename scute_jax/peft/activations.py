"""Activation functions by their names in transformers, in numpy and float64.

Source: ACT2FN of transformers/activations.py. Those with parameters of their own have the values
that they start with, since nothing trains or saves them.
"""

import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float

Activation = Callable[[Float[np.ndarray, "..."]], Float[np.ndarray, "..."]]

# The parameters that xIELU starts with, in bfloat16: two times 0.8, 0.5 and -1e-6.
XIELU_POSITIVE, XIELU_NEGATIVE, XIELU_BETA, XIELU_EPS = 0.80078125, 0.80078125, 0.5, -9.983778e-07

erf = np.vectorize(math.erf, otypes=[np.float64])


def sigmoid(x):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def softplus(x):
    return np.logaddexp(0, x)


def relu(x):
    return np.maximum(x, 0)


def linear(x):
    return x


def silu(x):
    return x * sigmoid(x)


def gelu(x):
    return 0.5 * x * (1 + erf(x / math.sqrt(2)))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_10(x):
    return gelu(x).clip(-10, 10)


def quick_gelu(x):
    return x * sigmoid(1.702 * x)


def hardswish(x):
    return x * (x + 3).clip(0, 6) / 6


def laplace(x):
    return 0.5 * (1 + erf((x - 0.707107) / (0.282095 * math.sqrt(2))))


def leaky_relu(x):
    return np.where(x > 0, x, 0.01 * x)


def prelu(x):
    return np.where(x > 0, x, 0.25 * x)


def mish(x):
    return x * np.tanh(softplus(x))


def relu2(x):
    return relu(x) ** 2


def relu6(x):
    return x.clip(0, 6)


def sqrtsoftplus(x):
    return np.sqrt(softplus(x))


def xielu(x):
    positive = XIELU_POSITIVE * x * x
    negative = (np.expm1(np.minimum(x, XIELU_EPS)) - x) * XIELU_NEGATIVE
    return np.where(x > 0, positive, negative) + XIELU_BETA * x


ACTIVATIONS: dict[str, Activation] = {
    "gelu": gelu,
    "gelu_10": gelu_10,
    "gelu_accurate": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_new": gelu_tanh,
    "gelu_python": gelu,
    "gelu_python_tanh": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "hardswish": hardswish,
    "laplace": laplace,
    "leaky_relu": leaky_relu,
    "linear": linear,
    "mish": mish,
    "prelu": prelu,
    "quick_gelu": quick_gelu,
    "relu": relu,
    "relu2": relu2,
    "relu6": relu6,
    "sigmoid": sigmoid,
    "silu": silu,
    "sqrtsoftplus": sqrtsoftplus,
    "swish": silu,
    "tanh": np.tanh,
    "xielu": xielu,
}
