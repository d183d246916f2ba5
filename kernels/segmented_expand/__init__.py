"""h * s + b + low B for the rows of many adapters; the second half of `segmented_update`."""
