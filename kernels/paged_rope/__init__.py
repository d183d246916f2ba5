"""Rope, and keys and values written to their pages; the first half of `rope_attention`."""
