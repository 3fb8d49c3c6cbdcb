"""Benchmarks of the GPU half, one file per question: ``python -m benchmarks.gpu`` runs them all."""
