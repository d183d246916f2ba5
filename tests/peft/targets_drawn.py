"""Which projections of the tiny base an adapter targets, drawn by hypothesis."""

from hypothesis import strategies as st
from test_peft_names import MODULES

modules = st.sets(st.sampled_from(MODULES), min_size=1).map(sorted)
with_head = st.sets(st.sampled_from((*MODULES, "lm_head")), min_size=1).map(sorted)
bases = st.sampled_from(["plain", "biased", "qwen2"])
