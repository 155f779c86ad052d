"""What the learning benchmarks share: a model under test, a sampler for many policies at once, measures, a report."""
