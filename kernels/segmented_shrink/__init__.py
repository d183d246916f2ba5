"""x A for the rows of many adapters; the first half of `segmented_update`."""
