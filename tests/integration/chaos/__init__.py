"""Chaos: hundreds of people chat for half an hour while whatever can break breaks, and at the end the ledgers' files
alone must tell the truth.

    python scripts/chaos.py FOLDER [--minutes 30] [--seed 7]

Two servers side by side. The *stub* one: the server as `app` composes it over a stub engine with the pacing of a real
one, an LLM judge that is a stub as well, and the trainer's real loop over a learner that can be computed again. The
*embedded* one: `openclaw-rl serve` in real processes, with the bundled model, the rules judge and the LoRA trainer.
Engine, judge, trainer and server are killed (SIGKILL) at random moments, and both stubs answer some requests with 5xx,
resets, half an answer, garbage, or one byte after the other.

    faults    what goes wrong on the way from a stub to the server
    stubs     the engine and the judge
    roles     what the forked processes do
    people    those who chat, and remember what they saw and how long it took
    sides     the two servers: their processes, their kills, what they must say at the end
    memory    how memory grows while a process lives, and when that is a finding
    report    the progress lines and the summary
    kill/     (beside this package) the audit, the pairing check and the replay, shared with the kill test
"""
