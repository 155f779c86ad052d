"""Kill test: the campaign kills server and trainer at hundreds of random transitions while clients chat. After each
kill the ledger's file alone is audited (`openclaw_rl.testing.ledger_audit`).

    PYTHONPATH=tests/integration python -m kill --seed 7 --kills 200 FOLDER

Real: the server as `server.app` composes it (ledger, proxy, sessions, judge, method, trainer API, publisher, engine
readiness), the trainer's loop, checkpoints and client. Stubs: the engine (hashes instead of a model, over HTTP) and the
learner (one tensor and AdamW). The kills come from hooks that only these processes install.

    fork_server  processes forked from one that has imported everything: a start takes a blink
    points       where a process may be killed, and the hooks that do it
    roles        what the processes do
    toy          the tokenizer, and the learner
    chats        people with corrections and thanks, who remember every reply they saw finish
    replay       what the weights and the log-probs must be, computed again from the ledger's rows
    campaign     kills, restarts, operators, the way to the fixed point
"""
