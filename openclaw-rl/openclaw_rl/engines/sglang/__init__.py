"""SGLang as a child of the server: its `kind`, its command line (`launch`), its environment's contents (`probe`).

SGLang's pins conflict with ours, so it has an environment of its own and is never imported here. A running SGLang is an
engine like any other: `engines.client` calls it.
"""
