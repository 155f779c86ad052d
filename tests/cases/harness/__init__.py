"""Run the machine-readable cases of `tests/data/open_cases.jsonl` against the real server.

Real: the server as `app` composes it (proxy, sessions, ledger, judge, method), in a process of its own, over HTTP.
Stubs, as each case scripts them: the engine (dialect over HTTP), the judge (an OpenAI-compatible URL), the teacher.

    cases    the file
    model    the tokenizer and template, and ids and text of it
    host     server processes, forked from a process that has imported the server
    stubs    the scripted engine, judge and teacher
    policy   a script for an engine whose weights change
    listen   either of them on a port
    trainer  a trainer without a model
    play     a case's requests, in order or together, and the clients' answers
    evidence data that a case's checks may read
    checks   the comparisons
"""
