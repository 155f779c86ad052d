"""Shipped environments: miniatures that the bundled model can learn, and adapters to Harbor and mini-swe-agent."""
