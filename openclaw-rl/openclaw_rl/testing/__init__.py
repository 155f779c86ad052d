"""Fakes that implement our protocols, for tests, kill tests and benchmarks. They do not import torch.

    FakeEngine    an engine in this process: scripted or deterministic replies, failures and pauses on command
    stub_app      the same engine over HTTP, speaking the dialect: `python -m openclaw_rl.testing --port 30001`
    FakeJudge     scripted verdicts

The toy policy's log-probs depend on the adapter's bytes, so scoring a reply shows which versions sampled it.
"""

from openclaw_rl.testing.fake_engine import FakeEngine, Scripted
from openclaw_rl.testing.fake_judge import FakeJudge
from openclaw_rl.testing.stub_engine import stub_app
from openclaw_rl.testing.toy_policy import ToyPolicy, adapter_seed

__all__ = ["FakeEngine", "FakeJudge", "Scripted", "ToyPolicy", "adapter_seed", "stub_app"]
