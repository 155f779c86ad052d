"""Stand-ins for SGLang's server and slime's driver, for a rehearsal on a machine without a GPU.

`rehearse.sh` puts this folder on the path of a check's environment, so that `sglang` and `toy_driver` are top-level.
"""
