"""What PEFT has and is not served: methods and fields, with the reason and what can be done.

What is served changes a projection by a few vectors, rotations, low-rank terms or single entries,
the same for every token; these do something else. Sources: peft/tuners of PEFT 0.21.
"""

CONVERT = (
    "Make a LoRA of it with `scute convert`, which says what that leaves out, or merge it into its "
    "own copy of the base"
)
ALONE = "No LoRA stands for it: run it by itself, with PEFT"
MERGE = "Train without it, or merge the adapter into its own copy of the base"

DENSE = "an update of full rank, or nearly so, which is not served beside other adapters"
_VIRTUAL = "it puts learned vectors in front of the prompt, and changes no projection"
_PREFIX = "it puts learned keys and values in front of the cache, and changes no projection"

TYPES = {
    "HIRA": f"it multiplies W entry by entry with the product of its factors: {DENSE}. {CONVERT}",
    "C3A": f"it adds a matrix of circulant blocks, applied by FFT: {DENSE}. {CONVERT}",
    "OSF": f"it replaces the smaller singular triplets of W, by default half of them: {DENSE}. "
    f"{CONVERT}",
    "FROD": f"it puts another matrix in the place of W, U (S + diag(l)) V^T: {DENSE}. {CONVERT}",
    "ADAMSS": "which outputs its factors write to is not in the file, it follows from a k-means "
    f"clustering by scikit-learn when PEFT loads it. {CONVERT}",
    "LILY": "it weighs its experts by the mean of a router over all tokens of the batch, so that a "
    f"request has no answer of its own. {ALONE}",
    "XLORA": "a classifier that reads the model's hidden states weighs its LoRAs anew for every "
    "token. Serve one of its LoRAs, or run it by itself, with PEFT",
    "SHADOW": f"it runs a network of its own beside the decoder layers. {ALONE}",
    "ADAPTION_PROMPT": "it adds gated attention over learned prompts to the attention of the upper "
    f"layers, and changes no projection. {ALONE}",
    "PROMPT_TUNING": f"{_VIRTUAL}. {ALONE}",
    "MULTITASK_PROMPT_TUNING": f"{_VIRTUAL}. {ALONE}",
    "P_TUNING": f"{_VIRTUAL}. {ALONE}",
    "CPT": f"{_VIRTUAL}. {ALONE}",
    "PREFIX_TUNING": f"{_PREFIX}. {ALONE}",
    "CARTRIDGE": f"{_PREFIX}. {ALONE}",
}

# Fields that, when set, make another function of a method that is served: reason, what can be done.
FIELDS = {
    "target_parameters": (
        "it adapts parameters that are not those of a linear projection",
        MERGE,
    ),
    "layer_replication": ("it is made for a base with repeated layers", MERGE),
    "arrow_config": (
        "Arrow chooses among several adapters for each token",
        "Serve one of its adapters, or run it by itself, with PEFT",
    ),
    "use_qalora": ("QALoRA pools the input in groups of a GPTQ base", MERGE),
}
