"""One file per question; run them as modules, e.g. ``torchrun --nproc-per-node 4 -m benchmarks.pipeline``."""
