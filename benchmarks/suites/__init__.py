"""Suites in stock style, as users write them, on 4 gloo ranks.

Only their base is chosen from outside (``benchmarks.arms``); by hand:
``BENCH_ARM=stock python -m unittest -v benchmarks.suites.c10d``.
"""
