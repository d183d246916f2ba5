"""Poly:  F(x) = x W + bias + c (x A) B,   A = sum_k w_k A_k, B = sum_k w_k B_k, c = 1 / r.

Source: Polytropon (arXiv:2202.13914) and, with n_splits > 1, multi-head routing
(arXiv:2211.03831); peft/tuners/poly. Tensors: poly_lora_A [splits, skills, d_in / splits, r] and
poly_lora_B [splits, skills, r, d_out / splits], poly_router.module_logits [tasks, splits *
skills]. A task weighs the skills of each split by w = sigmoid(logits) / (sum + 1e-12); splits are
parts of the input of A and of the output of B.

The task is not in the file: state it as options={"task_id": n} of load_peft, or as task_id in
adapter_config.json. Each task is an adapter of its own, a LoRA of rank r.
"""

import numpy as np

from scute_jax.normal_form import NormalForm, Term
from scute_jax.peft.activations import sigmoid
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site

EPS = 1e-12


@register("POLY", inert=("init_weights",), replaces_bias=False)
def poly(site: Site) -> NormalForm:
    """x W + c (x A) B, A and B mixed from skills by the weights of one task"""
    site.option("poly_type", "poly", choices=("poly",))
    r, tasks, skills, splits = (
        site.option(name, kind=int, required=True)
        for name in ("r", "n_tasks", "n_skills", "n_splits")
    )
    if min(r, tasks, skills, splits) < 1 or site.d_in % splits or site.d_out % splits:
        site.refuse_field(
            "n_splits",
            f"it has to divide both widths of {site.module} ({site.d_in}, {site.d_out}), and r, "
            "n_tasks and n_skills have to be at least 1",
        )
    task = site.option("task_id", kind=int)
    if task is None or not 0 <= task < tasks:
        site.refuse_field(
            "task_id",
            "a Poly adapter computes another function for each task; state which one is served, "
            f'n from 0 to {tasks - 1}: options={{"task_id": n}} of load_peft, or "task_id": n here',
        )
    i, o = site.d_in // splits, site.d_out // splits
    A = site.tensor("poly_lora_A", (splits, skills, i, r)).astype(np.float64)
    B = site.tensor("poly_lora_B", (splits, skills, r, o)).astype(np.float64)
    logits = site.tensor("poly_router.module_logits", (tasks, splits * skills))[task]
    w = sigmoid(logits.reshape(splits, skills).astype(np.float64))
    w /= w.sum(-1, keepdims=True) + EPS
    A = np.einsum("qs,qsdr->qdr", w, A).reshape(site.d_in, r)
    B = np.einsum("qs,qsrd->rqd", w, B).reshape(r, site.d_out)
    return NormalForm(terms=(Term(A, B, c=1 / r),))
