"""SGLang as a supervised child of the server: what its environment holds (`probe`), how it is started (`launch`).

SGLang's pins conflict with ours, so it lives in an environment of its own and is never imported here. Once it runs it
is an engine like any other: `engines.http` talks to it.
"""
