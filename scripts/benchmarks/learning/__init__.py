"""Parts of the learning benchmarks: the model under test, a sampler for many policies at once, measures, a report."""
