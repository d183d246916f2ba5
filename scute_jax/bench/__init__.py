"""What times the kernels: shapes of a layer, loops over several of them, and the search of tiles.

layer -> work -> timing -> (benchmarks.kernels.table | scute bench)
"""
