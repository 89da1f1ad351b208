"""A pytest plugin (`-p interpreted`, with this folder in PYTHONPATH): the conformance kit on Triton's
interpreter as interpreter.py patches it. TRITON_INTERPRET=1 must stand in the environment."""

import interpreter

interpreter.install()
