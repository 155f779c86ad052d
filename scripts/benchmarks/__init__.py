"""Benchmarks: each module prints ratios that it measured in one run, and writes its figures to `results/`.

scripts/benchmarks.sh NAME [FLAG …]
"""
