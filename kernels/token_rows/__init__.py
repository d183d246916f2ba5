from scute_jax.kernels.token_rows.api import replace_columns, replace_rows

__all__ = ["replace_columns", "replace_rows"]
