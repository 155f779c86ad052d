"""Client side of agents' episodes: a runner, a sandbox, and environments. No torch, and nothing of the server.

`runner` runs many episodes at once against a server's `/v1/episodes`. An environment (`environment`) plays one episode:
it asks the policy, acts in a `sandbox`, and checks what came of it. `environments/` has the shipped ones.
"""
