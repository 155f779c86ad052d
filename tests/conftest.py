"""For the whole suite: no example is failed for being slow. A busy machine is not a bug, and time is for benchmarks."""

from hypothesis import settings

settings.register_profile("untimed", parent=settings(), deadline=None)
settings.load_profile("untimed")
