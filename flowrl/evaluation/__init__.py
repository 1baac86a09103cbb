"""Reports and benchmarks of trained models."""
